"""Backends: chosen once, by name, and imported only then."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from smollm2.batch import Batch
from smollm2.cache import Cache
from smollm2.config import Config
from smollm2.errors import ContextLengthError, InputError, MissingDependencyError
from smollm2.extension import missing
from smollm2.weights import Weights

BACKENDS = {"native": "smollm2.backends.native", "numpy": "smollm2.backends.numpy"}
"""Names that ``load(backend=…)`` knows, and the modules that hold them."""

MAX_ROWS = 2**24
"""Rows of a cache at most, so that its tables are no burden."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of memory that a step of decode reads.

    ``weights`` once, however many rows there are; ``token`` for each stored token of each row.
    """

    weights: int
    token: int


class CausalLM(Protocol):
    """A loaded model that runs batches."""

    @property
    def config(self) -> Config:
        """The architecture's numbers."""

    @property
    def threads(self) -> int | None:
        """Threads that compute, None where a library decides."""

    @property
    def traffic(self) -> Traffic:
        """What decode reads, which bounds its speed."""

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


class BackendOptions(TypedDict, total=False):
    """What ``load`` passes on to a backend, which refuses what it does not have.

    ``quant``: kind that weights are converted to; ``threads``: how many compute; ``kv``: kind of
    stored keys and values; ``mmap``: whether weights are used where they lie in a file.
    """

    quant: str
    threads: int
    kv: str
    mmap: bool


class Backend(Protocol):
    """A way to run the model."""

    def load(
        self, config: Config, weights: Weights[Any], **options: Unpack[BackendOptions]
    ) -> CausalLM:
        """Convert the weights to what this backend computes with.

        Raises ``InputError`` for an option that it does not have.
        """


def default_backend() -> str:
    """The name of the fastest backend that is here: native, or NumPy with a warning."""
    why = missing()
    if why is None:
        return "native"
    warnings.warn(
        f"the native engine is not here ({why}): NumPy computes instead, many times slower; "
        "install smollm2 again where a C++ compiler is",
        RuntimeWarning,
        stacklevel=2,
    )
    return "numpy"


def get_backend(name: str) -> Backend:
    """The backend of this name, imported now.

    Raises ``InputError`` for an unknown name, and ``MissingDependencyError`` for the native
    backend where its extension is missing.
    """
    if name not in BACKENDS:
        raise InputError(f"no backend named {name!r}: choose from {', '.join(BACKENDS)}")
    if name == "native" and (why := missing()):
        raise MissingDependencyError(
            f"backend='native' needs the extension of this package, which is not here ({why}): "
            "install smollm2 again where a C++ compiler is, or give backend='numpy'"
        )
    module: Any = import_module(BACKENDS[name])
    backend: Backend = module.backend
    return backend


def checked_capacity(config: Config, rows: int, capacity: int | None) -> int:
    """Tokens a row of a new cache: ``capacity``, or the context length where it is None.

    Raises ``InputError`` where the model cannot fill it, or for a number of rows that cannot be.
    """
    limit = config.max_position_embeddings
    if capacity is not None and not 1 <= capacity <= limit:
        raise InputError(f"a capacity of {capacity} tokens is not in 1 … {limit}")
    if rows < 1:
        raise InputError(f"a cache needs at least one row, not {rows}")
    if rows > MAX_ROWS:
        raise InputError(f"a cache of {rows} rows is too large: it has at most {MAX_ROWS}")
    return capacity or limit


def check_batch(config: Config, batch: Batch) -> None:
    """Raise ``InputError`` for ids, positions or wanted tokens that do not exist."""
    ids, positions, wanted = batch.ids.tolist(), batch.positions.tolist(), batch.wanted.tolist()
    vocabulary = config.vocab_size
    if min(ids) < 0 or max(ids) >= vocabulary:
        wrong = next(i for i in ids if not 0 <= i < vocabulary)
        raise InputError(f"token id {wrong} is not in a vocabulary of {vocabulary}")
    limit = config.max_position_embeddings
    if max(positions) >= limit:
        raise ContextLengthError(max(positions) + 1, 0, limit)
    if min(positions) < 0:
        raise InputError(f"a token cannot have position {min(positions)}")
    if wanted and not 0 <= min(wanted) <= max(wanted) < len(ids):
        wrong = next(i for i in wanted if not 0 <= i < len(ids))
        raise InputError(f"token {wrong} is wanted of a batch of {len(ids)} tokens")
