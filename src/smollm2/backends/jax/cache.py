"""JaxCache: stored keys and values on a device, allocated as they are used."""

from __future__ import annotations

from jax.sharding import Sharding
from jax.typing import DTypeLike

from smollm2.backends.jax.inputs import room_of
from smollm2.backends.jax.ops import Storage
from smollm2.backends.jax.storage import empty, lengthened
from smollm2.batch import Batch
from smollm2.cache import Cache, Layout


class JaxCache(Cache):
    """Keys and values of each layer, in the arrays of ``Stored``.

    ``room`` is a power of two from the longest row of a fixed cache on, not its capacity, so that
    few shapes occur; in a paged one it is a whole page from the first batch on. A forward takes
    ``storage`` and puts back what it has become: the memory is the same.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        layers: int,
        heads: int,
        size: int,
        dtype: DTypeLike,
        sharding: Sharding,
    ) -> None:
        super().__init__(layout)
        self.storage: Storage = []
        self._layers = layers
        self._shape = (layout.pages, heads, size)
        self._dtype = dtype
        self._sharding = sharding

    @property
    def nbytes(self) -> int:
        """Bytes of storage that are allocated now."""
        return sum(keys.nbytes + values.nbytes for keys, values in self.storage)

    def prepare(self, batch: Batch) -> None:
        """Check that a batch fits, as ``check`` does, and make room for it."""
        longest = self.check(batch)
        room = self.page_size if self.layout.paged else room_of(longest, self.page_size)
        if not self.storage:
            pages, heads, size = self._shape
            self.storage = [
                empty(pages, heads, size, room, self._dtype, self._sharding)
                for _ in range(self._layers)
            ]
        elif room > self.storage[0].room:
            self.storage = [lengthened(stored, room) for stored in self.storage]

    def close(self) -> None:
        """Give the storage back."""
        super().close()
        self.storage = []
