"""The native backend: packed weights, and a fused forward in C++ that picks its kernels by CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import smollm2._native as _native
from smollm2.backends import given_options
from smollm2.backends.arena import matrices_of
from smollm2.backends.rotary import rotary_tables
from smollm2.batch import Batch, Ints
from smollm2.cache import PAGE_SIZE, Cache, Layout, no_memory
from smollm2.causal_lm import (
    LOGITS_CHUNK,
    LoadedModel,
    Traffic,
    check_batch,
    checked_cache,
    learned_tokens,
    log_probs_of,
)
from smollm2.config import SIZES, Config
from smollm2.errors import CacheError, InputError
from smollm2.kinds import COARSE, QUANTS, default_quant, packed_kinds
from smollm2.quantize import as_float32
from smollm2.weights import Weights

Floats = NDArray[np.float32]

KV_KINDS: Final = ("f32", "int16", "int8")
"""Kinds of stored keys and values."""

_Compute = Callable[[_native.KvCache, Ints, Ints, Floats, Floats, Ints, Ints, Ints], Floats]

_ANGLE_BLOCK = 1024
_MAX_THREADS = 256


class NativeCache(Cache):
    """Pages of 64 tokens, reserved for the whole capacity and taken as they are used.

    A row of a fixed cache has pages of its own, as many as its capacity needs.
    """

    def __init__(self, layout: Layout, model: NativeModel) -> None:
        super().__init__(layout)
        self.identity = model.identity
        self._storage: _native.KvCache | None
        each = -(-layout.page_size // PAGE_SIZE)
        self._storage = _reserve(model.engine, model.kv, layout.pages * each)
        self._pages: Ints = np.arange(layout.pages * each, dtype=np.int32).reshape(-1, each)
        self._longest = [0] * layout.pages

    def pages_of(self, batch: Batch) -> Ints:
        """The pages of the engine that hold the rows of a batch, [R, P]."""
        return batch.page_table if self.layout.paged else self._pages

    @property
    def storage(self) -> _native.KvCache:
        """The pages. Raises ``CacheError`` where the cache is closed."""
        self.check_open()
        assert self._storage is not None
        return self._storage

    @property
    def nbytes(self) -> int:
        """Bytes of the pages that have been used."""
        if self._storage is None:
            return 0
        pages = sum(-(-length // PAGE_SIZE) for length in self._longest)
        return pages * self._storage.page_bytes

    def advance(self, batch: Batch) -> None:
        """Count the batch's tokens as stored."""
        super().advance(batch)
        self._longest = [max(pair) for pair in zip(self._longest, self._filled, strict=True)]

    def close(self) -> None:
        """Give the storage back."""
        super().close()
        self._storage = None


