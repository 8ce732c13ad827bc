"""JaxCache: stored keys and values on a device, allocated as they are used."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from smollm2.backends.jax.inputs import room_of
from smollm2.backends.jax.ops import Storage
from smollm2.batch import Batch
from smollm2.cache import Cache, Layout


class JaxCache(Cache):
    """Keys (after RoPE) and values, [pages, K, room, D] for each layer.

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
        device: object,
    ) -> None:
        super().__init__(layout)
        self.storage: Storage = []
        self._layers = layers
        self._shape = (layout.pages, heads, size)
        self._dtype = dtype
        self._device = device

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
                (self._zeros(pages, heads, room, size), self._zeros(pages, heads, room, size))
                for _ in range(self._layers)
            ]
        elif room > (used := self.storage[0][0].shape[2]):
            self.storage = [
                (_longer(keys, room - used), _longer(values, room - used))
                for keys, values in self.storage
            ]

    def close(self) -> None:
        """Give the storage back."""
        super().close()
        self.storage = []

    def _zeros(self, *shape: int) -> jax.Array:
        return jnp.zeros(shape, self._dtype, device=self._device)


@partial(jax.jit, static_argnums=1)
def _longer(stored: jax.Array, more: int) -> jax.Array:
    return jnp.pad(stored, ((0, 0), (0, 0), (0, more), (0, 0)))
