"""KVCache: stored keys and values of the NumPy backend, in pages that grow with use."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from smollm2.batch import Batch, Ints
from smollm2.errors import CacheError

Floats = NDArray[np.float32]

GRANULE = 64
"""Storage grows in multiples of this many tokens, and at least doubles."""


class KVCache:
    """Keys (after RoPE) and values of ``rows`` sequences, ``capacity`` tokens each, float32.

    One page a row: page number = row. Only the part of each page that is in use is allocated,
    so memory follows the longest sequence, not the capacity.
    """

    def __init__(self, *, layers: int, rows: int, capacity: int, heads: int, size: int) -> None:
        self.rows = rows
        self.capacity = capacity
        self.page_size = capacity
        self.page_table: Ints = np.arange(rows, dtype=np.int32)[:, None]
        self.page_table.flags.writeable = False
        self._lengths = [0] * rows
        self._keys: Floats | None = np.empty((layers, rows, heads, 0, size), dtype=np.float32)
        self._values: Floats | None = np.empty_like(self._keys)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens stored of each row."""
        return tuple(self._lengths)

    @property
    def nbytes(self) -> int:
        """Bytes of storage in use now."""
        keys, values = self._storage()
        return keys.nbytes + values.nbytes

    def prepare(self, batch: Batch) -> None:
        """Check that a batch continues these rows, and make room for it.

        Raises ``CacheError`` and changes nothing where it does not.
        """
        keys, _ = self._storage()
        if batch.page_table.shape != self.page_table.shape or batch.page_size != self.page_size:
            raise CacheError(
                f"the batch was built for {len(batch.page_table)} rows of pages of "
                f"{batch.page_size} tokens, but the cache has {self.rows} rows of {self.page_size}"
            )
        for row in np.flatnonzero(batch.lengths):
            first = int(batch.positions[batch.rows == row].min())
            if first != self._lengths[row]:
                raise CacheError(
                    f"row {row} holds {self._lengths[row]} tokens, but the batch continues it "
                    f"at position {first}"
                )
        needed = int(batch.lengths.max())
        if needed > keys.shape[3]:
            self._grow(needed)

    def write(self, layer: int, slots: Ints, key: Floats, value: Floats) -> None:
        """Store keys and values [T, K, D] at their slots."""
        keys, values = self._storage()
        pages, offsets = np.divmod(slots, self.page_size)
        keys[layer, pages, :, offsets] = key
        values[layer, pages, :, offsets] = value

    def read(self, layer: int, pages: Ints, length: int) -> tuple[Floats, Floats]:
        """The first ``length`` keys and values of a row, [K, length, D], not copied."""
        keys, values = self._storage()
        (page,) = pages
        return keys[layer, page, :, :length], values[layer, page, :, :length]

    def advance(self, batch: Batch) -> None:
        """Count the batch's tokens as stored: called once a forward pass is through."""
        for row in np.flatnonzero(batch.lengths):
            self._lengths[row] = int(batch.lengths[row])

    def truncate(self, row: int, length: int) -> None:
        """Forget the tokens of a row from ``length`` on; the storage stays."""
        self._storage()
        if not 0 <= row < self.rows:
            raise CacheError(f"row {row} is not in a cache of {self.rows} rows")
        if not 0 <= length <= self._lengths[row]:
            raise CacheError(f"row {row} holds {self._lengths[row]} tokens, not {length}")
        self._lengths[row] = length

    def reset(self) -> None:
        """Forget all tokens; the storage stays."""
        self._storage()
        self._lengths = [0] * self.rows

    def close(self) -> None:
        """Give the storage back; closing again is fine."""
        self._keys = self._values = None

    def _storage(self) -> tuple[Floats, Floats]:
        if self._keys is None or self._values is None:
            raise CacheError("the KV cache is closed: make a new one with new_cache()")
        return self._keys, self._values

    def _grow(self, needed: int) -> None:
        keys, values = self._storage()
        room = max(needed, 2 * keys.shape[3])
        room = min(-(-room // GRANULE) * GRANULE, self.capacity)
        shape = (*keys.shape[:3], room, keys.shape[4])
        used = max(self._lengths)
        grown = np.empty(shape, np.float32), np.empty(shape, np.float32)
        for new, old in zip(grown, (keys, values), strict=True):
            new[:, :, :, :used] = old[:, :, :, :used]
        self._keys, self._values = grown
