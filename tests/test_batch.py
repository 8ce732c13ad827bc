"""Batch: integers only, checked against a plain loop."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from smollm2.batch import Batch, Span
from smollm2.errors import CacheError, InputError


def spans_strategy() -> st.SearchStrategy[list[Span]]:
    lengths = st.lists(st.integers(1, 7), min_size=1, max_size=4)
    wanted = st.sampled_from(["last", "all", "none"])

    def build(drawn: tuple[list[int], list[int], list[str], list[int]]) -> list[Span]:
        counts, starts, wants, rows = drawn
        return [
            Span(row, start, list(range(count)), want)  # type: ignore[arg-type]
            for count, start, want, row in zip(counts, starts, wants, rows, strict=False)
        ]

    return st.tuples(
        lengths,
        st.lists(st.integers(0, 9), min_size=4, max_size=4),
        st.lists(wanted, min_size=4, max_size=4),
        st.permutations(range(4)),
    ).map(build)


@given(spans_strategy(), st.integers(1, 6), st.randoms(use_true_random=False))
def test_every_number_equals_a_plain_loop(spans: list[Span], page_size: int, random) -> None:
    pages = -(-16 // page_size)
    numbers = list(range(4 * pages))
    random.shuffle(numbers)
    table = np.array(numbers, dtype=np.int32).reshape(4, pages)
    batch = Batch.build(spans, page_table=table, page_size=page_size)

    token = 0
    wanted = []
    for segment, span in enumerate(spans):
        for offset, token_id in enumerate(span.ids):
            position = span.start + offset
            assert batch.ids[token] == token_id
            assert batch.positions[token] == position
            assert batch.rows[token] == span.row
            assert batch.segments[token] == segment
            page = table[span.row][position // page_size]
            assert batch.slots[token] == page * page_size + position % page_size
            last = offset == len(span.ids) - 1
            if span.wanted == "all" or (span.wanted == "last" and last):
                wanted.append(token)
            token += 1
        assert batch.lengths[span.row] == span.start + len(span.ids)
    assert len(batch) == token
    assert batch.wanted.tolist() == wanted
    assert np.count_nonzero(batch.lengths) == len(spans)
    for array in (batch.ids, batch.positions, batch.rows, batch.slots, batch.wanted):
        assert array.dtype == np.int32


def test_without_a_cache_every_span_is_a_segment() -> None:
    batch = Batch.build([Span(0, 0, [5, 6]), Span(0, 0, [7, 8, 9])])
    assert batch.segments.tolist() == [0, 0, 1, 1, 1]
    assert batch.positions.tolist() == [0, 1, 0, 1, 2]
    assert batch.wanted.tolist() == [1, 4]


def test_ids_may_be_an_array_of_any_integers() -> None:
    spans = [Span(0, 3, np.array([5, 6])), Span(1, 0, np.array([7], dtype=np.uint16))]
    batch = Batch.build(spans, page_table=TABLE, page_size=8)
    assert batch.ids.tolist() == [5, 6, 7]
    assert batch.slots.tolist() == [3, 4, 8]
    assert batch.lengths.tolist() == [5, 1]


TABLE = np.arange(2, dtype=np.int32)[:, None]


@pytest.mark.parametrize(
    ("spans", "error", "message"),
    [
        ([], InputError, "at least one token"),
        ([Span(0, 0, [])], InputError, "at least one token"),
        ([Span(2, 0, [1])], CacheError, "row 2 is not in a cache of 2 rows"),
        ([Span(-1, 0, [1])], CacheError, "row -1 is not in a cache of 2 rows"),
        ([Span(0, 0, [1]), Span(0, 1, [2])], CacheError, "row 0 appears twice"),
        ([Span(0, 6, [1, 2, 3])], CacheError, "cache of 8 tokens a row is too small for 9 tokens"),
        ([Span(0, -1, [1])], InputError, "cannot start at position -1"),
        ([Span(0, 0, [1, -(2**40)])], InputError, "32 bits: -1099511627776 has more"),
    ],
)
def test_what_does_not_fit_is_refused(spans, error, message) -> None:
    with pytest.raises(error, match=message):
        Batch.build(spans, page_table=TABLE, page_size=8)


@pytest.mark.parametrize(
    ("spans", "number"),
    [
        ([Span(0, 2**31 - 1, [1])], 2**31),
        ([Span(0, 2**30, [1]), Span(0, 0, [1]), Span(0, 0, [1])], 2**31 + 2),
    ],
)
def test_positions_have_32_bits(spans: list[Span], number: int) -> None:
    """Those of the slots too, which follow from them."""
    with pytest.raises(InputError, match=f"{number} has more"):
        Batch.build(spans)
