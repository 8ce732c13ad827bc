"""TorchCache: stored keys and values on the device of the model, allocated as they are used."""

from __future__ import annotations

import torch
from torch import Tensor

from smollm2.batch import Batch, Ints
from smollm2.cache import Cache, Layout, no_memory


class TorchCache(Cache):
    """``stored``: keys (after RoPE) and values of each layer, [pages, room, K, D].

    ``room`` follows the longest row of a fixed cache, not its capacity; in a paged one it is a
    whole page from the first batch on. Behind what the rows of a batch hold are zeros: a mask hides
    that, but it is multiplied all the same, and what was there may be NaN.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        layers: int,
        heads: int,
        size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(layout)
        empty = torch.empty((layout.pages, 0, heads, size), dtype=dtype, device=device)
        self.stored = [(empty, empty)] * layers
        self._written = [0] * layout.pages  # behind which a page is zeros

    @property
    def room(self) -> int:
        """Tokens a page that there is storage for."""
        return self.stored[0][0].shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of storage that are allocated now."""
        return sum(key.nbytes + value.nbytes for key, value in self.stored)

    def prepare(self, batch: Batch) -> None:
        """Check that a batch fits, as ``check`` does, make room, forget what it writes over.

        Raises ``CacheError`` where there is no memory for it, too.
        """
        room = self.room_for(batch, self.room)
        if room > self.room:
            try:
                stored = [(_grown(key, room), _grown(value, room)) for key, value in self.stored]
            except RuntimeError as error:  # which all of torch's allocators raise
                raise no_memory(self.layout.pages * room) from error
            self.stored = stored
        self.forget(batch)
        for page, end in self.ends(batch).items():
            if self._written[page] > end:
                self._clear(page, end, self._written[page])
            self._written[page] = end

    def _clear(self, page: int, start: int, end: int) -> None:
        with torch.inference_mode():  # or what was made in it could not be written
            for key, value in self.stored:
                key[page, start:end] = 0
                value[page, start:end] = 0

    def places(self, slots: Ints) -> Ints:
        """Where in the storage, its pages laid end to end, these slots of the cache are."""
        if self.room == self.page_size:
            return slots
        return slots // self.page_size * self.room + slots % self.page_size

    def close(self) -> None:
        """Give the storage back."""
        super().close()
        empty = self.stored[0][0].new_empty((0, 0, 0, 0))
        self.stored = [(empty, empty)] * len(self.stored)


def _grown(stored: Tensor, room: int) -> Tensor:
    """More room, zeros."""
    pages, used, heads, size = stored.shape
    grown = stored.new_zeros((pages, room, heads, size))
    grown[:, :used] = stored
    return grown
