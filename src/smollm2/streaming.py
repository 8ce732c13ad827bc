"""Stream: one request while it runs, from token ids to pieces of text and a result."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from inspect import GEN_RUNNING, getgeneratorstate
from threading import Event
from time import perf_counter
from types import TracebackType
from typing import Self

from smollm2.errors import InputError
from smollm2.lane import Completion, Lane
from smollm2.request import Request
from smollm2.results import Generation, Piece, Stats
from smollm2.sampling import TokenLogprob
from smollm2.stopping import FinishReason, StopStrings
from smollm2.tokenizer import StreamDecoder, Tokenizer

Finish = Callable[[Generation | None], object]


class Stream(Iterator[Piece]):
    """Iterate to get pieces; ``result`` is there once the last one has come.

    Leaving early is fine: ``close()``, the end of a ``with`` and forgetting the stream all end
    the request as cancelled.
    """

    def __init__(
        self,
        request: Request,
        lane: Lane,
        tokenizer: Tokenizer | None,
        *,
        echo: bool = False,
        show_special: bool = False,
        on_piece: Callable[[Piece], object] | None = None,
        cancel: Callable[[], bool] | None = None,
        on_finish: Finish = lambda _: None,
    ) -> None:
        """See ``SmolLM2.stream``.

        ``on_finish`` gets the result before the last piece is given out, or None where the
        request failed.
        """
        self.request = request
        self._completion = Completion(lane, request, self._is_cancelled)
        self._tokenizer = tokenizer
        self._echo = echo
        self._on_piece = on_piece
        self._ask = cancel
        self._on_finish = on_finish
        self._cancelled = Event()
        self._result: Generation | None = None
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._text = _Text(request, tokenizer, show_special=show_special)
        self._shown: list[str] = []
        self._started = self._first = self._last = 0.0
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
        """End now, as cancelled if it was still running.

        Raises ``InputError`` while another thread waits for its next piece.
        """
        if getgeneratorstate(self._pieces) == GEN_RUNNING:
            raise InputError("another thread waits for the next piece: cancel() the stream instead")
        self._pieces.close()
        if not self._over:  # it had not begun
            self._conclude("cancelled")

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Piece:
        while True:
            piece = next(self._pieces)
            if self._on_piece is not None:
                try:
                    self._on_piece(piece)
                except BaseException:
                    self.close()
                    raise
            if piece.origin != "prompt" or self._echo:
                return piece

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self) -> Generator[Piece, None, None]:
        """All pieces, the prompt's included; the result is built before the last is given."""
        self._started = perf_counter()
        try:
            if self._echo or self._on_piece is not None:
                yield from self._prompt_pieces()
            reason = yield from self._generated()
        except GeneratorExit:
            self._conclude("cancelled")
            raise
        except BaseException:
            self._over = True
            self._on_finish(None)
            raise
        tail = self._conclude(reason)
        yield Piece(tail, origin="end", finish_reason=self.result.finish_reason)

    def _prompt_pieces(self) -> Iterator[Piece]:
        decoder = _Decoder(self._tokenizer, skip_special=False)
        for token in self.request.prompt_ids:
            text = decoder.push(token)
            if self._echo:
                self._shown.append(text)
            yield Piece(text, token, "prompt")

    def _generated(self) -> Generator[Piece, None, FinishReason]:
        """Pieces of generated tokens; returns the finish reason."""
        for chosen in self._completion:
            self._last = perf_counter()
            if not self._tokens:
                self._first = self._last
            self._tokens.append(chosen.token_id)
            if chosen.logprob is not None:
                self._logprobs.append(chosen.logprob)
            text = self._text.push(chosen.token_id)
            self._shown.append(text)
            yield Piece(text, chosen.token_id, "generated", chosen.logprob)
            if self._text.matched is not None:
                return "stop"
        return self._completion.finish_reason or "error"

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
        return Stats(
            prompt_tokens=len(self.request.prompt_ids),
            cached_tokens=self._completion.cached_tokens,
            generated_tokens=len(self._tokens),
            ttft=self._first - self._started if self._tokens else 0.0,
            prefill_seconds=self._completion.prefill_seconds,
            decode_seconds=self._last - self._first,
            seed=self.request.params.seed or 0,
        )

    def _is_cancelled(self) -> bool:
        return self._cancelled.is_set() or (self._ask is not None and self._ask())


class _Text:
    """From ids to text that may be shown: whole characters, up to a stop string."""

    def __init__(
        self, request: Request, tokenizer: Tokenizer | None, *, show_special: bool
    ) -> None:
        self._decoder = _Decoder(tokenizer, skip_special=not show_special)
        self._hidden = frozenset() if show_special else request.stop_ids
        self._stops = StopStrings(request.params.stop)

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.matched

    def push(self, token: int) -> str:
        if token in self._hidden:
            return ""
        return self._stops.push(self._decoder.push(token))

    def flush(self) -> str:
        return self._stops.push(self._decoder.flush()) + self._stops.flush()


class _Decoder:
    """A StreamDecoder that has no text for ids without a token.

    An embedding may have more rows than the tokenizer has tokens, and there may be no tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, skip_special: bool) -> None:
        self._decoder: StreamDecoder | None = None
        self._vocabulary = 0
        if tokenizer is not None:
            self._decoder = tokenizer.stream_decoder(skip_special=skip_special)
            self._vocabulary = tokenizer.vocab_size

    def push(self, token: int) -> str:
        return self._decoder.push(token) if self._decoder and token < self._vocabulary else ""

    def flush(self) -> str:
        return self._decoder.flush() if self._decoder else ""
