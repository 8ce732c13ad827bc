"""Bench: prefill and decode in tokens per second, beside nothing but the clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from smollm2.backends import CausalLM
from smollm2.batch import Batch, Span
from smollm2.cache import Cache
from smollm2.errors import InputError
from smollm2.lane import PREFILL_CHUNK

WARM_DEPTH = 8
"""Tokens that are stored before decode is measured where no depth is asked for."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What is measured; all counts in tokens, ``batch`` in rows.

    ``prompt`` tokens of one row are read for prefill; for decode each of ``batch`` rows holds
    ``depth`` tokens and is continued by ``decode``. The best of ``repeats`` counts.
    """

    prompt: int = 512
    decode: int = 128
    depth: int = 0
    batch: int = 1
    repeats: int = 3

    def __post_init__(self) -> None:
        for name in ("prompt", "decode", "batch", "repeats"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.depth < 0:
            raise InputError(f"depth is {self.depth}: it must be at least 0")


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second: ``prefill`` of one prompt, ``decode`` summed over the batch."""

    prefill: float
    decode: float


def measure(lm: CausalLM, work: Workload) -> Speed:
    """Run a workload on random ids; nothing is sampled.

    Raises ``InputError`` where it does not fit the context length.
    """
    limit = lm.config.max_position_embeddings
    begin = work.depth or WARM_DEPTH
    longest = max(work.prompt, begin + work.decode)
    if longest > limit:
        raise InputError(f"{longest} tokens a row are more than the context length of {limit}")
    rng = np.random.default_rng(0)
    ids = rng.integers(0, lm.config.vocab_size, longest).tolist()
    prefill = [_prefill_seconds(lm, ids[: work.prompt]) for _ in range(work.repeats)]
    decode = [_decode_seconds(lm, ids, begin, work) for _ in range(work.repeats)]
    return Speed(work.prompt / min(prefill), work.batch * work.decode / min(decode))


def _prefill_seconds(lm: CausalLM, ids: Sequence[int]) -> float:
    cache = lm.new_cache(1, len(ids))
    started = perf_counter()
    _read(lm, cache, 0, ids)
    seconds = perf_counter() - started
    cache.close()
    return seconds


def _decode_seconds(lm: CausalLM, ids: Sequence[int], begin: int, work: Workload) -> float:
    cache = lm.new_cache(work.batch, begin + work.decode)
    for row in range(work.batch):
        _read(lm, cache, row, ids[:begin])
    started = perf_counter()
    for position in range(begin, begin + work.decode):
        spans = [Span(row, position, [ids[position]]) for row in range(work.batch)]
        _forward(lm, cache, spans)
    seconds = perf_counter() - started
    cache.close()
    return seconds


def _read(lm: CausalLM, cache: Cache, row: int, ids: Sequence[int]) -> None:
    for start in range(0, len(ids), PREFILL_CHUNK):
        part = ids[start : start + PREFILL_CHUNK]
        last = start + len(part) == len(ids)
        _forward(lm, cache, [Span(row, start, part, "last" if last else "none")])


def _forward(lm: CausalLM, cache: Cache, spans: Sequence[Span]) -> None:
    lm.forward(Batch.build(spans, page_table=cache.page_table, page_size=cache.page_size), cache)
