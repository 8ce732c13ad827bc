"""Stopping: which tokens end an answer, and stop strings found in a stream of text."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from smollm2.errors import ConfigError

if TYPE_CHECKING:
    from smollm2.config import Config
    from smollm2.template import ChatTemplate
    from smollm2.tokenizer import Tokenizer

FinishReason = Literal["stop", "length", "cancelled", "error"]
"""Why an answer ended: a stop id or string, its length limit, its caller, or a fault."""

END_OF_TEXT = "<|endoftext|>"
"""The token that ends a document in the family's pretraining; every model may emit it."""


class StopStrings:
    """Finds the first of some strings in text that comes in pieces.

    First is the one that starts earliest and, of those that start together, the shortest: the
    text shown is what searching the whole text at once would show, however it was cut in pieces.
    Held back is exactly the longest end of the text that may still become a stop string. Each
    character costs one step per stop string (Knuth, Morris and Pratt's automaton).

    ``matched`` is the string that was found, or None.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.matched: str | None = None
        self._finders = [_Finder(stop) for stop in stops]
        self._held = ""
        self._found: tuple[int, str] | None = None  # start in _held, stop string

    def push(self, text: str) -> str:
        """Take the next piece and return the text that may be shown now; nothing after a match.

        A match counts once no stop string that starts before it can still be completed.
        """
        if self.matched is not None or not text:
            return ""
        if not self._finders:
            return text
        end = safe = len(self._held)
        self._held += text
        for character in text:
            end += 1
            safe = end - max(finder.step(character) for finder in self._finders)
            self._note_match(end)
            if self._found is not None and self._found[0] <= safe:
                return self.flush()
        return self._release(safe)

    def flush(self) -> str:
        """End the text and return what was held back, up to the first match if there is one."""
        for finder in self._finders:
            finder.length = 0
        if self._found is None:
            return self._release(len(self._held))
        start, self.matched = self._found
        shown, self._held, self._found = self._held[:start], "", None
        return shown

    def _note_match(self, end: int) -> None:
        """Keep the first of the stop strings that are complete at ``end`` or were before."""
        for finder in self._finders:
            start = end - finder.length
            if finder.is_complete and (self._found is None or start < self._found[0]):
                self._found = start, finder.stop

    def _release(self, count: int) -> str:
        shown, self._held = self._held[:count], self._held[count:]
        if self._found is not None:
            self._found = self._found[0] - count, self._found[1]
        return shown


class _Finder:
    """One stop string, and ``length``: how many of its characters the text ends with."""

    __slots__ = ("_borders", "length", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        self._borders = _borders(stop)

    @property
    def is_complete(self) -> bool:
        return self.length == len(self.stop)

    def step(self, character: str) -> int:
        """Append a character to the text. Returns the new ``length``."""
        if self.is_complete:
            self.length = 0  # a second match would start after the first, which is kept
        while self.length and self.stop[self.length] != character:
            self.length = self._borders[self.length - 1]
        if self.stop[self.length] == character:
            self.length += 1
        return self.length


def _borders(stop: str) -> list[int]:
    """For each prefix of ``stop``: the length of its longest proper prefix that also ends it."""
    borders = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[length] != stop[index]:
            length = borders[length - 1]
        if stop[length] == stop[index]:
            length += 1
        borders[index] = length
    return borders


def stop_ids(
    config: Config,
    generation_config: Mapping[str, Any],
    tokenizer: Tokenizer | None,
    template: ChatTemplate | None,
) -> frozenset[int]:
    """All tokens that end an answer, from every source that names one.

    These are ``eos_token_id`` of the generation config and of the config, the tokenizer's eos,
    the tokens that the chat template puts after an assistant's message, and ``<|endoftext|>``.

    Raises ``ConfigError`` for an id that is not one or is outside the vocabulary.
    """
    sources: dict[str, object] = {
        "eos_token_id of the generation config": generation_config.get("eos_token_id"),
        "eos_token_id of the config": config.eos_token_ids,
    }
    if tokenizer is not None:
        sources["the tokenizer's eos token"] = tokenizer.eos_id
        sources[END_OF_TEXT] = tokenizer.special_tokens.get(END_OF_TEXT)
        if template is not None:
            sources["the chat template's last token"] = template.stop_ids(tokenizer)
    return frozenset(
        token_id
        for source, value in sources.items()
        for token_id in _token_ids(source, value, config.vocab_size)
    )


def _token_ids(source: str, value: object, vocab_size: int) -> list[int]:
    """Return the ids in an id, a collection of ids, or None; each in the vocabulary."""
    if value is None:
        return []
    ids = []
    for item in value if isinstance(value, list | tuple | frozenset) else [value]:
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < vocab_size:
            raise ConfigError(
                f"{source} is {reprlib.repr(item)}, which is not a token id: "
                f"ids are 0 to {vocab_size - 1}"
            )
        ids.append(item)
    return ids
