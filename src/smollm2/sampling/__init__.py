"""Sampling: how logits become the next token, in one definition that every backend repeats."""

from smollm2.sampling.logprobs import TokenLogprob, log_softmax, logprob_of
from smollm2.sampling.params import SamplingOptions, SamplingParams
from smollm2.sampling.sampler import Choice, Sampler

__all__ = [
    "Choice",
    "Sampler",
    "SamplingOptions",
    "SamplingParams",
    "TokenLogprob",
    "log_softmax",
    "logprob_of",
]
