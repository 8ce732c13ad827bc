"""Entries bound to sizes: shapes, names that stand for one another, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from smollm2.entries import ENTRIES
from smollm2.errors import InputError
from smollm2.export.binding import bind, parse_bindings
from tests.entry_inputs import SIZES, sizes_of
from tests.tiny import tiny_config

CONFIG = tiny_config()


@pytest.mark.parametrize("name", ENTRIES)
def test_every_entry_binds_to_its_symbols(name: str) -> None:
    entry = ENTRIES[name]
    bound = bind(name, CONFIG, sizes_of(entry))
    assert bound.inputs == entry.shapes(SIZES)
    assert len(bound.result) == len(entry.result)
    assert bound.steps == {"generate": 2, "sample": 2, "generate_until": 3}.get(name, 1)
    expected = {None: 0, "fixed": 3 * 16 + 1, "paged": 9 * 64}[entry.cache]
    assert bound.slots == expected


def test_shapes_of_results() -> None:
    assert bind("forward", CONFIG, {"B": 2, "S": 5}).result == (2, 5, 96)
    assert bind("hidden_packed", CONFIG, {"P": 7}).result == (7, 64)
    assert bind("loss_packed", CONFIG, {"P": 7}).result == ()
    sizes = {"P": 7, "Batch": 3, "MaxSeq": 9}
    assert bind("step_packed", CONFIG, sizes).result == (6, 96)
    assert bind("generate", CONFIG, {"Batch": 2, "Steps": 4}).result == (2, 4)


def test_names_and_facts_that_every_graph_has() -> None:
    """Both exports have them from here."""
    bound = bind("generate_until", CONFIG, {"Batch": 2, "MaxNew": 4, "MaxSeq": 8})
    assert bind("forward", CONFIG, {"B": np.int64(2), "S": np.int32(5)}).facts("float32")
    caches = ["cache_keys.0", "cache_values.0", "cache_keys.1", "cache_values.1"]
    assert list(bound.cache_names)[:4] == caches
    assert len(bound.cache_names) == 2 * CONFIG.num_hidden_layers
    assert bound.cache_shape == (17, CONFIG.num_key_value_heads, CONFIG.head_dim)
    assert bound.result_names[:3] == ("ids", "counts", "new_cache_keys.0")
    assert bind("loss_packed", CONFIG, {"P": 7}).result_names == ("loss",)
    facts = bound.facts("float16")
    assert facts["smollm2.signature"] == ENTRIES["generate_until"].signature
    assert json.loads(facts["smollm2.sizes"]) == {"Batch": 2, "MaxNew": 4, "MaxSeq": 8}
    assert json.loads(facts["smollm2.config"]) == CONFIG.to_dict()
    assert (facts["smollm2.entry"], facts["smollm2.dtype"]) == ("generate_until", "float16")


def test_notes_say_what_shapes_do_not() -> None:
    notes = {name: bind(name, CONFIG, sizes_of(entry)).notes for name, entry in ENTRIES.items()}
    for name, entry in ENTRIES.items():
        assert ("slot b * MaxSeq + p" in notes[name]) == (entry.cache == "fixed")
        assert ("slot n * 64 + p" in notes[name]) == (entry.cache == "paged")
        assert ("key + b" in notes[name]) == (name == "sample")
        assert "Nothing is checked" in notes[name]


@pytest.mark.parametrize(
    ("entry", "given_as", "own"),
    [
        ("prefill", "B", "Batch"),
        ("prefill", "Rows", "Batch"),
        ("forward", "Batch", "B"),
        ("decode_paged", "B", "Rows"),
        ("prefill_slots", "B", "Batch"),
    ],
)
def test_names_of_how_many_sequences(entry: str, given_as: str, own: str) -> None:
    sizes = sizes_of(ENTRIES[entry])
    sizes[given_as] = sizes.pop(own) + 1
    assert bind(entry, CONFIG, sizes).sizes[own] == SIZES[own] + 1


def test_a_row_holds_the_context_length_where_nothing_is_said() -> None:
    bound = bind("prefill", CONFIG, {"B": 1, "S": 8})
    assert bound.sizes == {"Batch": 1, "S": 8, "MaxSeq": 256}
    assert (bound.page_size, bound.slots) == (256, 257)


@pytest.mark.parametrize(
    ("entry", "sizes", "message"),
    [
        ("prefil", {}, "no entry named 'prefil': did you mean prefill? There are forward, "),
        ("zzz", {}, "no entry named 'zzz': choose from forward, next_token, decode"),
        ("prefill", {"B": 1}, "S of entry prefill is not bound: give a number of at least 1 for "),
        ("prefill", {"B": 0, "S": 8}, "Batch of entry prefill is 0: give a number of at least 1"),
        ("prefill", {"B": 1, "S": 8, "X": 1}, "has no symbol 'X': it has Batch, S, MaxSeq"),
        ("forward", {"B": 1, "S": 8, "MaxSeq": 9}, "has no symbol 'MaxSeq': it has B, S"),
        ("prefill", {"B": 1, "S": 8, "Batch": 1}, "B and Batch both are Batch of entry prefill: "),
        ("prefill", {"B": 1.5, "S": 8}, "B is 1.5: give a whole number"),
        ("prefill", {"B": "2", "S": 8}, "B is '2': give a whole number"),
        ("prefill", {"B": True, "S": 8}, "B is True: give a whole number"),
        ("prefill", {"B": np.ones((2, 2), int), "S": 8}, "B is array([[1, 1],: give a whole num"),
        (7, {}, "no entry named 7: choose from forward"),
        ("prefill", {"B": 1, "S": 8, "MaxSeq": 257}, "is 257, but may be 256 at most, the context"),
        ("prefill", {"B": 1, "S": 8, "MaxSeq": 7}, "S of entry prefill is 8, but may be 7 at mo"),
        ("forward", {"B": 1, "S": 257}, "S of entry forward is 257, but may be 256 at most"),
        ("generate", {"B": 1, "Steps": 257}, "Steps of entry generate is 257, but may be 256"),
        ("decode_paged", {"B": 1, "Pages": 5, "Pool": 9}, "is 5, but may be 4 at most, the pages"),
        ("decode_paged", {"B": 1, "Pages": 1, "Pool": 1}, "Pool is 1, but page 0 is scratch"),
        ("hidden_packed", {"P": 2**31}, "P of entry hidden_packed is 2147483648, but may be 2147"),
        ("forward", {"B": 2**30, "S": 8}, "B=1073741824, S=8 are too large together"),
        ("decode", {"B": 2**30, "MaxSeq": 8}, "Batch=1073741824, MaxSeq=8 are too large together"),
    ],
)
def test_what_cannot_be_bound(entry: Any, sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        bind(entry, CONFIG, sizes)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_bindings_as_text() -> None:
    assert parse_bindings(["B=1", "S=8"]) == {"B": 1, "S": 8}
    assert parse_bindings([]) == {}
    with pytest.raises(InputError, match=r"^S is bound twice: to 8 and 9$"):
        parse_bindings(["S=8", "S=9"])


@given(st.text(max_size=12))
def test_any_other_text_is_refused(text: str) -> None:
    try:
        sizes = parse_bindings([text])
    except InputError as error:
        assert "give a symbol and its size, such as S=8" in str(error)  # noqa: PT017
    else:
        ((symbol, size),) = sizes.items()
        assert text.partition("=") == (symbol, "=", text.partition("=")[2])
        assert int(text.partition("=")[2]) == size
