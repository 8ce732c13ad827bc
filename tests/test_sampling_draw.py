"""The draw: its hash by vectors and by a scalar reference, its frequencies, its independence."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from smollm2.sampling import Sampler, SamplingParams
from smollm2.sampling.draw import UNLIKELY, draw, mix, uniforms

MASK = 2**32 - 1


def mix_of(number: int) -> int:
    """lowbias32 over Python's integers."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        number ^= number >> shift
        number = number * factor & MASK
    return number ^ number >> 16


def uniform_of(seed: int, position: int, token_id: int) -> float:
    key = mix_of(seed & MASK ^ mix_of(seed >> 32))
    bits = mix_of(mix_of(key ^ position) ^ token_id)
    return ((bits >> 9) + 0.5) / 2**23


def draws(scores: np.ndarray, seed: int, count: int) -> np.ndarray:
    ids = np.arange(len(scores))
    return np.array([draw(scores, ids, seed, position) for position in range(count)])


def chi_square_is_plausible(observed: np.ndarray, probabilities: np.ndarray) -> bool:
    """Whether counts fit probabilities within five standard deviations of chi-square."""
    expected = probabilities * observed.sum()
    rare = expected < 5
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    used = expected > 0
    assert not observed[~used].any()
    statistic = ((observed[used] - expected[used]) ** 2 / expected[used]).sum()
    freedom = used.sum() - 1
    return abs(statistic - freedom) < 5 * math.sqrt(2 * freedom)


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores.astype(np.float64) - scores.max())
    return weights / weights.sum()


def test_mix_vectors():
    # table: §2.2, lowbias32
    mixed = mix(np.array([0, 1, 42], dtype=np.uint32))
    assert mixed.tolist() == [0, 0x688990C0, 0x172733C2]
    assert [mix_of(number) for number in (0, 1, 42)] == [0, 0x688990C0, 0x172733C2]


@given(
    seed=st.integers(0, 2**63 - 1),
    position=st.integers(0, 2**31),
    ids=st.lists(st.integers(0, 49151), min_size=1, max_size=5),
)
def test_uniforms_equal_the_definition_exactly(seed, position, ids):
    expected = [uniform_of(seed, position, token_id) for token_id in ids]
    assert uniforms(np.array(ids), seed, position).tolist() == expected


def test_seeds_below_32_bits_give_the_plain_key():
    key = mix_of(123)
    bits = mix_of(mix_of(key ^ 7) ^ 9)
    assert uniforms(np.array([9]), 123, 7)[0] == ((bits >> 9) + 0.5) / 2**23


def test_high_bits_of_the_seed_count():
    ids = np.arange(1000)
    seeds = [5, 5 + 2**32, 5 + 2**33, 5 + 2**62]
    rows = {uniforms(ids, seed, 0).tobytes() for seed in seeds}
    assert len(rows) == len(seeds)


@settings(deadline=None)
@given(
    scores=st.lists(st.floats(-15, 0, width=32), min_size=1, max_size=40),
    seed=st.integers(0, 2**63 - 1),
    position=st.integers(0, 8191),
)
def test_draw_equals_the_definition_in_float64(scores, seed, position):
    values = [
        score - math.log(-math.log(uniform_of(seed, position, index)))
        for index, score in enumerate(scores)
    ]
    chosen = draw(np.array(scores, dtype=np.float32), np.arange(len(scores)), seed, position)
    assert values[chosen] >= max(values) - 1e-5


def test_the_noise_has_the_bounds_that_UNLIKELY_rests_on():  # noqa: N802
    ends = np.array([2.0**-24, 1 - 2.0**-24], dtype=np.float32)
    low, high = -np.log(-np.log(ends))
    assert np.isfinite([low, high]).all()
    assert low - high > UNLIKELY


def test_ids_rather_than_places_decide():
    scores = np.linspace(-2, 0, 50).astype(np.float32)
    ids = np.arange(100, 150)
    order = np.random.default_rng(0).permutation(50)
    for position in range(30):
        chosen = ids[draw(scores, ids, 4, position)]
        assert ids[order][draw(scores[order], ids[order], 4, position)] == chosen


@pytest.mark.parametrize("seed", [0, 1, 42, 2**32 - 1, 2**40, 2**63 - 1])
def test_frequencies_match_softmax(seed):
    # table: row 25
    scores = np.random.default_rng(3).normal(0, 1.5, 40).astype(np.float32)
    counts = np.bincount(draws(scores, seed, 8000), minlength=40)
    assert chi_square_is_plausible(counts, softmax(scores))


def test_chi_square_sees_a_wrong_temperature():
    scores = np.random.default_rng(3).normal(0, 1.5, 40).astype(np.float32)
    counts = np.bincount(draws(scores, 0, 8000), minlength=40)
    assert not chi_square_is_plausible(counts, softmax(scores * np.float32(0.9)))


def test_seeds_and_positions_are_independent():
    # The pairs of draws at neighbouring positions, and under neighbouring seeds, are uniform.
    scores = np.zeros(4, dtype=np.float32)
    mine, other = draws(scores, 7, 8000), draws(scores, 8, 8000)
    flat = np.full(16, 1 / 16)
    for first, second in ((mine[:-1:2], mine[1::2]), (mine, other)):
        assert chi_square_is_plausible(np.bincount(first * 4 + second, minlength=16), flat)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_sampler_frequencies_match_tempered_softmax(temperature):
    # table: row 25
    logits = np.random.default_rng(5).normal(4, 2, 60).astype(np.float32)
    sampler = Sampler(SamplingParams(temperature=temperature, seed=11))
    chosen = [
        sampler.choose(logits, prompt_ids=(), output_ids=(), position=position)
        for position in range(6000)
    ]
    counts = np.bincount(chosen, minlength=60)
    assert chi_square_is_plausible(counts, softmax(logits / temperature))


def test_a_draw_is_independent_of_all_else():
    # table: row 87; cases: N5
    rng = np.random.default_rng(6)
    rows = rng.normal(0, 2, (64, 300)).astype(np.float32)
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in range(64)]
    alone = [
        Sampler(one).choose(row, prompt_ids=(), output_ids=(), position=9)
        for one, row in zip(params, rows, strict=True)
    ]
    samplers = [Sampler(one) for one in params]
    for _ in range(2):
        for index in rng.permutation(64):
            sampler, row = samplers[index], rows[index]
            again = sampler.choose(row, prompt_ids=(), output_ids=(), position=9)
            assert again == alone[index]
    assert len(set(alone)) > 20
