"""Batch: the tokens of one forward pass with integer metadata about where each belongs.

Prefill, chunked prefill, packed prompts, decode, mixed steps and training differ only in
these numbers, so one forward serves them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from smollm2.errors import CacheError, InputError

Ints = NDArray[np.int32]
Wanted = Literal["last", "all", "none"]


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive new tokens of one sequence.

    ``row`` is the sequence's lane, ``start`` the position of its first token here, ``ids`` the
    token ids, ``wanted`` the tokens whose logits the caller will read.
    """

    row: int
    start: int
    ids: Sequence[int]
    wanted: Wanted = "last"


@dataclass(frozen=True, slots=True)
class Batch:
    """What one forward pass gets. All arrays are int32.

    T tokens, R rows of the cache, P pages a row, W logits wanted.

    - ``ids`` [T]: token ids
    - ``positions`` [T]: place of each token in its sequence, from 0
    - ``rows`` [T]: the sequence's row in ``page_table``
    - ``slots`` [T]: where the token's key and value are written,
      ``page_table[row, position // page_size] * page_size + position % page_size``
    - ``page_table`` [R, P]: page numbers of each row
    - ``segments`` [T]: tokens see only their own segment where there is no cache
    - ``lengths`` [R]: tokens stored of each row once this batch is through (0: not in the batch)
    - ``wanted`` [W]: indices into T whose logits are returned, in this order
    - ``page_size``: tokens a page
    """

    ids: Ints
    positions: Ints
    rows: Ints
    slots: Ints
    page_table: Ints
    segments: Ints
    lengths: Ints
    wanted: Ints
    page_size: int

    @classmethod
    def build(
        cls,
        spans: Sequence[Span],
        *,
        page_table: Ints | None = None,
        page_size: int | None = None,
    ) -> Batch:
        """Lay spans side by side.

        With a cache pass its ``page_table`` [R, P] and ``page_size``; each row may appear in one
        span only. Without one (training, scoring) every span is a segment of its own.

        Raises ``InputError`` for an empty batch or span, positions below 0 and numbers of more than
        32 bits, and ``CacheError`` for a row that the cache does not have or a position beyond its
        capacity: before anything is computed.
        """
        if not spans or any(len(span.ids) == 0 for span in spans):
            raise InputError("a batch needs at least one token in each span")
        if page_table is None or page_size is None:
            page_size = max(1, *(span.start + len(span.ids) for span in spans))
            page_table = np.arange(len(spans), dtype=np.int32)[:, None]
            spans = [Span(row, s.start, s.ids, s.wanted) for row, s in enumerate(spans)]
        _check_rows(spans, page_table, page_size)
        # Lists: a step of decode has few tokens, and for these NumPy takes many times as long.
        ids: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        segments: list[int] = []
        wanted: list[int] = []
        lengths = [0] * len(page_table)
        for segment, span in enumerate(spans):
            count = len(span.ids)
            wanted.extend(_wanted(span, len(ids)))
            ids.extend(span.ids)
            positions.extend(range(span.start, span.start + count))
            rows.extend([span.row] * count)
            segments.extend([segment] * count)
            lengths[span.row] = span.start + count
        slots = slots_of(rows, positions, page_table, page_size)
        of_tokens = _int32(ids, positions, rows, slots, segments)
        return cls(
            ids=of_tokens[0],
            positions=of_tokens[1],
            rows=of_tokens[2],
            slots=of_tokens[3],
            page_table=page_table,
            segments=of_tokens[4],
            lengths=_int32(lengths)[0],
            wanted=np.array(wanted, dtype=np.int32),
            page_size=page_size,
        )

    def __len__(self) -> int:
        return len(self.ids)


def slots_of(
    rows: Sequence[int], positions: Sequence[int], page_table: Ints, page_size: int
) -> list[int]:
    """Slots of tokens in these rows and positions."""
    return [
        page_table.item(row, position // page_size) * page_size + position % page_size
        for row, position in zip(rows, positions, strict=True)
    ]


def _int32(*lists: list[int]) -> Ints:
    """Lists of one length as the rows of an array."""
    try:
        return np.array(lists, dtype=np.int32)
    except OverflowError:
        largest = max((max(each, key=abs) for each in lists), key=abs)
        raise InputError(
            f"ids, positions and slots of a batch have 32 bits: {largest} has more"
        ) from None


def _wanted(span: Span, offset: int) -> range:
    end = offset + len(span.ids)
    first = {"all": offset, "last": end - 1, "none": end}[span.wanted]
    return range(first, end)


def _check_rows(spans: Sequence[Span], page_table: Ints, page_size: int) -> None:
    rows, pages = page_table.shape
    seen: set[int] = set()
    for span in spans:
        if not 0 <= span.row < rows:
            raise CacheError(f"row {span.row} is not in a cache of {rows} rows")
        if span.row in seen:
            raise CacheError(f"row {span.row} appears twice in one batch")
        seen.add(span.row)
        if span.start < 0:
            raise InputError(f"a sequence cannot start at position {span.start}")
        if span.start + len(span.ids) > pages * page_size:
            raise CacheError(
                f"a KV cache of {pages * page_size} tokens a row is too small for "
                f"{span.start + len(span.ids)} tokens"
            )
