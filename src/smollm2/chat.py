"""ChatSession: a conversation that keeps its KV cache, so that a turn feeds only what is new."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, Unpack

from smollm2.causal_lm import CausalLM
from smollm2.config import Config
from smollm2.errors import InputError, TemplateError
from smollm2.files import read_json, write_json
from smollm2.lane import Lane
from smollm2.request import DEFAULT_MAX_TOKENS, Request
from smollm2.results import Generation, Piece
from smollm2.sampling import SamplingOptions, SamplingParams
from smollm2.streaming import Stream
from smollm2.template import ChatTemplate, Message, System
from smollm2.tokenizer import Tokenizer


class Writer(Protocol):
    """What a conversation needs of a model; ``SmolLM2`` is one."""

    @property
    def lm(self) -> CausalLM:
        """What the backend made."""

    @property
    def config(self) -> Config:
        """The architecture's numbers."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Text to ids and back."""

    @property
    def template(self) -> ChatTemplate | None:
        """The checkpoint's chat template."""

    def request(self, ids: Sequence[int], params: SamplingParams) -> Request:
        """Check a prompt against the context length; settle seed, length and stop ids."""


class ChatSession:
    """A conversation with a model.

    ``system=None`` leaves the system prompt to the chat template (SmolLM2's has one of its own),
    ``""`` gives an empty system block, a text gives that text, ``False`` no block at all.
    ``messages`` holds what was said by user and assistant; after each turn the ids in the cache
    are the template's ids of that history.

    Where a turn does not fit the context length, ``send`` raises ``ContextLengthError`` and
    nothing changes; with ``drop_oldest=True`` whole turns are forgotten from the start instead.
    """

    def __init__(
        self,
        model: Writer,
        system: System = None,
        *,
        messages: Iterable[Message] = (),
        params: SamplingParams | None = None,
        template: ChatTemplate | None = None,
        drop_oldest: bool = False,
    ) -> None:
        chosen = template or model.template
        if chosen is None:
            raise TemplateError("this checkpoint has no chat template: give one")
        self.model = model
        self.system = system
        self.template = chosen
        self.params = params or SamplingParams()
        self.drop_oldest = drop_oldest
        self._messages: list[Message] = list(messages)
        self._lane = Lane(model.lm)
        self._answer: Stream | None = None
        self._encode(self._messages, add_generation_prompt=False)

    @property
    def messages(self) -> tuple[Message, ...]:
        """What was said, oldest first; the system prompt is not among them."""
        return tuple(self._messages)

    @property
    def cached_ids(self) -> tuple[int, ...]:
        """Token ids whose keys and values are stored."""
        return self._lane.ids

    def __repr__(self) -> str:
        return f"ChatSession({len(self)} messages, {len(self.cached_ids)} tokens cached)"

    def __len__(self) -> int:
        return len(self._messages)

    def build_prompt(self, offset: int = 0) -> str:
        """The text of the messages from ``offset`` on, and the start of the answer.

        From 0 that is the whole prompt, system block included; later offsets give what a turn
        adds to the cache.
        """
        if not 0 <= offset <= len(self._messages):
            raise InputError(f"offset {offset} is not in 0 … {len(self._messages)}")
        whole = self.template.render(self._messages, system=self.system)
        if offset == 0:
            return whole
        said = self.template.render(
            self._messages[:offset], system=self.system, add_generation_prompt=False
        )
        return whole.removeprefix(said)

    def send(
        self,
        content: str,
        *,
        on_piece: Callable[[Piece], object] | None = None,
        cancel: Callable[[], bool] | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Generation:
        """Say something and wait for the answer; ``options`` override the session's."""
        return self.stream(content, on_piece=on_piece, cancel=cancel, **options).finish()

    def stream(
        self,
        content: str,
        *,
        on_piece: Callable[[Piece], object] | None = None,
        cancel: Callable[[], bool] | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Stream:
        """Say something and get the answer piece by piece.

        The turn becomes part of the history when the answer ends, also when it was cancelled or
        when the next turn begins before its end; a turn that fails leaves the history as it was.
        Without ``max_tokens`` the answer may take what is left of the context.
        """
        if not isinstance(content, str):
            raise InputError(f"a message of the user is text, not {content!r}")
        self._end_answer()
        params = self._with_stops(SamplingParams.of(self.params, **options))
        said: Message = {"role": "user", "content": content}
        history, ids = self._fit([*self._messages, said], params)
        request = self.model.request(ids, params)

        def finish(result: Generation | None) -> None:
            if result is not None:
                answer: Message = {"role": "assistant", "content": result.text}
                self._ingest([*history, answer])
                self._messages = [*history, answer]

        self._answer = Stream(
            request,
            self._lane,
            self.model.tokenizer,
            on_piece=on_piece,
            cancel=cancel,
            on_finish=finish,
        )
        return self._answer

    def ingest(self) -> int:
        """Bring the cache up to the history without generating; returns the tokens fed.

        Called after each turn, so that the next one feeds only its own tokens.
        """
        self._end_answer()
        return self._ingest(self._messages)

    def reset(self) -> None:
        """Forget the conversation; system prompt and options stay."""
        self._end_answer()
        self._messages = []
        self._lane.reuse(())

    def save(self, path: str | Path) -> None:
        """Write system prompt and messages as JSON, whole or not at all."""
        value = {"format": FORMAT, "system": self.system, "messages": self._messages}
        write_json(Path(path), value)

    @classmethod
    def load(
        cls,
        model: Writer,
        path: str | Path,
        *,
        params: SamplingParams | None = None,
        template: ChatTemplate | None = None,
        drop_oldest: bool = False,
    ) -> ChatSession:
        """Continue a conversation that ``save`` wrote; the options are the constructor's.

        Raises ``FormatError`` where the file is not JSON and ``InputError`` where it is not a
        conversation.
        """
        value = read_json(Path(path))
        system, messages = value.get("system"), value.get("messages")
        if value.get("format") != FORMAT or not isinstance(messages, list):
            raise InputError(f"{path}: not a conversation saved by smollm2")
        if not (system is None or system is False or isinstance(system, str)):
            raise InputError(f"{path}: system is {system!r}, not a text, null or false")
        try:
            return cls(
                model,
                system,
                messages=messages,
                params=params,
                template=template,
                drop_oldest=drop_oldest,
            )
        except InputError as error:
            raise InputError(f"{path}: {error}") from None

    def _with_stops(self, params: SamplingParams) -> SamplingParams:
        """Stop ids of the session's template count as those of the model's own do."""
        if params.ignore_eos or self.template is self.model.template:
            return params
        stops = self.template.stop_ids(self.model.tokenizer)
        return replace(params, stop_ids=(*params.stop_ids, *sorted(stops)))

    def _end_answer(self) -> None:
        """End an answer that was left before its end, as cancelled."""
        if self._answer is not None and not self._answer.is_over:
            self._answer.close()
        self._answer = None

    def _ingest(self, messages: Sequence[Message]) -> int:
        ids = self._encode(messages, add_generation_prompt=False)
        ids = ids[: self.model.config.max_position_embeddings]
        kept = self._lane.reuse(ids, keep_last=True)
        self._lane.feed(ids[kept:], wanted="none")
        return len(ids) - kept

    def _encode(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> list[int]:
        if not messages:  # a template may count on having one
            return []
        return self.template.encode(
            self.model.tokenizer,
            messages,
            system=self.system,
            add_generation_prompt=add_generation_prompt,
        )

    def _fit(
        self, messages: list[Message], params: SamplingParams
    ) -> tuple[list[Message], list[int]]:
        """The messages that fit the context length beside the answer, and their ids."""
        context = self.model.config.max_position_embeddings
        answer = params.max_tokens
        if answer is None:
            answer = min(DEFAULT_MAX_TOKENS, context // 4)
        room = context - answer
        while True:
            ids = self._encode(messages, add_generation_prompt=True)
            if len(ids) <= room or not self.drop_oldest:
                return messages, ids
            turns = [i for i, m in enumerate(messages) if m["role"] == "user"]
            if len(turns) < 2:
                return messages, ids
            messages = messages[: turns[0]] + messages[turns[1] :]


FORMAT = "smollm2-chat-1"
"""Marks a saved conversation."""
