"""Sampling against transformers' logits processors: scores, kept sets, and what is drawn."""

from __future__ import annotations

import numpy as np
import pytest

from smollm2.sampling import Sampler, SamplingParams, log_softmax
from smollm2.sampling.processors import cutoff, penalize_repetition, temper

torch = pytest.importorskip("torch", reason="torch is the reference here and is not installed")
processors = pytest.importorskip(
    "transformers.generation.logits_process",
    reason="transformers is the reference here and is not installed",
)


def reference(logits: np.ndarray, ids: list[int], **options: float) -> np.ndarray:
    """What transformers makes of logits, in its own order; -inf for what it drops."""
    makers = {
        "repetition_penalty": processors.RepetitionPenaltyLogitsProcessor,
        "temperature": processors.TemperatureLogitsWarper,
        "top_k": processors.TopKLogitsWarper,
        "top_p": processors.TopPLogitsWarper,
        "min_p": processors.MinPLogitsWarper,
    }
    chain = processors.LogitsProcessorList(
        [make(options[name]) for name, make in makers.items() if name in options]
    )
    scores = chain(torch.tensor([ids], dtype=torch.long), torch.from_numpy(logits[None].copy()))
    return scores[0].numpy()


def random_logits(seed: int, size: int = 49152) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.normal(rng.uniform(-5, 15), rng.uniform(0.5, 4), size).astype(np.float32)


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores.astype(np.float64) - scores.max())
    return weights / weights.sum()


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.09, 1.3, 2.0])
def test_repetition_penalty(penalty):
    # table: row 26
    logits = random_logits(0, 500)
    ids = np.random.default_rng(1).integers(0, 500, 300)
    ours = logits.copy()
    penalize_repetition(ours, np.unique(ids), 1, penalty)
    theirs = reference(logits, ids.tolist(), repetition_penalty=penalty)
    np.testing.assert_allclose(ours, theirs, rtol=3e-7)


FILTERS = [
    {"top_k": 1},
    {"top_k": 3},
    {"top_k": 50},
    {"top_p": 0.1},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"min_p": 0.5},
    {"top_k": 40, "top_p": 0.9},
    {"top_k": 40, "top_p": 0.95, "min_p": 0.1},
    {"top_p": 0.9, "min_p": 0.02},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("temperature", [0.3, 0.8, 1.5])
def test_kept_sets_are_equal(filters, temperature):
    # table: row 88; cases: N14
    for seed in range(4):
        logits = random_logits(seed)
        scores = temper(logits, temperature)
        ours = scores >= cutoff(scores, **filters)
        theirs = np.isfinite(reference(logits, [0], temperature=temperature, **filters))
        # Their sums are float32: at the edge of top-p a few of thousands may fall otherwise.
        slack = round(2e-4 * theirs.sum()) if "top_p" in filters else 0
        assert np.count_nonzero(ours != theirs) <= slack
        assert ours[logits.argmax()]


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 1.3, "top_k": 3},
        {"repetition_penalty": 1.2, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
        {"top_p": 0.8},
    ],
    ids=str,
)
def test_draws_follow_transformers_probabilities(options):
    # cases: N14; table: row 88
    logits = random_logits(7, 50) / 2
    ids = [3, 1, 4, 1, 5, 9, 2, 6, int(logits.argmax())]
    probabilities = softmax(reference(logits, ids, temperature=0.8, **options))
    sampler = Sampler(SamplingParams(temperature=0.8, seed=5, **options))
    count = 5000
    chosen = [
        sampler.choose(logits, prompt_ids=ids[:4], output_ids=ids[4:], position=position)
        for position in range(count)
    ]
    frequencies = np.bincount(chosen, minlength=50) / count
    assert not frequencies[probabilities == 0].any()
    deviation = np.sqrt(probabilities * (1 - probabilities) / count)
    assert (np.abs(frequencies - probabilities) <= 5 * deviation + 1e-12).all()


def test_greedy_after_a_penalty():
    # cases: N10
    for seed in range(5):
        logits = random_logits(seed)
        ids = np.argsort(-logits)[:20].tolist()
        for penalty in (1.0, 1.1, 1.7):
            sampler = Sampler(SamplingParams(repetition_penalty=penalty))
            ours = sampler.choose(logits, prompt_ids=ids, output_ids=(), position=20)
            assert ours == int(reference(logits, ids, repetition_penalty=penalty).argmax())


def test_log_softmax():
    # table: row 89
    logits = np.stack([random_logits(seed) for seed in range(3)])
    theirs = torch.from_numpy(logits).double().log_softmax(-1).numpy()
    np.testing.assert_allclose(log_softmax(logits), theirs, rtol=3e-7, atol=2e-6)
