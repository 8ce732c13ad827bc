"""What generation returns: pieces while it runs, a Generation with its stats at the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, nan
from typing import Literal

from smollm2.sampling import SamplingParams, TokenLogprob
from smollm2.stopping import FinishReason

Origin = Literal["prompt", "generated", "end"]


@dataclass(frozen=True, slots=True)
class Piece:
    """The text of one token, in whole characters: empty while a character is incomplete.

    ``origin`` tells a token of the prompt from a generated one; the last piece of a stream is
    the ``"end"``: it carries the finish reason, text that was held back, and no token.
    """

    text: str
    token_id: int | None = None
    origin: Origin = "generated"
    logprob: TokenLogprob | None = None
    finish_reason: FinishReason | None = None

    def __str__(self) -> str:
        return self.text

    @property
    def is_terminal(self) -> bool:
        """Whether nothing follows this piece."""
        return self.origin == "end"


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts in tokens, times in seconds.

    ``cached_tokens`` of the prompt were in the KV cache already; ``ttft`` runs from the call to
    the first token, ``prefill_seconds`` is the forward passes of the prompt alone, and
    ``decode_seconds`` is all after the first token.
    """

    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    ttft: float
    prefill_seconds: float
    decode_seconds: float
    seed: int

    @property
    def total_tokens(self) -> int:
        """Prompt and generated tokens together."""
        return self.prompt_tokens + self.generated_tokens

    @property
    def total_seconds(self) -> float:
        """From the call to the last token."""
        return self.ttft + self.decode_seconds

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens that were computed, per second of prefill; 0 where there was none."""
        return _rate(self.prompt_tokens - self.cached_tokens, self.prefill_seconds)

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens after the first, per second of decode; 0 where there was none."""
        return _rate(self.generated_tokens - 1, self.decode_seconds)

    def summary(self) -> str:
        """One line for people: tokens computed and generated, their rates, and the wait."""
        computed = self.prompt_tokens - self.cached_tokens
        of = f" of {self.prompt_tokens}" if self.cached_tokens else ""
        return (
            f"{computed}{of} tokens in{_at(self.prefill_tokens_per_second)} · "
            f"{self.generated_tokens} out{_at(self.decode_tokens_per_second)} · "
            f"first after {self.ttft:.2f} s"
        )


@dataclass(frozen=True, slots=True)
class Generation:
    """The result of one request.

    ``text`` is the completion without stop strings and control tokens (after the prompt where
    ``echo`` was asked for); ``token_ids`` are all generated ids, a final stop id included;
    ``stopped_by`` is the stop id or stop string that ended it, if one did; ``logprobs`` has one
    entry per generated token where they were asked for; ``params`` has the seed filled in, so
    that ``generate(prompt, params)`` repeats the result.
    """

    prompt: str | None
    prompt_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stopped_by: int | str | None
    logprobs: tuple[TokenLogprob, ...] | None
    stats: Stats
    params: SamplingParams = field(repr=False)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Score:
    """How likely the model finds a text.

    ``logprobs[i]`` is the natural log-probability of ``token_ids[i]`` after those before it;
    the first token follows nothing and has None.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]

    @property
    def total(self) -> float:
        """Sum of the log-probabilities."""
        return sum(value for value in self.logprobs if value is not None)

    @property
    def mean(self) -> float:
        """Mean log-probability of a token; NaN where only one token is there."""
        scored = len(self.token_ids) - 1
        return self.total / scored if scored > 0 else nan

    @property
    def perplexity(self) -> float:
        """``exp(-mean)``."""
        return exp(-self.mean)


def _at(rate: float) -> str:
    return f" at {rate:.0f}/s" if rate else ""


def _rate(count: int, seconds: float) -> float:
    return count / seconds if count > 0 and seconds > 0 else 0.0
