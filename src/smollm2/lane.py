"""Lane: one sequence's row of a KV cache, together with the token ids that are stored there."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from time import perf_counter
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from smollm2.backends import Model
from smollm2.batch import Batch, Span, Wanted
from smollm2.sampling import Sampler, SamplingParams, TokenLogprob, logprob_of
from smollm2.stopping import FinishReason

PREFILL_CHUNK = 512
"""Prompt tokens in one forward pass; a cancellation takes effect between two passes."""

SCORE_CHUNK = 128
"""Tokens whose logits are held at a time while a text is scored."""

Cancelled = Callable[[], bool]


class Lane:
    """A cache of one row that knows its tokens, so that a shared prefix is fed only once."""

    def __init__(self, model: Model, capacity: int | None = None) -> None:
        self.model = model
        self._cache = model.new_cache(1, capacity)
        self._ids: list[int] = []
        self.seconds = 0.0
        """Time spent in forward passes."""

    @property
    def ids(self) -> tuple[int, ...]:
        """Token ids whose keys and values are stored."""
        return tuple(self._ids)

    def reuse(self, ids: Sequence[int], *, keep_last: bool = False) -> int:
        """Forget what is not a prefix of ``ids``; returns how many tokens stay.

        At least the last id is left to be fed, since its logits are needed, unless
        ``keep_last`` says that nobody will ask for them.
        """
        limit = len(ids) if keep_last else len(ids) - 1
        shared = 0
        for stored, wanted in zip(self._ids[:limit], ids, strict=False):
            if stored != wanted:
                break
            shared += 1
        self._cache.truncate(0, shared)
        del self._ids[shared:]
        return shared

    def feed(
        self,
        ids: Sequence[int],
        *,
        wanted: Literal["last", "none"] = "last",
        cancelled: Cancelled = lambda: False,
    ) -> NDArray[np.float32] | None:
        """Append ids; the logits after the last of them, [1, V] ([0, V] if none are wanted).

        Returns None where ``cancelled()``: what was fed until then stays and can be continued.
        """
        logits = None
        for start in range(0, len(ids), PREFILL_CHUNK):
            if cancelled():
                return None
            part = ids[start : start + PREFILL_CHUNK]
            final = start + PREFILL_CHUNK >= len(ids)
            logits = self._forward(part, wanted if final else "none")
        return logits

    def all_logits(self, ids: Sequence[int]) -> Iterator[NDArray[np.float32]]:
        """Append ids; the logits after each of them, [≤ SCORE_CHUNK, V] at a time."""
        for start in range(0, len(ids), SCORE_CHUNK):
            yield self._forward(ids[start : start + SCORE_CHUNK], "all")

    def _forward(self, ids: Sequence[int], wanted: Wanted) -> NDArray[np.float32]:
        span = Span(0, len(self._ids), ids, wanted)
        cache = self._cache
        batch = Batch.build([span], page_table=cache.page_table, page_size=cache.page_size)
        started = perf_counter()
        logits = self.model.forward(batch, cache)
        self.seconds += perf_counter() - started
        self._ids.extend(ids)
        return logits

    def close(self) -> None:
        """Give the cache back."""
        self._cache.close()


def generate_ids(
    lane: Lane,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    *,
    max_tokens: int,
    stop_ids: frozenset[int],
    cancelled: Cancelled,
) -> Generator[tuple[int, TokenLogprob | None], None, FinishReason]:
    """Continue a prompt, of which the lane may hold a prefix; yields each chosen id.

    The generator's return value is the finish reason. A stop id is yielded, then it ends.
    """
    sampler = Sampler(params, stop_ids)
    output: list[int] = []
    pending: Sequence[int] = prompt_ids[lane.reuse(prompt_ids) :]
    while len(output) < max_tokens:
        logits = lane.feed(pending, cancelled=cancelled)
        if logits is None:
            return "cancelled"
        position = len(prompt_ids) + len(output)
        chosen = sampler.choose(
            logits[0], prompt_ids=prompt_ids, output_ids=output, position=position
        )
        output.append(chosen)
        logprob = None
        if params.logprobs is not None:
            logprob = logprob_of(logits[0], chosen, params.logprobs)
        yield chosen, logprob
        if chosen in stop_ids:
            return "stop"
        pending = [chosen]
    return "length"