class NativeModel(LoadedModel[NativeCache]):
    """A model whose weights are packed for the kernels."""

    def __init__(
        self,
        config: Config,
        engine: _native.Engine,
        *,
        kv: str,
        kinds: set[str],
        traffic: Traffic,
    ) -> None:
        super().__init__(config)
        self.kv = kv
        self.kinds = frozenset(kinds)
        self.traffic = traffic
        self.identity = object()  # of this model's caches, which do not keep its weights alive
        self._engine: _native.Engine | None = engine
        self._tables = rotary_tables(config, np.arange(0))

    @property
    def engine(self) -> _native.Engine:
        """What computes. Raises ``InputError`` where the model is closed."""
        if self._engine is None:
            raise InputError("the model is closed: load it again")
        return self._engine

    @property
    def threads(self) -> int:
        """Threads that compute."""
        return self.engine.threads

    def make_cache(self, layout: Layout) -> NativeCache:
        """Pages of the engine, of the kind ``kv``."""
        return NativeCache(layout, self)

    def forward(self, batch: Batch, cache: Cache | None = None) -> Floats:
        """Logits of the wanted tokens, [W, V]. See ``CausalLM.forward``."""
        return self._run(self.engine.forward, batch, cache)

    def hidden(self, batch: Batch, cache: Cache | None = None) -> Floats:
        """Hidden states of the wanted tokens, [W, C]. See ``CausalLM.hidden``."""
        return self._run(self.engine.hidden, batch, cache)

    def log_probs(self, batch: Batch, targets: Ints) -> Floats:
        """Log-probability of each target, [T]. See ``CausalLM.log_probs``."""
        check_batch(self.config, batch)
        learned = learned_tokens(self.config, batch, targets)
        runs, pages = _runs_of_segments(batch)
        storage = _reserve(self.engine, self.kv, int(pages.max()) + 1)
        cosines, sines = self._angles(max(batch.positions.tolist()) + 1)
        log_probs = np.zeros(len(batch), np.float32)
        for start, end, part in _parts(runs, LOGITS_CHUNK):
            wanted = learned[(start <= learned) & (learned < end)]
            ids, positions = batch.ids[start:end], batch.positions[start:end]
            chosen = (wanted - start).astype(np.int32)
            logits = self.engine.forward(
                storage, ids, positions, cosines, sines, part, pages, chosen
            )
            log_probs[wanted] = log_probs_of(logits, targets[wanted])
        return log_probs

    def _run(self, compute: _Compute, batch: Batch, cache: Cache | None) -> Floats:
        stored = checked_cache(NativeCache, cache)
        if stored is not None and stored.identity is not self.identity:
            raise CacheError("the KV cache was made by another model: use new_cache()")
        check_batch(self.config, batch)
        if stored is None:
            runs, pages = _runs_of_segments(batch)
            storage = _reserve(self.engine, self.kv, int(pages.max()) + 1)
        else:
            stored.check(batch)
            stored.forget(batch)
            runs, pages = _runs(batch.rows, batch.positions), stored.pages_of(batch)
            storage = stored.storage
        cosines, sines = self._angles(max(batch.positions.tolist()) + 1)
        result = compute(
            storage, batch.ids, batch.positions, cosines, sines, runs, pages, batch.wanted
        )
        if stored is not None:
            stored.advance(batch)
        return result

    def close(self) -> None:
        """Let go of the weights."""
        self._engine = None

    def _angles(self, count: int) -> tuple[Floats, Floats]:
        """Cosines and sines [≥ count, D/2] in float32, as the NumPy backend has them.

        They are made in blocks that begin at fixed positions, so that their bits do not depend
        on which positions were asked for before. Both change in one assignment, since calls may
        run side by side.
        """
        cosines, sines = self._tables
        while (start := len(cosines)) < count:
            more = rotary_tables(self.config, np.arange(start, start + _ANGLE_BLOCK))
            cosines, sines = np.concatenate([cosines, more[0]]), np.concatenate([sines, more[1]])
        if cosines is not self._tables[0]:
            self._tables = cosines, sines
        return cosines, sines


def _reserve(engine: _native.Engine, kind: str, pages: int) -> _native.KvCache:
    """Pages for keys and values. Raises ``CacheError`` where the system has no memory for them."""
    try:
        return engine.new_cache(kind, pages)
    except MemoryError:
        raise no_memory(pages * PAGE_SIZE) from None


def _runs(owners: Ints, positions: Ints) -> Ints:
    """Sequences of a batch in order, [R, 3]: tokens, position of the first, owner.

    Raises ``InputError`` where the tokens of an owner do not lie side by side in order.
    """
    runs: list[list[int]] = []
    for owner, position in zip(owners.tolist(), positions.tolist(), strict=True):
        if runs and owner == runs[-1][2] and position == runs[-1][0] + runs[-1][1]:
            runs[-1][0] += 1
        else:
            runs.append([1, position, owner])
    if len({owner for _, _, owner in runs}) < len(runs):
        raise InputError("the tokens of a sequence must lie side by side in a batch, in order")
    return np.array(runs, dtype=np.int32)


