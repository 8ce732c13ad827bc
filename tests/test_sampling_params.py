"""SamplingParams: every option's range, unknown options, seeds, and ids beyond the vocabulary."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import pickle
import random

import numpy as np
import pytest
from hypothesis import given, strategies as st

from smollm2.errors import InputError
from smollm2.sampling import SamplingOptions, SamplingParams

NAMES = {field.name for field in dataclasses.fields(SamplingParams)}

GOOD = {
    "max_tokens": [None, 0, 1, 10**9],
    "temperature": [0, 0.0, 1e-300, 0.8, 5, np.float32(0.5)],
    "top_k": [0, 1, 10**12, np.int64(40)],
    "top_p": [1, 1.0, 1e-300, 0.9],
    "min_p": [0, 1, 0.05],
    "repetition_penalty": [1, 1e-9, 1.3, 100],
    "repetition_counts": [True, False],
    "presence_penalty": [-2, 0, 2.0],
    "frequency_penalty": [-2, 0, 2.0],
    "logit_bias": [{}, {0: 1}, {5: -100, 7: 100.0}],
    "allowed_ids": [None, [3, 1], (0,), {4}, np.array([1, 2])],
    "seed": [None, 0, 2**32, 2**63 - 1, np.int64(7)],
    "stop": ["", (), [], "x", ["x", "\n\nUser:"], ["s"] * 16],
    "stop_ids": [(), [0, 2], {5}],
    "ignore_eos": [True, False],
    "logprobs": [None, 0, 20],
}
GOOD["stop"].remove("")

NOT_NUMBERS = [None, True, "1", [1], float("nan"), float("inf"), -float("inf"), 10**400, 1j]
BAD = {
    "max_tokens": [-1, 1.0, True, "5", float("nan")],
    "temperature": [-0.1, *NOT_NUMBERS],
    "top_k": [-1, 1.5, None, False, "3"],
    "top_p": [0, -0.1, 1.0001, *NOT_NUMBERS],
    "min_p": [-0.1, 1.1, *NOT_NUMBERS],
    "repetition_penalty": [0, -1, *NOT_NUMBERS],
    "repetition_counts": [0, 1, None, "yes"],
    "presence_penalty": [-2.1, 2.1, *NOT_NUMBERS],
    "frequency_penalty": [-2.1, 2.1, *NOT_NUMBERS],
    "logit_bias": [None, [1, 2], {"5": 1.0}, {-1: 1.0}, {True: 1.0}, {1: "x"}, {1: 101}, {1: -1e9}],
    "allowed_ids": [(), [], "12", 5, [1.0], [-1], [True], [None]],
    "seed": [-1, 2**63, 1.0, True, "42"],
    "stop": ["", [""], ["a", ""], None, 5, [5], b"x", ["s"] * 17],
    "stop_ids": [None, 2, "2", [-1], [2.0], [False]],
    "ignore_eos": [0, 1, None, "no"],
    "logprobs": [-1, 21, True, 5.0, "5"],
}


def test_tables_cover_every_option():
    assert set(GOOD) == set(BAD) == NAMES == set(SamplingOptions.__annotations__)


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in GOOD.items() for v in vs])
def test_good_values_are_taken(name, value):
    made = getattr(SamplingParams(**{name: value}), name)
    if isinstance(value, int | float | np.number):
        assert made == value
    elif isinstance(value, dict):
        assert made == value
        assert made is not value
    assert isinstance(made, int | float | str | tuple | dict | None)


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in BAD.items() for v in vs])
def test_bad_values_name_the_option(name, value):
    with pytest.raises(InputError, match=name) as caught:
        SamplingParams(**{name: value})
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match=name):
        SamplingParams.of(**{name: value})


@given(
    name=st.sampled_from(sorted(NAMES)),
    value=st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=5),
        st.binary(),
        st.lists(st.integers()),
        st.lists(st.text()),
        st.dictionaries(st.integers(), st.floats()),
    ),
)
def test_any_value_is_taken_or_an_input_error(name, value):
    with contextlib.suppress(InputError):
        params = SamplingParams(**{name: value})
        assert dataclasses.replace(params) == params


def test_the_message_holds_the_value_and_the_range():
    with pytest.raises(InputError) as caught:
        SamplingParams(top_p=1.5)
    assert (
        str(caught.value) == "top_p must be a number above 0 and at most 1 (1 means all), not 1.5"
    )


def test_values_get_their_types():
    params = SamplingParams(temperature=1, top_k=np.int64(5), stop=["a"], allowed_ids=[2, 1])
    assert type(params.temperature) is float
    assert type(params.top_k) is int
    assert params.stop == ("a",)
    assert params.allowed_ids == (2, 1)


def test_one_stop_string_may_stand_alone():
    assert SamplingParams.of(stop="ab").stop == SamplingParams(stop="ab").stop == ("ab",)


def test_defaults_change_nothing():
    # cases: N10
    params = SamplingParams()
    assert (params.temperature, params.repetition_penalty) == (0.0, 1.0)
    assert (params.presence_penalty, params.frequency_penalty) == (0.0, 0.0)
    assert (params.top_k, params.top_p, params.min_p, params.logit_bias) == (0, 1.0, 0.0, {})


def test_params_are_values():
    params = SamplingParams(logit_bias={1: 2.0}, seed=3, stop="x")
    assert params == SamplingParams(logit_bias={1: 2.0}, seed=3, stop="x")
    assert hash(params) == hash(SamplingParams(logit_bias={1: 2.0}, seed=3, stop="x"))
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 4


def test_a_bias_changed_later_does_not_change_params():
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = 50.0
    assert params.logit_bias == {1: 2.0}


def test_of_replaces_fields():
    base = SamplingParams(temperature=0.5, seed=1)
    assert SamplingParams.of(base, top_k=3) == SamplingParams(temperature=0.5, seed=1, top_k=3)
    assert SamplingParams.of(base) == base
    assert SamplingParams.of() == SamplingParams()
    assert SamplingParams.of(base, seed=None).seed is None


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("temprature", "temperature"),
        ("temp", "temperature"),
        ("max_new_tokens", "max_tokens"),
        ("repeat_penalty", "repetition_penalty"),
        ("topk", "top_k"),
        ("stops", "stop"),
        ("eos", "ignore_eos"),
    ],
)
def test_unknown_option_names_the_nearest(wrong, right):
    # cases: N7
    with pytest.raises(InputError, match=f"unknown option '{wrong}'.*{right}"):
        SamplingParams.of(**{wrong: 1})


def test_unknown_option_unlike_any_lists_all():
    with pytest.raises(InputError, match=r"'zzz': choose from max_tokens, .*logprobs$"):
        SamplingParams.of(zzz=1)


@pytest.mark.parametrize("params", [{"temperature": 1}, "greedy", 0])
def test_of_refuses_other_things_than_params(params):
    with pytest.raises(InputError, match="params must be SamplingParams"):
        SamplingParams.of(params)


def test_a_seed_that_is_set_stays():
    params = SamplingParams(seed=2**40)
    assert params.with_seed() is params
    assert params.with_seed(random.Random(1)) is params


def test_generated_seeds_are_31_bits_and_differ():
    # table: row 27
    seeds = {SamplingParams().with_seed().seed for _ in range(50)}
    assert len(seeds) > 45
    assert all(0 <= seed < 2**31 - 1 for seed in seeds)


@pytest.mark.parametrize("make", [random.Random, np.random.default_rng])
def test_a_given_generator_is_honoured(make):
    # table: row 28
    params = SamplingParams()
    first, again, other = (params.with_seed(make(number)).seed for number in (5, 5, 6))
    assert first == again != other
    rng = make(5)
    assert params.with_seed(rng).seed == first
    assert params.with_seed(rng).seed != first


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"logit_bias": {3: 1.0, 10: 1.0}}, "logit_bias names token 10"),
        ({"allowed_ids": [11, 3]}, "allowed_ids names token 11"),
        ({"stop_ids": [49152]}, "stop_ids names token 49152"),
    ],
)
def test_ids_beyond_the_vocabulary(options, wrong):
    with pytest.raises(InputError, match=f"{wrong}.*ids are 0 to 9$"):
        SamplingParams(**options).check_ids(10)
    SamplingParams(**options).check_ids(49153)
