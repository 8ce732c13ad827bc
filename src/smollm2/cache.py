"""Cache: which tokens a KV cache holds. Integers only; a backend adds the storage.

A cache is pages of places for tokens, and a page table says which pages make up a row. In a fixed
cache that is one page a row, as long as the row may grow. In a paged one all pages have
``PAGE_SIZE`` places, any row may use any of them, several rows may share one to read from, and
whoever makes the batches keeps the tables. Page 0 of a paged cache is scratch: what is written
there is read by nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from smollm2.batch import Batch, Ints, slots_of
from smollm2.errors import CacheError

PAGE_SIZE = 64
"""Tokens a page of a paged cache."""

GRANULE = 64
"""Storage that grows does so in multiples of this many tokens a page, and at least doubles."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The shape of a cache: ``pages`` of ``page_size`` tokens each.

    ``paged``: batches bring page tables of their own; otherwise page i is row i.
    """

    pages: int
    page_size: int
    paged: bool = False

    @property
    def slots(self) -> int:
        """Places for tokens."""
        return self.pages * self.page_size


class Cache:
    """The bookkeeping of a KV cache: how many tokens of each page are stored.

    The caller owns a cache; only a forward pass that has succeeded adds to it, so that one that
    failed can be repeated. What it writes over in pages that are used again is forgotten as soon as
    it begins. ``page_table`` [rows, 1] is a fixed cache's; a paged one has none.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.page_size = layout.page_size
        self.page_table: Ints = np.arange(layout.pages, dtype=np.int32)[:, None]
        if layout.paged:
            self.page_table = self.page_table[:0]
        self.page_table.flags.writeable = False
        self._filled = [0] * layout.pages
        self._closed = False

    def __repr__(self) -> str:
        rows = f"lengths {self.lengths}, capacity {self.capacity}"
        stored = f"{self.layout.pages} pages" if self.layout.paged else rows
        return f"{type(self).__name__}({'closed' if self._closed else stored})"

    @property
    def rows(self) -> int:
        """Rows of a fixed cache; 0 of a paged one, whose rows are its users'."""
        return len(self.page_table)

    @property
    def capacity(self) -> int:
        """Tokens that a row can hold."""
        pages = self.layout.pages - 1 if self.layout.paged else 1
        return pages * self.page_size

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens stored of each row of a fixed cache."""
        return tuple(self._filled[: self.rows])

    def check(self, batch: Batch) -> int:
        """Check that a batch continues what is stored; returns the longest length it leads to.

        Raises ``CacheError`` where it was built for another cache, would overflow a row, leave a
        gap in it or write over it, or where the cache is closed; nothing has changed then.
        """
        self.check_open()
        table = batch.page_table
        if batch.page_size != self.page_size:
            raise CacheError(
                f"the batch was built for pages of {batch.page_size} tokens, but those of the "
                f"cache have {self.page_size}"
            )
        if not self.layout.paged and not (
            table is self.page_table or np.array_equal(table, self.page_table)
        ):
            raise CacheError(
                f"the batch was built for {len(table)} rows, but the cache has {self.rows}"
            )
        lengths: list[int] = batch.lengths.tolist()
        if len(lengths) != len(table):
            raise CacheError(
                f"the batch has {len(lengths)} lengths, but {len(table)} rows of pages"
            )
        longest = max(lengths)
        if longest > table.shape[1] * self.page_size:
            raise CacheError(
                f"a KV cache of {table.shape[1] * self.page_size} tokens a row is too small for "
                f"{longest} tokens"
            )
        rows, positions, slots = batch.rows.tolist(), batch.positions.tolist(), batch.slots.tolist()
        starts = _starts(rows, positions, lengths)
        if slots_of(rows, positions, table, self.page_size) != slots:
            raise CacheError("the slots of the batch are not those of its rows and positions")
        if self.layout.paged:
            self._check_pages(batch, starts)
        else:
            self._check_rows(starts)
        if len(set(slots)) < len(slots):
            raise CacheError("two tokens of the batch have the same slot: each needs its own")
        return longest

    def _check_rows(self, starts: Mapping[int, int]) -> None:
        for row, start in starts.items():
            if start != self._filled[row]:
                raise CacheError(
                    f"row {row} holds {self._filled[row]} tokens, but the batch continues it "
                    f"at position {start}"
                )

    def _check_pages(self, batch: Batch, starts: Mapping[int, int]) -> None:
        """That the pages of all rows exist, and hold and keep what comes before their starts."""
        written: dict[int, int] = {}  # of each page, from which place on
        for slot in batch.slots.tolist():
            page, place = divmod(slot, self.page_size)
            written[page] = min(place, written.get(page, place))
        for row, start in starts.items():
            length = int(batch.lengths[row])
            pages: list[int] = batch.page_table[row, : -(-length // self.page_size)].tolist()
            for number, page in enumerate(pages):
                if not 1 <= page < self.layout.pages:
                    raise CacheError(
                        f"row {row} has page {page} as its number {number}, but pages are "
                        f"1 … {self.layout.pages - 1}"
                    )
                needed = min(start - number * self.page_size, self.page_size)
                if self._filled[page] < needed:
                    raise CacheError(
                        f"page {page} of row {row} holds {self._filled[page]} tokens, but the "
                        f"batch reads {needed} of it"
                    )
                if written.get(page, needed) < needed:
                    raise CacheError(
                        f"row {row} reads {needed} tokens of page {page}, but the batch writes "
                        f"over place {written[page]} of it: rows write to pages of their own"
                    )

    def room_for(self, batch: Batch, room: int) -> int:
        """Tokens a page to have storage for, of which there is some for ``room`` now.

        Pages of a paged cache are whole from the first batch on. Raises as ``check`` does.
        """
        needed = min(self.check(batch), self.page_size)
        if self.layout.paged:
            needed = self.page_size
        if needed <= room:
            return room
        grown = max(needed, 2 * room)
        return min(-(-grown // GRANULE) * GRANULE, self.page_size)

    def advance(self, batch: Batch) -> None:
        """Count the batch's tokens as stored: called once a forward pass is through."""
        for page, end in self.ends(batch).items():
            self._filled[page] = end

    def ends(self, batch: Batch) -> dict[int, int]:
        """Of each page that a batch writes, the tokens that it holds then."""
        ends: dict[int, int] = {}
        for slot in batch.slots.tolist():
            page, offset = divmod(slot, self.page_size)
            ends[page] = max(offset + 1, ends.get(page, 0))
        return ends

    def forget(self, batch: Batch) -> None:
        """Not to have a batch's tokens, nor what they were written over, in pages used again."""
        for slot in batch.slots.tolist():
            page, offset = divmod(slot, self.page_size)
            self._filled[page] = min(self._filled[page], offset)

    def truncate(self, row: int, length: int) -> None:
        """Forget the tokens of a row of a fixed cache from ``length`` on; the storage stays."""
        self.check_open()
        if not 0 <= row < self.rows:
            raise CacheError(f"row {row} is not in a cache of {self.rows} rows")
        if not 0 <= length <= self._filled[row]:
            raise CacheError(f"row {row} holds {self._filled[row]} tokens, not {length}")
        self._filled[row] = length

    def reset(self) -> None:
        """Forget all tokens; the storage stays."""
        self.check_open()
        self._filled = [0] * self.layout.pages

    def close(self) -> None:
        """Give the storage back; closing again is fine, any other use is a ``CacheError``."""
        self._closed = True

    def check_open(self) -> None:
        """Raise ``CacheError`` where the cache is closed."""
        if self._closed:
            raise CacheError("the KV cache is closed: make a new one with new_cache()")


