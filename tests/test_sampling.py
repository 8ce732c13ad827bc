"""Sampler.choose: greedy, penalties, biases, masks, their order, and logits that are no numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra.numpy import arrays

from smollm2.errors import InputError, NumericsError
from smollm2.sampling import Sampler, SamplingParams
from smollm2.sampling.processors import cutoff, penalize_repetition, tally, temper

NONE = np.array([], dtype=np.intp)


def logits_of(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def choose(logits, *, prompt=(), output=(), position=0, stop_ids=(), **options) -> int:
    sampler = Sampler(SamplingParams(**options), stop_ids)
    return sampler.choose(logits, prompt_ids=prompt, output_ids=output, position=position)


def chosen_at(logits, positions=200, **options) -> set[int]:
    return {choose(logits, position=position, seed=1, **options) for position in range(positions)}


# --- greedy ---


def test_greedy_is_the_first_of_ties():
    assert choose(logits_of(1, 5, 5, 0, 5)) == 1
    assert choose(logits_of(1, 5, 5, 0, 5), allowed_ids=[4, 2]) == 2


@settings(deadline=None)
@given(
    logits=arrays(np.float32, 30, elements=st.floats(-30, 30, width=32)),
    temperature=st.sampled_from([1e-300, 1e-45, 1e-30, 1e-8]),
)
def test_temperature_towards_zero_equals_greedy(logits, temperature):
    # table: row 66
    ordered = np.sort(logits)
    if ordered[-1] - ordered[-2] > 1e-5:
        assert choose(logits, temperature=temperature, seed=3) == choose(logits)


def test_a_huge_temperature_is_uniform():
    assert chosen_at(logits_of(0, 30, -30), temperature=1e300) == {0, 1, 2}


def test_same_seed_same_choice():
    # table: row 27
    logits = np.random.default_rng(0).normal(0, 1, 500).astype(np.float32)
    runs = [
        [choose(logits, temperature=1, seed=seed, position=place) for place in range(20)]
        for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1] != runs[2]


def test_a_seed_is_chosen_where_none_is_given():
    sampler = Sampler(SamplingParams(temperature=1.0))
    logits = np.zeros(1000, dtype=np.float32)
    chosen = sampler.choose(logits, prompt_ids=(), output_ids=(), position=5)
    assert choose(logits, temperature=1.0, seed=sampler.params.seed, position=5) == chosen
    assert Sampler(SamplingParams(temperature=1.0)).params.seed != sampler.params.seed


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_stay_as_they_are(temperature):
    logits = np.random.default_rng(0).normal(0, 1, 50).astype(np.float32)
    before = logits.copy()
    options = {
        "repetition_penalty": 1.5,
        "presence_penalty": 1.0,
        "logit_bias": {3: 4.0},
        "allowed_ids": [1, 3, 5],
        "top_p": 0.9,
    }
    choose(logits, prompt=[1], output=[2], temperature=temperature, seed=0, **options)
    assert np.array_equal(logits, before)


# --- penalties ---


def test_repetition_penalty_divides_positive_and_multiplies_the_rest():
    # table: row 26
    scores = logits_of(2, -2, 0, 3, 3)
    penalize_repetition(scores, np.array([0, 1, 2, 3]), 1, 2.0)
    assert scores.tolist() == [1, -4, 0, 1.5, 3]


def test_repetition_counts_raise_the_penalty_to_the_occurrences():
    # table: row 26
    scores = logits_of(8, -2, 5)
    penalize_repetition(scores, np.array([0, 1]), np.array([3, 2]), 2.0)
    assert scores.tolist() == [1, -8, 5]
    once = {"prompt": [0, 0], "output": [0], "repetition_penalty": 2.0}
    assert choose(logits_of(8, 3, 0), **once) == 0
    assert choose(logits_of(8, 3, 0), **once, repetition_counts=True) == 1


@given(arrays(np.float32, 8, elements=st.floats(-(2.0**100), 2.0**100, width=32)))
def test_a_penalty_of_one_is_identity(logits):
    # table: row 26
    scores = logits.copy()
    penalize_repetition(scores, np.arange(8), np.arange(8), 1.0)
    assert scores.tobytes() == logits.tobytes()


@pytest.mark.parametrize("penalty", [1e-300, 1e-9, 1.5, 1e9, 1e300])
def test_extreme_penalties_leave_numbers(penalty):
    scores = logits_of(20, -20, 0, 3e38, -3e38)
    penalize_repetition(scores, np.arange(5), np.full(5, 8000), penalty)
    assert np.isfinite(scores).all()
    assert scores[2] == 0


def test_repetition_looks_at_prompt_and_output():
    # cases: N9
    logits = logits_of(3, 2.9, 2.8)
    assert choose(logits, prompt=[0], repetition_penalty=2) == 1
    assert choose(logits, prompt=[0], output=[1], repetition_penalty=2) == 2


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_presence_and_frequency_look_at_the_output_only(name):
    # cases: N9
    logits = logits_of(3, 2.9, 2.8)
    assert choose(logits, prompt=[0, 0, 0], **{name: 2}) == 0
    assert choose(logits, prompt=[0], output=[0], **{name: 2}) == 1
    assert choose(logits_of(3, 3.5), output=[0], **{name: -2}) == 0


def test_presence_counts_once_and_frequency_each_time():
    logits = logits_of(10, 7)
    assert choose(logits, output=[0] * 9, presence_penalty=2) == 0
    assert choose(logits, output=[0], frequency_penalty=2) == 0
    assert choose(logits, output=[0, 0], frequency_penalty=2) == 1


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_stop_ids_are_exempt(name):
    # cases: N13
    logits = logits_of(3, 2.9, 0)
    options = {"prompt": [0], "output": [0, 0], name: 1.9}
    assert choose(logits, **options) == 1
    assert choose(logits, **options, stop_ids={0, 2}) == 0
    assert (
        Sampler(SamplingParams(stop_ids=(0,), **{name: 1.9})).choose(
            logits, prompt_ids=[0], output_ids=[0, 0], position=3
        )
        == 0
    )


def test_tally_names_a_token_outside_the_vocabulary():
    tokens, counts = tally([5, 3, 5, 0], np.array([3]), 6)
    assert (tokens.tolist(), counts.tolist()) == ([0, 5], [1, 2])
    assert [part.tolist() for part in tally([], NONE, 6)] == [[], []]
    for wrong in (6, -1):
        with pytest.raises(InputError, match=f"token id {wrong} is not in the vocabulary of 6"):
            tally([1, wrong], NONE, 6)


# --- bias and mask, and the order ---


def test_logit_bias_is_added():
    assert choose(logits_of(1, 2, 3), logit_bias={0: 2.5}) == 0
    assert choose(logits_of(1, 2, 3), logit_bias={2: -100, 1: -100}) == 0
    assert chosen_at(logits_of(0, 0, 0), logit_bias={1: -100}, temperature=1.0) == {0, 2}


def test_bias_comes_after_the_penalty():
    # (4 + 3) / 2 would lose against 4; 4 / 2 + 3 wins.
    assert choose(logits_of(4, 4), prompt=[0], repetition_penalty=2, logit_bias={0: 3}) == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
def test_only_allowed_ids_are_chosen(temperature):
    logits = np.linspace(5, 0, 60).astype(np.float32)
    options = {"allowed_ids": [40, 7, 22, 7], "temperature": temperature}
    assert chosen_at(logits, **options) == ({7} if temperature == 0 else {7, 22, 40})
    assert chosen_at(logits, logit_bias={0: 100}, **options) <= {7, 22, 40}


def test_a_mask_is_the_same_as_no_hope_elsewhere():
    logits = np.random.default_rng(2).normal(0, 1, 100).astype(np.float32)
    allowed = [90, 17, 5, 44, 71]
    hopeless = np.full_like(logits, -np.inf)
    hopeless[allowed] = logits[allowed]
    for position in range(100):
        options = {"temperature": 1.0, "top_p": 0.9, "seed": 8, "position": position}
        assert choose(logits, allowed_ids=allowed, **options) == choose(hopeless, **options)


def test_filters_come_after_the_mask():
    logits = logits_of(9, 8, 7, 6, 5)
    masked = {"allowed_ids": [2, 3, 4], "temperature": 5.0}
    assert chosen_at(logits, top_k=2, **masked) == {2, 3}
    assert chosen_at(logits, top_p=1e-9, **masked) == {2}
    assert chosen_at(logits, min_p=1, **masked) == {2}


def test_temperature_comes_before_top_p():
    logits = np.log(logits_of(0.9, 0.05, 0.05))
    assert chosen_at(logits, temperature=1.0, top_p=0.8) == {0}
    assert chosen_at(logits, temperature=100.0, top_p=0.8) == {0, 1, 2}


def test_top_p_works_on_what_top_k_left():
    # table: row 88. Of 0.4 0.3 0.3: top-k 2 and its tie keep all; of 0.4 0.35 0.25 it keeps
    # two, and 0.4 / 0.75 is above 0.53, so top-p keeps one.
    logits = np.log(logits_of(0.4, 0.35, 0.25))
    assert chosen_at(logits, temperature=1.0, top_p=0.53) == {0, 1}
    assert chosen_at(logits, temperature=1.0, top_p=0.53, top_k=2) == {0}


# --- the filters ---


def kept(scores, **filters) -> list[int]:
    scores = temper(np.asarray(scores, dtype=np.float32), 1.0)
    return np.flatnonzero(scores >= cutoff(scores, **filters)).tolist()


def test_ties_with_the_smallest_kept_score_are_kept():
    # table: row 88
    assert kept([3, 1, 2, 2, 0], top_k=2) == [0, 2, 3]
    assert kept(np.log([0.4, 0.2, 0.2, 0.2]), top_p=0.5) == [0, 1, 2, 3]
    assert kept(np.log([0.4, 0.2, 0.2, 0.2]), top_k=2, top_p=0.5) == [0, 1, 2, 3]
    assert kept([1, 1, 0], min_p=1) == [0, 1]


def test_one_token_is_always_kept():
    scores = np.random.default_rng(0).normal(0, 5, 100)
    for filters in ({"top_k": 1}, {"top_p": 1e-300}, {"min_p": 1.0}):
        assert kept(scores, **filters) == [int(scores.argmax())]


@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.9, 0.9999, 1 - 2.0**-53])
@pytest.mark.parametrize("spread", [0.0, 1e-3, 0.5, 3.0, 1e4])
def test_top_p_of_a_real_vocabulary(top_p, spread):
    # table: row 88
    scores = temper(np.random.default_rng(0).normal(0, spread, 49152).astype(np.float32), 1.0)
    falling = -np.sort(-scores)
    sums = np.exp(falling.astype(np.float64)).cumsum()
    last = min(np.searchsorted(sums, top_p * sums[-1]), 49151)
    count = np.count_nonzero(scores >= cutoff(scores, top_p=top_p))
    expected = np.count_nonzero(scores >= falling[last])
    assert abs(count - expected) <= 1e-5 * expected


@settings(deadline=None)
@given(
    scores=arrays(np.float32, st.integers(1, 50), elements=st.integers(-8, 8).map(np.float32)),
    top_k=st.integers(0, 60),
    top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-6, 0.05, 0.4, 1.0]),
)
def test_kept_set_equals_its_definition(scores, top_k, top_p, min_p):
    # table: row 88
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    wide = np.exp(scores.astype(np.float64) - scores.max())
    left = order[: top_k or None]
    left += [index for index in order[len(left) :] if scores[index] == scores[left[-1]]]
    if top_p < 1:
        total, before, passed = wide[left].sum(), 0.0, []
        for index in left:
            if before < top_p * total or scores[index] == scores[passed[-1]]:
                passed.append(index)
            before += wide[index]
        left = passed
    left = [index for index in left if wide[index] >= min_p * (1 - 1e-7)]
    assert kept(scores, top_k=top_k, top_p=top_p, min_p=min_p) == sorted(left)


# --- what is no number, and what is no token ---


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ((0, np.nan, 1), "NaN"),
        ((np.inf, np.nan), "NaN"),
        ((0, np.inf), r"\+inf"),
        ((-np.inf, -np.inf), "nothing but -inf"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logits_that_are_no_numbers(values, what, temperature):
    # cases: N1
    with pytest.raises(NumericsError, match=f"position 17 hold {what}"):
        choose(logits_of(*values), temperature=temperature, position=17)


@pytest.mark.parametrize("place", [0, 1, 20000, 49150, 49151])
def test_one_nan_in_a_real_vocabulary_is_seen(place):
    # cases: N1
    logits = np.random.default_rng(0).normal(0, 3, 49152).astype(np.float32)
    logits[place] = np.nan
    with pytest.raises(NumericsError, match="NaN"):
        choose(logits)


def test_minus_infinity_is_never_chosen():
    logits = logits_of(-np.inf, 0, -np.inf, 0)
    assert chosen_at(logits, temperature=1e6) == {1, 3}
    assert chosen_at(logits, temperature=1.0, top_k=3, top_p=0.99, min_p=1e-9) == {1, 3}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_no_allowed_token_left(temperature):
    with pytest.raises(NumericsError, match="no token can be chosen at position 3"):
        choose(logits_of(0, -np.inf), allowed_ids=[1], temperature=temperature, position=3)


@pytest.mark.parametrize("options", [{"logit_bias": {3: 1}}, {"allowed_ids": [3]}])
def test_ids_beyond_the_logits(options):
    with pytest.raises(InputError, match=r"names token 3, .*ids are 0 to 2"):
        choose(logits_of(0, 1, 2), **options)
