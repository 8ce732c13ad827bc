"""Rectangles of entries against what a token sees by definition, token by token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from smollm2.entries import ENTRIES, Tokens
from smollm2.entries.rectangles import Rectangle, rectangles
from smollm2.entries.table import Entry
from tests.entry_inputs import PAGE, SIZES, page_table, random_inputs, sizes_of

SEEDS = st.integers(0, 2**32 - 1)
STORED = st.lists(st.integers(0, 4), min_size=3, max_size=3)
LONG = st.lists(st.sampled_from([0, 3, 62, 64, 100]), min_size=3, max_size=3)


def built(
    entry: Entry, inputs: dict[str, Any], xp: Any = np
) -> tuple[Tokens, tuple[Rectangle, ...]]:
    size = PAGE if entry.cache == "paged" else SIZES["MaxSeq"]
    taken = list(inputs.values())[: len(entry.inputs) - entry.extra]
    tokens = entry.build(xp, size, *taken)
    return tokens, rectangles(xp, size, entry, tokens, sizes_of(entry))


def seen(entry: Entry, inputs: dict[str, Any]) -> list[set[int]]:
    """Of each token what it sees, as slots of the cache or, without one, as tokens."""
    tokens, parts = built(entry, inputs)
    found: list[set[int]] = []
    for part in parts:
        count, queries, length = part.visible.shape
        assert part.queries == slice(len(found), len(found) + count * queries)
        keys = part.keys
        if isinstance(keys, slice):
            keys = np.arange(keys.start, keys.stop).reshape(count, length)
        assert keys.shape == (count, length)
        if not part.stored and entry.cache is not None:
            keys = tokens.slots[keys]
        for row in range(count):
            found.extend(set(keys[row][mask].tolist()) for mask in part.visible[row])
    assert len(found) == len(tokens.ids)
    return found


def check(entry: Entry, inputs: dict[str, Any]) -> None:
    tokens, _ = built(entry, inputs)
    for token, sees in enumerate(seen(entry, inputs)):
        assert sees, "a softmax of nothing is not finite"
        if tokens.segments[token] < 0:
            continue
        row, position = int(tokens.rows[token]), int(tokens.positions[token])
        if entry.cache is None:
            same = tokens.segments == tokens.segments[token]
            expected = set(np.flatnonzero(same & (tokens.positions <= position)).tolist())
        elif tokens.table is None:
            expected = {row * SIZES["MaxSeq"] + place for place in range(position + 1)}
        else:
            table = tokens.table[row]
            expected = {int(table[p // PAGE]) * PAGE + p % PAGE for p in range(position + 1)}
        assert sees == expected


OF_ROWS = [name for name, entry in ENTRIES.items() if entry.cache == "fixed"]
OF_PAGES = [name for name, entry in ENTRIES.items() if entry.cache == "paged"]
WITHOUT = [name for name, entry in ENTRIES.items() if entry.cache is None]


@pytest.mark.parametrize("name", WITHOUT)
@given(seed=SEEDS)
def test_without_a_cache(name: str, seed: int) -> None:
    check(ENTRIES[name], random_inputs(name, np.random.default_rng(seed)))


@pytest.mark.parametrize("name", OF_ROWS)
@given(seed=SEEDS, stored=STORED)
def test_over_the_rows_of_a_fixed_cache(name: str, seed: int, stored: list[int]) -> None:
    """cases: prompts that begin in empty rows see their own tokens, all others what is stored."""
    if name == "prefill_slots":
        stored = [0, 0, stored[2]]
    check(ENTRIES[name], random_inputs(name, np.random.default_rng(seed), stored))


@pytest.mark.parametrize("name", OF_PAGES)
@given(seed=SEEDS, stored=LONG)
def test_over_pages_in_any_order(name: str, seed: int, stored: list[int]) -> None:
    rng = np.random.default_rng(seed)
    check(ENTRIES[name], random_inputs(name, rng, stored, table=page_table(rng)))


@given(seed=SEEDS)
def test_padded_rows_side_by_side(seed: int) -> None:
    """Where a mask pads rows left, right or anywhere, what is padded is seen by no token."""
    rng = np.random.default_rng(seed)
    for name in ("forward", "prefill"):
        stored = [int(rng.integers(0, 5))] * 3
        inputs = random_inputs(name, rng, stored)
        inputs["attention_mask"] = rng.integers(0, 2, inputs["tokens"].shape)
        entry = ENTRIES[name]
        size = SIZES["MaxSeq"]
        tokens = entry.build(np, size, *inputs.values())
        for part in rectangles(np, size, entry, tokens, sizes_of(entry)):
            real = inputs["attention_mask"] > 0
            counts = real.cumsum(axis=1) + (stored[0] if name == "prefill" else 0)
            assert (part.visible.sum(axis=2) == counts)[real].all()
            assert part.visible.any(axis=2).all()


def test_two_rectangles_where_prompts_and_steps_share_a_pass() -> None:
    rng = np.random.default_rng(0)
    inputs = random_inputs("step_packed", rng, [0, 2, 0])
    prompts, steps = built(ENTRIES["step_packed"], inputs)[1]
    assert (prompts.stored, prompts.visible.shape) == (False, (1, 12, 12))
    assert (steps.stored, steps.visible.shape) == (True, (3, 1, 16))
    assert steps.keys == slice(0, 3 * 16)
    inputs = random_inputs("step_paged", rng, [0, 2, 0], table=page_table(rng))
    prompts, steps = built(ENTRIES["step_paged"], inputs)[1]
    assert prompts.keys.shape == (1, 3 * 2 * PAGE)
    assert steps.keys.shape == (3, 2 * PAGE)


@pytest.mark.parametrize("library", ["torch", "jax.numpy"])
@pytest.mark.parametrize("name", ENTRIES)
def test_every_library_makes_the_same(name: str, library: str) -> None:
    xp = pytest.importorskip(library)
    rng = np.random.default_rng(1)
    table = page_table(rng) if "paged" in name else None
    inputs = random_inputs(name, rng, [0, 0, 2], table=table)
    theirs = {key: xp.asarray(value) for key, value in inputs.items()}
    tokens, parts = built(ENTRIES[name], inputs)
    other, other_parts = built(ENTRIES[name], theirs, xp)
    for ours, same in zip(tokens, other, strict=True):
        assert ours is None if same is None else np.array_equal(ours, np.asarray(same))
    for ours, same in zip(parts, other_parts, strict=True):
        assert (ours.queries, ours.stored) == (same.queries, same.stored)
        assert np.array_equal(ours.visible, np.asarray(same.visible))
        if isinstance(ours.keys, slice):
            assert ours.keys == same.keys
        else:
            assert np.array_equal(ours.keys, np.asarray(same.keys))
