"""Bench: how fast a model reads and writes, beside what the machine can do at most."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from time import perf_counter

import numpy as np

from smollm2.batch import Batch, Span
from smollm2.cache import Cache
from smollm2.causal_lm import CausalLM
from smollm2.config import Config
from smollm2.errors import InputError
from smollm2.extension import compiled
from smollm2.lane import PREFILL_CHUNK
from smollm2.weights import EMBEDDING, HEAD

WARM_DEPTH = 8
"""Tokens that are stored before decode is measured where no depth is asked for."""

FIRST_PROMPT = 5
"""Tokens of the prompt whose first answer is waited for: "The capital of France is"."""


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

    @property
    def begin(self) -> int:
        """Tokens that each row holds when decode begins."""
        return self.depth or WARM_DEPTH


@dataclass(frozen=True, slots=True)
class Limits:
    """What a machine can do at most: bytes read, and 8-bit multiply-adds, in 1e9 a second.

    ``dot_gmac_s`` is 0 where no instruction is known that makes such products.
    """

    read_gb_s: float
    dot_gmac_s: float


@dataclass(frozen=True, slots=True)
class Speed:
    """``rate`` tokens per second, and what they use of the machine, counted as ``Limits`` are.

    Attention's products are not counted.
    """

    rate: float
    read_gb_s: float
    dot_gmac_s: float


@dataclass(frozen=True, slots=True)
class Case:
    """How fast a workload ran: prefill of one prompt, and decode summed over the batch."""

    work: Workload
    prefill: Speed
    decode: Speed


def measure(
    lm: CausalLM, works: Sequence[Workload], say: Callable[[str], object] = lambda _: None
) -> list[Case]:
    """Run workloads on random ids; nothing is sampled. Prefill is run once for all alike.

    ``say`` is told what comes. Raises ``InputError``, before anything runs, for a workload that
    is longer than the context length.
    """
    limit = lm.config.max_position_embeddings
    for work in works:
        longest = max(work.prompt, work.begin + work.decode)
        if longest > limit:
            raise InputError(f"{longest} tokens a row are more than the context length of {limit}")
    prefill: dict[tuple[int, int], Speed] = {}
    cases = []
    for work in works:
        read = work.prompt, work.repeats
        if read not in prefill:
            say(f"prefill of {work.prompt} tokens")
            prefill[read] = measure_prefill(lm, work)
        say(f"decode at depth {work.depth}, batch {work.batch}")
        cases.append(Case(work, prefill[read], measure_decode(lm, work)))
    return cases


def measure_prefill(lm: CausalLM, work: Workload) -> Speed:
    """Read a prompt; the weights are read once a chunk."""
    ids = _ids(lm, work.prompt)
    seconds = []
    for _ in range(work.repeats):
        cache = lm.new_cache(1, len(ids))
        started = perf_counter()
        _read(lm, cache, 0, ids)
        seconds.append(perf_counter() - started)
        cache.close()
    best = min(seconds)
    chunks = -(-work.prompt // PREFILL_CHUNK)
    return Speed(
        work.prompt / best,
        chunks * lm.traffic.weights / best / 1e9,
        work.prompt * _block_products(lm.config) / best / 1e9,
    )


def measure_decode(lm: CausalLM, work: Workload) -> Speed:
    """Write; each step reads the weights once, and of each row all that is stored."""
    ids = _ids(lm, work.begin + work.decode)
    cache = lm.new_cache(work.batch, len(ids))
    for row in range(work.batch):
        _read(lm, cache, row, ids[: work.begin])
    seconds = []
    for _ in range(work.repeats):
        for row in range(work.batch):
            cache.truncate(row, work.begin)
        started = perf_counter()
        for position in range(work.begin, len(ids)):
            spans = [Span(row, position, [ids[position]]) for row in range(work.batch)]
            _forward(lm, cache, spans)
        seconds.append(perf_counter() - started)
    cache.close()
    rate = work.batch * work.decode / min(seconds)
    stored = work.begin + (work.decode + 1) / 2
    step = lm.traffic.weights + work.batch * stored * lm.traffic.token
    products = _block_products(lm.config) + lm.config.vocab_size * lm.config.hidden_size
    return Speed(rate, rate / work.batch * step / 1e9, rate * products / 1e9)


def read_first_prompt(lm: CausalLM) -> None:
    """Compute what the first token of an answer to a short prompt needs."""
    cache = lm.new_cache(1, FIRST_PROMPT)
    _read(lm, cache, 0, _ids(lm, FIRST_PROMPT))
    cache.close()


def probe(threads: int | None = None) -> Limits | None:
    """Measure the machine's limits with as many threads, by default one a physical core.

    Takes a quarter of a second and 256 MB. Returns None where the extension is missing.
    """
    measure = compiled("probe")
    if measure is None:
        return None
    found = measure(threads or 0)
    return Limits(found.read_gb_s, found.dot_gmac_s)


def peak_memory() -> int | None:
    """The most bytes of memory that this process has had, None where the system does not say."""
    try:  # not ru_maxrss, which on Linux begins at what the parent of this process had
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    except (OSError, IndexError):
        pass
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _block_products(config: Config) -> int:
    """Multiply-adds of a token in the matrices of all blocks."""
    return sum(
        prod(shape)
        for name, shape in config.shapes.items()
        if len(shape) == 2 and name not in (EMBEDDING, HEAD)
    )


def _ids(lm: CausalLM, count: int) -> list[int]:
    ids: list[int] = np.random.default_rng(0).integers(0, lm.config.vocab_size, count).tolist()
    return ids


def _read(lm: CausalLM, cache: Cache, row: int, ids: Sequence[int]) -> None:
    for start in range(0, len(ids), PREFILL_CHUNK):
        part = ids[start : start + PREFILL_CHUNK]
        last = start + len(part) == len(ids)
        _forward(lm, cache, [Span(row, start, part, "last" if last else "none")])


def _forward(lm: CausalLM, cache: Cache, spans: Sequence[Span]) -> None:
    lm.forward(Batch.build(spans, page_table=cache.page_table, page_size=cache.page_size), cache)
