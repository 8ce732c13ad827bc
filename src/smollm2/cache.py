"""Cache: which tokens each row of a KV cache holds. Integers only; a backend adds the storage."""

from __future__ import annotations

import numpy as np

from smollm2.batch import Batch, Ints, slots_of
from smollm2.errors import CacheError


class Cache:
    """The bookkeeping of ``rows`` sequences of up to ``capacity`` tokens each.

    ``page_table`` [rows, pages] has the page numbers of each row, ``page_size`` the tokens a page;
    a fixed cache has one page a row. The caller owns a cache; only a forward pass that has
    succeeded adds to its ``lengths``, so that one that failed can be repeated.
    """

    def __init__(self, rows: int, capacity: int) -> None:
        self.rows = rows
        self.capacity = capacity
        self.page_size = capacity
        self.page_table: Ints = np.arange(rows, dtype=np.int32)[:, None]
        self.page_table.flags.writeable = False
        self._lengths = [0] * rows
        self._closed = False

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens stored of each row."""
        return tuple(self._lengths)

    def check(self, batch: Batch) -> int:
        """Check that a batch continues these rows; returns the longest length it leads to.

        Raises ``CacheError`` where it was built for another cache, would overflow a row or leave
        a gap in it, or where the cache is closed; nothing has changed then.
        """
        self._check_open()
        table = batch.page_table
        if batch.page_size != self.page_size or not (
            table is self.page_table or np.array_equal(table, self.page_table)
        ):
            raise CacheError(
                f"the batch was built for {len(table)} rows of pages of "
                f"{batch.page_size} tokens, but the cache has {self.rows} rows of {self.page_size}"
            )
        lengths: list[int] = batch.lengths.tolist()
        longest = max(lengths)
        if longest > self.capacity:
            raise CacheError(
                f"a KV cache of {self.capacity} tokens a row is too small for {longest} tokens"
            )
        rows, positions = batch.rows.tolist(), batch.positions.tolist()
        if slots_of(rows, positions, table, self.page_size) != batch.slots.tolist():
            raise CacheError("the slots of the batch are not those of its rows and positions")
        first: dict[int, int] = {}
        for row, position in zip(rows, positions, strict=True):
            first[row] = min(position, first.get(row, position))
        for row, length in enumerate(lengths):
            start = first.get(row, self.capacity)
            if length > 0 and start != self._lengths[row]:
                raise CacheError(
                    f"row {row} holds {self._lengths[row]} tokens, but the batch continues it "
                    f"at position {start}"
                )
        return longest

    def advance(self, batch: Batch) -> None:
        """Count the batch's tokens as stored: called once a forward pass is through."""
        for row, length in enumerate(batch.lengths.tolist()):
            if length > 0:
                self._lengths[row] = length

    def truncate(self, row: int, length: int) -> None:
        """Forget the tokens of a row from ``length`` on; the storage stays."""
        self._check_open()
        if not 0 <= row < self.rows:
            raise CacheError(f"row {row} is not in a cache of {self.rows} rows")
        if not 0 <= length <= self._lengths[row]:
            raise CacheError(f"row {row} holds {self._lengths[row]} tokens, not {length}")
        self._lengths[row] = length

    def reset(self) -> None:
        """Forget all tokens; the storage stays."""
        self._check_open()
        self._lengths = [0] * self.rows

    def close(self) -> None:
        """Give the storage back; closing again is fine, any other use is a ``CacheError``."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise CacheError("the KV cache is closed: make a new one with new_cache()")
