"""Backends: chosen once, by name, and imported only then."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from smollm2.batch import Batch, Ints
from smollm2.config import Config
from smollm2.errors import InputError
from smollm2.weights import Weights

BACKENDS = {"numpy": "smollm2.backends.numpy"}
"""Names that ``load(backend=…)`` knows, and the modules that hold them."""


class Cache(Protocol):
    """A KV cache: the caller's, given to each forward pass and written by it alone."""

    @property
    def rows(self) -> int:
        """How many sequences it holds."""

    @property
    def capacity(self) -> int:
        """Tokens a row may hold."""

    @property
    def page_size(self) -> int:
        """Tokens a page; a fixed cache has one page a row."""

    @property
    def page_table(self) -> Ints:
        """Page numbers of each row, [rows, pages], int32."""

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens stored of each row."""

    def truncate(self, row: int, length: int) -> None:
        """Forget the tokens of a row from ``length`` on; the storage stays."""

    def reset(self) -> None:
        """Forget all tokens; the storage stays."""

    def close(self) -> None:
        """Give the storage back. Closing twice is fine; using it afterwards is a CacheError."""


class Model(Protocol):
    """A loaded model that runs batches."""

    @property
    def config(self) -> Config:
        """The architecture's numbers."""

    def new_cache(self, rows: int = 1, capacity: int | None = None) -> Cache:
        """An empty cache of ``rows`` sequences of ``capacity`` tokens (the context length)."""

    def forward(self, batch: Batch, cache: Cache | None = None) -> NDArray[np.float32]:
        """Logits of the wanted tokens, [W, V] float32.

        With a cache, writes the batch's keys and values and advances its lengths once all is
        done: a forward that raised can be repeated. Without one, tokens see their own segment.

        Raises ``CacheError`` before any computation where the cache does not fit the batch.
        """


class Backend(Protocol):
    """A way to run the model."""

    def load(self, config: Config, weights: Weights[Any], *, threads: int | None = None) -> Model:
        """Convert the weights to what this backend computes with."""


def get_backend(name: str) -> Backend:
    """The backend of this name, imported now. Raises ``InputError`` for an unknown name."""
    if name not in BACKENDS:
        raise InputError(f"no backend named {name!r}: choose from {', '.join(BACKENDS)}")
    module: Any = import_module(BACKENDS[name])
    backend: Backend = module.backend
    return backend
