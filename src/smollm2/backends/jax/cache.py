"""JaxCache: stored keys and values on a device, allocated as they are used."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from jax.sharding import Sharding
from jax.typing import DTypeLike

from smollm2.backends.jax.inputs import room_of
from smollm2.backends.jax.ops import Storage
from smollm2.backends.jax.storage import empty, lengthened
from smollm2.batch import Batch
from smollm2.cache import Cache, Layout


class JaxCache(Cache):
    """Keys and values in ``storage``, whose parts are of so many ``layers`` each.

    ``room`` is the rung from the longest row of a fixed cache on, whatever its capacity, so that
    few shapes occur; in a paged one it is a whole page from the first batch on. A forward
    takes ``storage`` and puts back what it has become: the memory is the same. One that fails
    meanwhile takes it along, and all that was stored is forgotten.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        layers: Sequence[int],
        heads: int,
        size: int,
        dtype: DTypeLike,
        sharding: Sharding,
    ) -> None:
        super().__init__(layout)
        self.storage: Storage = []
        self._layers = layers
        self._empty = partial(
            empty, pages=layout.pages, heads=heads, size=size, dtype=dtype, sharding=sharding
        )

    @property
    def nbytes(self) -> int:
        """Bytes of storage that are allocated now."""
        return sum(array.nbytes for stored in self.storage for array in stored)

    def prepare(self, batch: Batch) -> None:
        """Check that a batch fits, as ``check`` does, make room, forget what it writes over."""
        longest = self.check(batch)
        room = self.page_size if self.layout.paged else room_of(longest)
        if not self.storage:
            self.storage = [self._empty(layers=layers, room=room) for layers in self._layers]
        elif room > self.storage[0].room:
            self.storage = [lengthened(stored, room) for stored in self.storage]
        self.forget(batch)

    def recover(self, error: BaseException) -> None:
        """After a forward that raised: forget all tokens where the storage did not come back.

        A note of the error says so.
        """
        whole = False
        try:
            for stored in self.storage:
                for array in stored:
                    array.block_until_ready()
            whole = True
        except RuntimeError:  # deleted, or the same failure again: there is nothing in it
            pass
        finally:
            if not whole:
                self.storage = []
                self.reset()
                error.add_note(
                    "the KV cache was lost with it and is empty now: start its rows again"
                )

    def close(self) -> None:
        """Give the storage back."""
        super().close()
        self.storage = []