def _runs_of_segments(batch: Batch) -> tuple[Ints, Ints]:
    """Runs that begin at place 0 of pages of their own, and those pages."""
    runs = _runs(batch.segments, batch.positions)
    each = -(-runs[:, 0] // PAGE_SIZE)
    ends = np.cumsum(each)
    pages = (ends - each)[:, None] + np.arange(each.max())
    runs[:, 1] = 0
    runs[:, 2] = np.arange(len(runs))
    return runs, np.minimum(pages, ends[-1] - 1).astype(np.int32)


def _parts(runs: Ints, size: int) -> Iterator[tuple[int, int, Ints]]:
    """Cut runs into passes of up to ``size`` tokens: first token, end, and the runs of each."""
    part: list[tuple[int, int, int]] = []
    start = end = 0
    for count, place, owner in runs.tolist():
        done = 0
        while done < count:
            taken = min(count - done, start + size - end)
            part.append((taken, place + done, owner))
            done, end = done + taken, end + taken
            if end - start == size:
                yield start, end, np.array(part, dtype=np.int32)
                part, start = [], end
    if part:
        yield start, end, np.array(part, dtype=np.int32)


class NativeBackend:
    """Weights of any kind, packed for the kernels of this CPU."""

    def load(
        self,
        config: Config,
        weights: Weights[Any],
        *,
        quant: str | None = None,
        threads: int | None = None,
        kv: str | None = None,
        mmap: bool = True,
        **others: object,
    ) -> NativeModel:
        """Pack the weights, or take those of a .smol file as they lie in it.

        ``quant`` is one of ``QUANTS``; by default quantized files are held without loss where
        there is a kind for it (Q8_0, Q4_0, Q4_1) and as q8 otherwise, and dense ones as q8.
        With q8, q4 and q4m, embedding and head are q8. ``threads`` defaults to the physical cores
        that this process may use, and is never more than its CPUs. ``kv`` is one of
        ``KV_KINDS``: by default int16 beside weights of 8 or 4 bits, else f32. ``mmap=False``
        copies what lies in a file into memory of this process, in huge pages.

        Raises ``InputError`` for an unknown option or SMOLLM2_ISA, and ``CheckpointError`` for
        weights that cannot be quantized.
        """
        given_options("native", others)
        _check_choice("quant", quant, QUANTS)
        _check_choice("kv", kv, KV_KINDS)
        possible = isinstance(threads, int) and 1 <= threads <= _MAX_THREADS
        if threads is not None and not possible:
            raise InputError(f"threads={threads!r} is not in 1 … {_MAX_THREADS}")
        if config.head_dim > 256:
            raise InputError(f"a head_dim of {config.head_dim} is over 256: use backend='numpy'")
        threads = min(threads or _native.available_cores(), _cpus())
        named = dict(weights.items())
        kinds = packed_kinds(named, quant or default_quant(named.values()))
        matrices = matrices_of(named, kinds, threads=threads, mapped=mmap)
        gains = [as_float32(weight) for name, weight in named.items() if name not in kinds]
        numbers = {name: getattr(config, name) for name in SIZES}
        try:
            engine = _native.Engine(numbers, config.rms_norm_eps, matrices, gains, threads)
        except RuntimeError as error:
            raise InputError(str(error)) from None
        used = set(kinds.values())
        kv = kv or ("int16" if used.intersection(COARSE) else "f32")
        # The embedding comes first; if it is not the head as well, next to nothing of it is read.
        read = matrices if config.tie_word_embeddings else matrices[1:]
        traffic = Traffic(
            weights=sum(matrix.data.nbytes for matrix in read) + sum(gain.nbytes for gain in gains),
            token=engine.new_cache(kv, 1).page_bytes // PAGE_SIZE,
        )
        return NativeModel(config, engine, kv=kv, kinds=used, traffic=traffic)


def _cpus() -> int:
    """CPUs that this process may run on: more threads would only wait for one another."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _check_choice(option: str, value: str | None, choices: Iterable[str]) -> None:
    if value is not None and value not in choices:
        raise InputError(f"{option}={value!r} is not known: choose from {', '.join(choices)}")


backend = NativeBackend()
