"""Groups: every query attends to what a plain loop over the batch says, however it is grouped."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from smollm2.backends.groups import NEVER, Fit, Group, Groups, groups_of
from smollm2.batch import Batch, Span


def power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def exact(n: int) -> int:
    return n


@st.composite
def cached_batches(draw: st.DrawFn) -> Batch:
    """Spans of some rows of a fixed or a paged cache, with tables in any order."""
    size = draw(st.sampled_from([4, 64]))
    rows = draw(st.integers(1, 5))
    each = 1 if size == 64 else 6
    pages = draw(st.permutations(range(1, 1 + rows * each)))
    table = np.array(pages, np.int32).reshape(rows, each)
    chosen = draw(st.lists(st.integers(0, rows - 1), min_size=1, unique=True))
    spans = []
    for row in chosen:
        start, count = draw(st.integers(0, 12)), draw(st.integers(1, 12))
        spans.append(Span(row, start, list(range(count))))
    return Batch.build(spans, page_table=table, page_size=size)


@st.composite
def packed_batches(draw: st.DrawFn) -> Batch:
    parts = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=6))
    return Batch.build([Span(0, start, [0] * count) for start, count in parts])


def visible(batch: Batch, token: int, *, cached: bool) -> set[int]:
    """What a token sees, by the definition: slots of the cache, or tokens of the batch."""
    position = int(batch.positions[token])
    if not cached:
        return {
            other
            for other in range(len(batch))
            if batch.segments[other] == batch.segments[token] and batch.positions[other] <= position
        }
    pages, size = batch.page_table[batch.rows[token]], batch.page_size
    return {int(pages[p // size]) * size + p % size for p in range(position + 1)}


def seen(group: Group, row: int, query: int) -> set[int]:
    mask = group.key_positions[row] <= group.query_positions[row, query]
    keys = group.keys[row][mask].tolist()
    assert len(keys) == len(set(keys))
    return set(keys)


def check(batch: Batch, groups: Groups, *, cached: bool, fit: Fit) -> None:
    places = np.arange(len(batch)) if groups.places is None else groups.places
    flat = [
        (group, row, query)
        for group in groups.parts
        for row in range(group.queries.shape[0])
        for query in range(group.queries.shape[1])
    ]
    for token, place in enumerate(places):
        group, row, query = flat[place]
        assert group.queries[row, query] == token
        assert seen(group, row, query) == visible(batch, token, cached=cached)
    for group in groups.parts:
        for size in (*group.queries.shape, group.keys.shape[1]):
            assert fit(size) == size
        if group.causal:
            assert group.queries.shape == group.keys.shape
            for row in range(len(group.queries)):
                for query in range(group.queries.shape[1]):
                    assert seen(group, row, query) == set(group.keys[row, : query + 1].tolist())
        if group.full:
            assert (group.key_positions <= group.query_positions.min(1, keepdims=True)).all()
        if group.pages is not None:
            real = group.key_positions != NEVER
            expected = group.pages[:, None] * batch.page_size + np.arange(group.keys.shape[1])
            assert (group.keys[real] == expected[real]).all()


@pytest.mark.parametrize("fit", [None, power_of_two])
@given(batch=cached_batches())
def test_rows_of_a_cache(batch: Batch, fit: Fit | None) -> None:
    check(batch, groups_of(batch, cached=True, fit=fit), cached=True, fit=fit or exact)


@pytest.mark.parametrize("fit", [None, power_of_two])
@given(batch=packed_batches())
def test_segments(batch: Batch, fit: Fit | None) -> None:
    check(batch, groups_of(batch, cached=False, fit=fit), cached=False, fit=fit or exact)


def test_one_prompt_is_plain_causal_attention() -> None:
    groups = groups_of(Batch.build([Span(0, 0, [5] * 7)]), cached=False)
    (group,) = groups.parts
    assert group.causal
    assert groups.places is None


def test_rows_of_one_length_decode_without_a_mask() -> None:
    table = np.arange(3, dtype=np.int32)[:, None]
    spans = [Span(row, 5, [1]) for row in range(3)]
    batch = Batch.build(spans, page_table=table, page_size=16)
    (group,) = groups_of(batch, cached=True).parts
    assert group.full
    assert group.pages is not None
    assert group.pages.tolist() == [0, 1, 2]


def test_a_mixed_step_is_two_groups_of_rounded_shapes() -> None:
    """Decoding rows together, prompts together."""
    table = np.arange(5, dtype=np.int32)[:, None]
    spans = [
        Span(0, 9, [1]),
        Span(1, 0, [1] * 5),
        Span(2, 3, [1]),
        Span(3, 0, [1] * 3),
        Span(4, 1, [1]),
    ]
    batch = Batch.build(spans, page_table=table, page_size=32)
    shapes = [
        (*group.queries.shape, group.keys.shape[1])
        for group in groups_of(batch, cached=True, fit=power_of_two).parts
    ]
    assert shapes == [(4, 1, 16), (2, 8, 8)]
