"""Lane: one sequence's row of a KV cache, together with the token ids that are stored there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from smollm2.batch import Batch, Span, Wanted
from smollm2.causal_lm import CausalLM
from smollm2.request import Request
from smollm2.sampling import Choice, Sampler, TokenLogprob, logprob_of
from smollm2.stopping import FinishReason

PREFILL_CHUNK = 512
"""Prompt tokens in one forward pass; a cancellation takes effect between two passes."""

SCORE_CHUNK = 128
"""Tokens whose logits are held at a time while a text is scored."""

Cancelled = Callable[[], bool]


class Lane:
    """A cache of one row that knows its tokens, so that a shared prefix is fed only once."""

    def __init__(self, lm: CausalLM, capacity: int | None = None) -> None:
        self.lm = lm
        self._cache = lm.new_cache(1, capacity)
        self._ids: list[int] = []

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

    def choose(
        self, ids: Sequence[int], choice: Choice, cancelled: Cancelled = lambda: False
    ) -> int | None:
        """Append ids; the token that is chosen to follow, or None where ``cancelled()``."""
        *_, last = range(0, len(ids), PREFILL_CHUNK)
        if self.feed(ids[:last], wanted="none", cancelled=cancelled) is None and last > 0:
            return None
        if cancelled():
            return None
        (token,) = self.lm.choose(self._batch(ids[last:], "last"), [choice], self._cache)
        self._ids.extend(ids[last:])
        return token

    def _forward(self, ids: Sequence[int], wanted: Wanted) -> NDArray[np.float32]:
        logits = self.lm.forward(self._batch(ids, wanted), self._cache)
        self._ids.extend(ids)
        return logits

    def _batch(self, ids: Sequence[int], wanted: Wanted) -> Batch:
        span = Span(0, len(self._ids), ids, wanted)
        cache = self._cache
        return Batch.build([span], page_table=cache.page_table, page_size=cache.page_size)

    def close(self) -> None:
        """Give the cache back."""
        self._cache.close()


@dataclass(frozen=True, slots=True)
class Chosen:
    """A token that the model chose, and its log-probability where that was asked for."""

    token_id: int
    logprob: TokenLogprob | None


class Completion:
    """The tokens of one request, chosen on a lane that may hold a prefix of its prompt.

    Iterate once. ``cached_tokens`` and ``prefill_seconds`` are known with the first token,
    ``finish_reason`` after the last; a stop id is given out before the end.
    """

    def __init__(self, lane: Lane, request: Request, cancelled: Cancelled) -> None:
        self.cached_tokens = 0
        self.prefill_seconds = 0.0
        self.finish_reason: FinishReason | None = None
        self._lane = lane
        self._request = request
        self._cancelled = cancelled

    def __iter__(self) -> Iterator[Chosen]:
        request = self._request
        sampler = Sampler(request.params, request.stop_ids)
        self.cached_tokens = self._lane.reuse(request.prompt_ids)
        pending: Sequence[int] = request.prompt_ids[self.cached_tokens :]
        output: list[int] = []
        while len(output) < request.max_tokens:
            started = perf_counter()
            position = len(request.prompt_ids) + len(output)
            chosen = self._next(pending, Choice(sampler, position, request.prompt_ids, output))
            if chosen is None:
                self.finish_reason = "cancelled"
                return
            if not output:
                self.prefill_seconds = perf_counter() - started
            token = chosen.token_id
            output.append(token)
            yield chosen
            if token in request.stop_ids:
                self.finish_reason = "stop"
                return
            pending = [token]
        self.finish_reason = "length"

    def _next(self, pending: Sequence[int], choice: Choice) -> Chosen | None:
        """Feed what is pending and choose; logits come back only where logprobs are wanted."""
        wanted = self._request.params.logprobs
        if wanted is None:
            token = self._lane.choose(pending, choice, self._cancelled)
            return None if token is None else Chosen(token, None)
        logits = self._lane.feed(pending, cancelled=self._cancelled)
        if logits is None:
            return None
        token = choice.of(logits[0])
        return Chosen(token, logprob_of(logits[0], token, wanted))
