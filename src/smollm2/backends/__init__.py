"""Backends: chosen once, by name, and imported only then."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from smollm2.batch import Batch
from smollm2.cache import Cache
from smollm2.config import Config
from smollm2.errors import InputError
from smollm2.weights import Weights

BACKENDS = {"numpy": "smollm2.backends.numpy"}
"""Names that ``load(backend=…)`` knows, and the modules that hold them."""


class CausalLM(Protocol):
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

        Raises ``CacheError`` where the cache does not fit the batch, and ``InputError`` for ids
        or positions that the model does not have; before any computation.
        """

    def close(self) -> None:
        """Let go of the weights; closing again is fine."""


class Backend(Protocol):
    """A way to run the model."""

    def load(self, config: Config, weights: Weights[Any]) -> CausalLM:
        """Convert the weights to what this backend computes with."""


def get_backend(name: str) -> Backend:
    """The backend of this name, imported now. Raises ``InputError`` for an unknown name."""
    if name not in BACKENDS:
        raise InputError(f"no backend named {name!r}: choose from {', '.join(BACKENDS)}")
    module: Any = import_module(BACKENDS[name])
    backend: Backend = module.backend
    return backend
