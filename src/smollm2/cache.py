"""Cache: which tokens each row of a KV cache holds. Integers only; a backend adds the storage."""

from __future__ import annotations

import numpy as np

from smollm2.batch import Batch, Ints
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
        if batch.page_size != self.page_size or not np.array_equal(
            batch.page_table, self.page_table
        ):
            raise CacheError(
                f"the batch was built for {len(batch.page_table)} rows of pages of "
                f"{batch.page_size} tokens, but the cache has {self.rows} rows of {self.page_size}"
            )
        longest = int(batch.lengths.max())
        if longest > self.capacity:
            raise CacheError(
                f"a KV cache of {self.capacity} tokens a row is too small for {longest} tokens"
            )
        pages, offsets = np.divmod(batch.positions, self.page_size)
        slots = self.page_table[batch.rows, pages] * self.page_size + offsets
        if not np.array_equal(slots, batch.slots):
            raise CacheError("the slots of the batch are not those of its rows and positions")
        first = np.full(self.rows, self.capacity)
        np.minimum.at(first, batch.rows, batch.positions)
        for row in np.flatnonzero((batch.lengths > 0) & (first != self._lengths))[:1]:
            raise CacheError(
                f"row {row} holds {self._lengths[row]} tokens, but the batch continues it "
                f"at position {first[row]}"
            )
        return longest

    def advance(self, batch: Batch) -> None:
        """Count the batch's tokens as stored: called once a forward pass is through."""
        for row in np.flatnonzero(batch.lengths):
            self._lengths[row] = int(batch.lengths[row])

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
