"""Stream: one request while it runs, from token ids to pieces of text and a result."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from threading import Event
from time import perf_counter

from smollm2.errors import InputError
from smollm2.lane import Lane, generate_ids
from smollm2.results import Generation, Piece, Stats
from smollm2.sampling import SamplingParams, TokenLogprob
from smollm2.stopping import FinishReason, StopStrings
from smollm2.tokenizer import StreamDecoder, Tokenizer


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt with everything about its completion settled: seed, length and stop ids."""

    prompt: str | None
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int]


class Stream(Iterator[Piece]):
    """Iterate to get pieces; ``result`` is there once the last one has come.

    Leaving early is fine: ``close()`` ends the request as cancelled, and so does forgetting it.
    """

    def __init__(
        self,
        request: Request,
        lane: Lane,
        tokenizer: Tokenizer | None,
        *,
        echo: bool = False,
        on_piece: Callable[[Piece], object] | None = None,
        cancel: Callable[[], bool] | None = None,
        on_finish: Callable[[Generation | None], object] = lambda _: None,
    ) -> None:
        """See ``SmolLM2.stream``.

        ``on_finish`` gets the result before the last piece is given out, or None where the
        request failed.
        """
        self.request = request
        self._lane = lane
        self._tokenizer = tokenizer
        self._echo = echo
        self._on_piece = on_piece
        self._ask = cancel
        self._on_finish = on_finish
        self._cancelled = Event()
        self._result: Generation | None = None
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._text = _Text(request, tokenizer)
        self._shown: list[str] = []
        self._times: list[float] = []
        self._prefill_seconds = 0.0
        self._cached = 0
        self._over = False
        self._pieces = self._run()

    @property
    def is_over(self) -> bool:
        """Whether it has ended, well or not."""
        return self._over

    @property
    def result(self) -> Generation:
        """The whole completion. Raises ``InputError`` while it is still running."""
        if self._result is None:
            raise InputError("the stream is not finished: take its pieces first, or close() it")
        return self._result

    def finish(self) -> Generation:
        """Take what is left, and return the result."""
        for _ in self:
            pass
        return self.result

    def cancel(self) -> None:
        """End after the current step, from any thread; the pieces until then stay."""
        self._cancelled.set()

    def close(self) -> None:
        """End now, as cancelled if it was still running."""
        self._pieces.close()
        if not self._over:
            self._conclude("cancelled")

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Piece:
        for piece in self._pieces:
            if self._on_piece is not None:
                self._on_piece(piece)
            if piece.origin != "prompt" or self._echo:
                return piece
        raise StopIteration

    def _run(self) -> Generator[Piece, None, None]:
        """All pieces, the prompt's included; the result is built before the last is given."""
        self._times.append(perf_counter())
        try:
            if self._echo or self._on_piece is not None:
                yield from self._prompt_pieces()
            reason = yield from self._generated()
        except GeneratorExit:  # close() concludes
            raise
        except BaseException:
            self._over = True
            self._on_finish(None)
            raise
        tail = self._conclude(reason)
        yield Piece(tail, origin="end", finish_reason=self.result.finish_reason)

    def _prompt_pieces(self) -> Iterator[Piece]:
        decoder = self._tokenizer and self._tokenizer.stream_decoder(skip_special=False)
        for token in self.request.prompt_ids:
            text = decoder.push(token) if decoder else ""
            if self._echo:
                self._shown.append(text)
            yield Piece(text, token, "prompt")

    def _generated(self) -> Generator[Piece, None, FinishReason]:
        """Pieces of generated tokens; returns the finish reason."""
        request = self.request
        before = self._lane.seconds
        self._cached = self._lane.reuse(request.prompt_ids)
        tokens = generate_ids(
            self._lane,
            request.prompt_ids,
            request.params,
            max_tokens=request.max_tokens,
            stop_ids=request.stop_ids,
            cancelled=self._is_cancelled,
        )
        while True:
            try:
                token, logprob = next(tokens)
            except StopIteration as end:
                reason: FinishReason = end.value
                return reason
            if not self._tokens:
                self._prefill_seconds = self._lane.seconds - before
            self._times.append(perf_counter())
            self._tokens.append(token)
            if logprob is not None:
                self._logprobs.append(logprob)
            text = self._text.push(token)
            self._shown.append(text)
            yield Piece(text, token, "generated", logprob)
            if self._text.matched is not None:
                return "stop"

    def _conclude(self, reason: FinishReason) -> str:
        """Build the result and report it; returns text that was held back until now."""
        self._over = True
        tail = self._text.flush()
        request = self.request
        stopped_by: int | str | None = None
        if self._text.matched is not None:  # perhaps only now that no text follows
            reason, stopped_by = "stop", self._text.matched
        elif reason == "stop":
            stopped_by = self._tokens[-1]
        self._result = Generation(
            prompt=request.prompt,
            prompt_ids=request.prompt_ids,
            text="".join([*self._shown, tail]),
            token_ids=tuple(self._tokens),
            finish_reason=reason,
            stopped_by=stopped_by,
            logprobs=tuple(self._logprobs) if request.params.logprobs is not None else None,
            stats=self._stats(),
            params=request.params,
        )
        self._on_finish(self._result)
        return tail

    def _stats(self) -> Stats:
        now = perf_counter()
        started = self._times[0] if self._times else now
        first = self._times[1] if self._tokens else now
        return Stats(
            prompt_tokens=len(self.request.prompt_ids),
            cached_tokens=self._cached,
            generated_tokens=len(self._tokens),
            ttft=first - started,
            prefill_seconds=self._prefill_seconds,
            decode_seconds=self._times[-1] - first if self._tokens else 0.0,
            seed=self.request.params.seed or 0,
        )

    def _is_cancelled(self) -> bool:
        return self._cancelled.is_set() or (self._ask is not None and self._ask())


class _Text:
    """From ids to text that may be shown: whole characters, no control tokens, no stop string."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        self._decoder: StreamDecoder | None = None
        self._vocabulary = 0  # an embedding may have more rows than the tokenizer has tokens
        if tokenizer is not None:
            self._decoder = tokenizer.stream_decoder(skip_special=True)
            self._vocabulary = tokenizer.vocab_size
        self._stop_ids = request.stop_ids
        self._stops = StopStrings(request.params.stop)

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.matched

    def push(self, token: int) -> str:
        if self._decoder is None or token in self._stop_ids or token >= self._vocabulary:
            return ""
        return self._stops.push(self._decoder.push(token))

    def flush(self) -> str:
        if self._decoder is None:
            return ""
        return self._stops.push(self._decoder.flush()) + self._stops.flush()