def no_memory(tokens: int) -> CacheError:
    """What is raised where a cache of so many tokens, over all rows, does not fit into memory."""
    return CacheError(
        f"the system has no memory for a KV cache of {tokens} tokens: take fewer rows or pages"
    )


def _starts(rows: list[int], positions: list[int], lengths: list[int]) -> dict[int, int]:
    """The first position of each row of a batch, whose tokens go from there up to its length.

    Raises ``CacheError`` where they do not; the same token twice is not noticed.
    """
    if min(rows) < 0 or max(rows) >= len(lengths):
        wrong = next(row for row in rows if not 0 <= row < len(lengths))
        raise CacheError(f"row {wrong} is not in a batch of {len(lengths)} rows")
    starts: dict[int, int] = {}
    for row in rows:
        starts[row] = starts.get(row, lengths[row]) - 1
    for row, position in zip(rows, positions, strict=True):
        if not starts[row] <= position < lengths[row]:
            count, length = lengths[row] - starts[row], lengths[row]
            raise CacheError(
                f"row {row} has length {length} and {count} tokens in the batch, but one of them "
                f"at position {position}: they must fill {starts[row]} … {length - 1}"
            )
    if len(starts) + lengths.count(0) < len(lengths):
        row = next(row for row, length in enumerate(lengths) if length > 0 and row not in starts)
        raise CacheError(f"row {row} has length {lengths[row]}, but no tokens in the batch")
    return starts
