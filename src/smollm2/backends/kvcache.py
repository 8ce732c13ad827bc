"""KVCache: stored keys and values of the NumPy backend, allocated as they are used."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from smollm2.batch import Batch, Ints
from smollm2.cache import Cache, Layout, no_memory

Floats = NDArray[np.float32]


class KVCache(Cache):
    """Keys (after RoPE) and values, float32, [L, pages, K, room, D] each.

    ``room`` follows the longest row of a fixed cache, not its capacity; in a paged one it is a
    whole page from the first batch on.
    """

    def __init__(self, layout: Layout, *, layers: int, heads: int, size: int) -> None:
        super().__init__(layout)
        self._keys: Floats = np.empty((layers, layout.pages, heads, 0, size), dtype=np.float32)
        self._values = np.empty_like(self._keys)

    @property
    def nbytes(self) -> int:
        """Bytes of storage that are allocated now."""
        return self._keys.nbytes + self._values.nbytes

    def prepare(self, batch: Batch) -> None:
        """Check that a batch fits, as ``check`` does, make room, forget what it writes over.

        Raises ``CacheError`` where there is no memory for it, too.
        """
        room = self.room_for(batch, self._keys.shape[3])
        if room > self._keys.shape[3]:
            self._grow(room)
        self.forget(batch)

    def write(self, layer: int, slots: Ints, key: Floats, value: Floats) -> None:
        """Store keys and values [T, K, D] at their slots."""
        pages, offsets = np.divmod(slots, self.page_size)
        self._keys[layer, pages, :, offsets] = key
        self._values[layer, pages, :, offsets] = value

    def read(self, layer: int, pages: Ints, length: int) -> tuple[Floats, Floats]:
        """The first ``length`` keys and values of a row, [K, length, D].

        Not copied where they lie in one page.
        """
        used = pages[: -(-length // self.page_size)]
        if len(used) == 1:
            page = used[0]
            return self._keys[layer, page, :, :length], self._values[layer, page, :, :length]
        heads, size = self._keys.shape[2], self._keys.shape[4]
        keys, values = (
            stored[layer, used].swapaxes(0, 1).reshape(heads, -1, size)[:, :length]
            for stored in (self._keys, self._values)
        )
        return keys, values

    def close(self) -> None:
        """Give the storage back."""
        super().close()
        self._keys = self._values = self._keys[:, :, :, :0].copy()

    def _grow(self, room: int) -> None:
        used = self._keys.shape[3]
        shape = (*self._keys.shape[:3], room, self._keys.shape[4])
        try:
            keys, values = np.empty(shape, np.float32), np.empty(shape, np.float32)
        except MemoryError:
            raise no_memory(self.layout.pages * room) from None
        keys[:, :, :, :used] = self._keys
        values[:, :, :, :used] = self._values
        self._keys, self._values = keys, values
