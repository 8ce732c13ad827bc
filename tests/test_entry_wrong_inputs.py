"""Entries given one input that is wrong in any way: a result, or one line of the package's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from smollm2 import entries
from smollm2.backends import numpy
from smollm2.errors import CacheError, InputError, SmolLM2Error
from tests.backend_rules import CONFIG, WEIGHTS

MODEL = numpy.backend.load(CONFIG, WEIGHTS)

SIDE_BY_SIDE = {"attention_mask": [[1, 1], [1, 1]], "position_ids": [[0, 1], [0, 1]]}
STEP = {"token": [[5], [6]], "pos": [2, 2]}
SEQUENCES = {"tokens": [5, 6, 7], "positions": [0, 1, 0], "segments": [0, 0, 1]}
PACKED = {"tokens": [5, 6], "rows": [0, 1], "positions": [0, 0], "segments": [0, 1]}
PAGED = {"tokens": [5, 6], "positions": [0, 0], "rows": [0, 1], "slots": [64, 128]}
LAST, TABLE = {"last": [0, 1]}, {"table": [[1], [2]]}
STEPS = {"step_tokens": [[5], [6]], "step_positions": [-1, -1]}
TARGETS = {"targets": [6, -100, 3]}

CALLS: Mapping[str, dict[str, Any]] = {
    "forward": {"tokens": [[5, 6], [7, 8]], **SIDE_BY_SIDE},
    "next_token": {"tokens": [[5, 6], [7, 8]], **SIDE_BY_SIDE},
    "prefill": {"tokens": [[5, 6], [7, 8]], "pos": 0, **SIDE_BY_SIDE},
    "decode": {**STEP, "attention_mask": [[1], [1]], "position_ids": [2]},
    "prefill_slots": {"tokens": [[5, 6], [7, 8]], "slots": [1, 0], "lengths": [2, 1]},
    "prefill_packed": {**PACKED, **LAST},
    "decode_rows": {"tokens": [[5], [6]], "positions": [2, 2]},
    "step_packed": {**PACKED, **LAST, **STEPS},
    "prefill_paged": {**PAGED, **LAST, **TABLE},
    "decode_paged": {"tokens": [[5], [6]], "positions": [2, 2], **TABLE},
    "step_paged": {**PAGED, **LAST, **STEPS, **TABLE},
    "generate": {**STEP, "steps": 2},
    "sample": {**STEP, "key": 3, "temperature": 0.5, "steps": 2},
    "generate_until": {**STEP, "eos": 3, "max_new": 2},
    "hidden_packed": SEQUENCES,
    "log_probs_packed": {**SEQUENCES, **TARGETS},
    "loss_packed": {**SEQUENCES, **TARGETS, "weights": [1.0, 0.0, 2.0]},
}
"""Inputs that each entry takes."""

FED = ("decode", "decode_rows", "decode_paged", "generate", "sample", "generate_until")
"""Entries of rows that hold tokens."""

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 100),
    st.sampled_from([-(2**63), 2**31, 2**63, 2**64, 10**30, -(10**400)]),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.sampled_from([object(), {}, {"a": 1}, set(), {1, 2}, np.datetime64("2020"), b"\n", "a\nb"]),
)
ARRAYS = st.sampled_from(
    [
        np.array(1),
        np.array(1.5),
        np.array("x\ny"),
        np.zeros(0),
        np.zeros((0, 2), int),
        np.zeros((2, 0), int),
        np.zeros((2, 2, 2), int),
        np.full((2, 2), np.inf),
        np.full(3, 1e300),
        np.full(3, 1j),
        np.full(3, -(10**30), object),
        np.zeros((2, 1), np.uint64) + np.uint64(2**64 - 1),
        np.full((2, 2), -(2**63)),
        np.array([[1], [2, 3]], dtype=object),
        np.zeros(2, [("a", int), ("b", float)]),
        np.array([1, 2], "m8[s]"),
        range(2),
        iter([1, 2]),
    ]
)
WRONG = st.one_of(
    SCALARS,
    ARRAYS,
    st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3), max_leaves=6),
    st.lists(st.lists(st.integers(-3, 100), min_size=2, max_size=2), min_size=2, max_size=2),
    st.lists(st.integers(-3, 100), min_size=1, max_size=3),
)


def cache_of(name: str) -> Any:
    """The cache that an entry needs, with tokens where it continues some."""
    kind = entries.ENTRIES[name].cache
    if kind is None:
        return None
    if kind == "paged":
        cache = MODEL.new_paged_cache(4)
        if name in FED:
            filling = {"tokens": [5, 6] * 2, "positions": [0, 0, 1, 1], "rows": [0, 1] * 2}
            entries.prefill_paged(
                MODEL, cache, **filling, slots=[64, 128, 65, 129], **LAST, **TABLE
            )
        return cache
    cache = MODEL.new_cache(2, 16)
    if name in FED:
        entries.prefill(MODEL, cache, [[5, 6], [7, 8]])
    return cache


def call(name: str, inputs: Mapping[str, Any]) -> Any:
    entry: Callable[..., Any] = getattr(entries, name)
    cache = cache_of(name)
    return entry(MODEL, *([] if cache is None else [cache]), **inputs)


@pytest.mark.parametrize("name", CALLS)
def test_the_inputs_are_right_as_they_are(name: str) -> None:
    assert set(CALLS) == set(entries.ENTRIES)
    given = call(name, CALLS[name])
    for array in given if isinstance(given, tuple) else [given]:
        assert np.isfinite(array).all()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", CALLS)
def test_what_is_wrong_is_told_in_one_line(name: str, data: Any) -> None:
    wrong = data.draw(st.sampled_from([*CALLS[name]]))
    value = data.draw(WRONG)
    try:
        call(name, {**CALLS[name], wrong: value})
    except SmolLM2Error as error:
        message = str(error)
        assert "\n" not in message, message
        assert 10 < len(message) < 400, message


@pytest.mark.parametrize("name", [name for name in CALLS if entries.ENTRIES[name].cache])
def test_a_cache_of_another_kind_is_named(name: str) -> None:
    kind = entries.ENTRIES[name].cache
    other = MODEL.new_cache(2, 16) if kind == "paged" else MODEL.new_paged_cache(4)
    for cache, found in [(None, "NoneType"), ([], "list"), (other, "a (fixed|paged) one")]:
        with pytest.raises(CacheError, match=f"^{name} needs a {kind} cache, not {found}: make it"):
            getattr(entries, name)(MODEL, cache, **CALLS[name])


def test_a_result_of_no_token_is_any_number_below_0() -> None:
    """Also below the number of tokens."""
    one = {"tokens": [5], "rows": [0], "positions": [0], "segments": [0]}
    expected = call("prefill_packed", {**one, "last": [0, -1]})
    np.testing.assert_array_equal(call("prefill_packed", {**one, "last": [0, -7]}), expected)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        (
            "forward",
            {"attention_mask": 1},
            r"attention_mask has shape \[\], .* \[2, 2\] need \[2, 2\]",
        ),
        ("prefill", {"attention_mask": [1, 1]}, r"attention_mask has shape \[2\]"),
        ("forward", {"tokens": None}, "tokens must be integers of 32 bits, not NoneType"),
        (
            "forward",
            {"tokens": [[1, 2**80]]},
            "tokens must be integers of 32 bits, not larger ones",
        ),
        ("generate", {"steps": "3"}, "the number of steps is '3': give a whole number"),
        ("generate", {"steps": [3, 4]}, r"the number of steps is \[3, 4\]: give a whole number"),
        ("generate_until", {"max_new": -1}, "generate_until cannot take -1 steps"),
        ("sample", {"key": None}, "key is None: give a whole number"),
        ("sample", {"key": -1}, "seed must be an integer from 0"),
        ("forward", {"position_ids": [2**31 - 2, 2**31 - 1]}, "have 32 bits: 4294967295 has more"),
        ("hidden_packed", {"positions": [-2, -1, 0]}, "cannot start at position -2"),
        ("generate_until", {"eos": None}, "eos must be integers of 32 bits, not NoneType"),
        ("loss_packed", {"weights": ["1", "2", "3"]}, r"weights must be numbers \[3\], not <U1"),
        ("loss_packed", {"weights": [1, 2, 1e39]}, "weights must be finite numbers of 32 bits"),
        ("loss_packed", {"weights": [[1], [2, 3]]}, r"weights must be numbers \[3\], in one row"),
        ("prefill_paged", {"rows": [0, -1]}, "row -1 is not in a page table of 2 rows"),
        ("step_paged", {"rows": [0, 2]}, "row 2 is not in a page table of 2 rows"),
        ("loss_packed", {"weights": 1.0}, r"weights has shape \[\], but must have \[3\]"),
    ],
)
def test_it_names_the_input(name: str, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call(name, {**CALLS[name], **wrong})
