"""A CausalLM that shares no code with the models of the package: arithmetic on what a token sees.

It is checked by mypy together with the package, and says the protocol on one page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from smollm2.batch import Batch, Ints
from smollm2.cache import PAGE_SIZE, Cache, Layout
from smollm2.causal_lm import NO_TARGET, CausalLM, Traffic
from smollm2.config import Config
from smollm2.errors import CacheError, InputError
from smollm2.sampling import Choice, log_softmax
from tests.fakes import ScriptedModel

Floats = NDArray[np.float32]


class PlainCache(Cache):
    """Token ids by slot."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self.ids: Ints = np.zeros(layout.slots, np.int32)


class PlainModel:
    """The likeliest token follows from the sum of ids that a token sees, times their places."""

    threads = None
    traffic = Traffic(weights=1000, token=10)

    def __init__(self, config: Config) -> None:
        self.config = config
        self.context_length = config.max_position_embeddings
        self.stop_ids = frozenset(config.eos_token_ids)

    def new_cache(self, rows: int = 1, capacity: int | None = None) -> PlainCache:
        """An empty cache of rows."""
        if rows < 1:
            raise InputError("a cache needs at least one row")
        return PlainCache(Layout(rows, capacity or self.context_length))

    def new_paged_cache(self, pages: int) -> PlainCache:
        """An empty cache of pages."""
        return PlainCache(Layout(pages, PAGE_SIZE, paged=True))

    def forward(self, batch: Batch, cache: Cache | None = None) -> Floats:
        """Logits [W, V]."""
        seen = self._seen(batch, cache)
        distance = (np.arange(self.config.vocab_size) - seen[:, None]) % self.config.vocab_size
        logits: Floats = -np.sqrt(distance, dtype=np.float32)
        return logits

    def hidden(self, batch: Batch, cache: Cache | None = None) -> Floats:
        """What each wanted token sees, in all columns, [W, C]."""
        seen = self._seen(batch, cache).astype(np.float32)
        return np.repeat(seen[:, None], self.config.hidden_size, axis=1)

    def log_probs(self, batch: Batch, targets: Ints) -> Floats:
        """Log-probability of each target, [T]."""
        size = self.config.vocab_size
        learned = np.flatnonzero(targets != NO_TARGET)
        for target in targets[learned].tolist():
            if not 0 <= target < size:
                raise InputError(f"target {target} is not in a vocabulary of {size}")
        every = replace(batch, wanted=np.arange(len(batch), dtype=np.int32))
        out: Floats = np.zeros(len(batch), np.float32)
        out[learned] = log_softmax(self.forward(every))[learned, targets[learned]]
        return out

    def choose(
        self, batch: Batch, choices: Sequence[Choice], cache: Cache | None = None
    ) -> list[int]:
        """Ids that follow the wanted tokens."""
        logits = self.forward(batch, cache)
        return [choice.of(row) for choice, row in zip(choices, logits, strict=True)]

    def agree(self, numbers: list[int]) -> list[int]:
        """The same."""
        return numbers

    def close(self) -> None:
        """Nothing is held."""

    def _seen(self, batch: Batch, cache: Cache | None) -> NDArray[np.int64]:
        """Of each wanted token, the sum of id · (distance + 1) over what it sees, modulo V."""
        if cache is not None:
            if not isinstance(cache, PlainCache):
                raise CacheError("the KV cache was made by another backend: use new_cache()")
            cache.check(batch)
            cache.ids[batch.slots] = batch.ids
        sums = [self._sum(batch, cache, token) for token in batch.wanted.tolist()]
        if cache is not None:
            cache.advance(batch)
        return np.array(sums, dtype=np.int64)

    def _sum(self, batch: Batch, cache: PlainCache | None, token: int) -> int:
        position = int(batch.positions[token])
        if cache is None:
            visible = (batch.segments == batch.segments[token]) & (batch.positions <= position)
            ids, places = batch.ids[visible], batch.positions[visible]
        else:
            places = np.arange(position + 1, dtype=np.int32)
            pages = batch.page_table[batch.rows[token], places // batch.page_size]
            ids = cache.ids[pages * batch.page_size + places % batch.page_size]
        distances = position - places + 1
        return int((ids.astype(np.int64) * distances).sum()) % self.config.vocab_size


def fakes(config: Config) -> dict[str, CausalLM]:
    """Models that compute nothing, as the interface that the package knows."""
    return {"plain": PlainModel(config), "scripted": ScriptedModel({}, otherwise=7, config=config)}
