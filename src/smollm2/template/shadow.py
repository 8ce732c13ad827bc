"""Shadow: texts that cannot be taken for control tokens, whatever is written around them.

A template mixes its markup with what people say, and only the mixture is seen by what looks for
control tokens. So before rendering, one character of everything in a message that could be, or
could become part of, a control token is replaced by its shadow: half a surrogate pair, which no
text can hold. Afterwards the shadows are lifted. Lengths stay the same, and texts that do not
resemble a control token stay as they are.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from smollm2.errors import TokenizerError

_FIRST, _COUNT = 0xD800, 0x700  # half surrogates; the last ones are left for other marks


@dataclass(frozen=True)
class Shadow:
    """Casts and lifts the shadows for one set of control tokens."""

    pattern: re.Pattern[str]
    tokens: tuple[str, ...]
    heads: tuple[str, ...]
    tails: tuple[str, ...]
    cast_table: dict[str, str]
    veil_table: dict[int, str]
    lift_table: dict[int, str]

    @staticmethod
    @functools.lru_cache(maxsize=8)
    def of(tokens: tuple[str, ...]) -> Shadow:
        """Make the shadow for some control tokens. Raises ``TokenizerError`` for too many."""
        characters = sorted(set("".join(tokens)))
        if len(characters) > _COUNT:
            raise TokenizerError(f"the control tokens have more than {_COUNT} different characters")
        table = {character: chr(_FIRST + i) for i, character in enumerate(characters)}
        marks = {next(filter(_is_mark, token), None) for token in tokens} - {None}
        return Shadow(
            pattern=re.compile("|".join(map(re.escape, tokens)) or r"(?!)"),
            tokens=tokens,
            heads=tuple({token[:end] for token in tokens for end in range(1, len(token))}),
            tails=tuple({token[start:] for token in tokens for start in range(1, len(token))}),
            cast_table=table,
            veil_table={ord(c): shadow for c, shadow in table.items() if c in marks},
            lift_table={ord(shadow): character for character, shadow in table.items()},
        )

    def cast(self, text: str) -> str:
        """Replace what could be taken for a control token, inside and at both ends.

        The ends are those of the stripped text, because templates strip.
        """
        while self.pattern.search(text):  # again, for tokens that overlap
            text = self.pattern.sub(lambda match: self._dark(match[0], 0), text)
        core = text.strip()
        start = text.find(core)
        end = start + len(core)
        if core and (core.startswith(self.tails) or any(core in token for token in self.tokens)):
            text = self._dark(text, start)
        if core.endswith(self.heads):
            text = self._dark(text, end - 1)
        return text

    def veil(self, text: str) -> str:
        """Replace the first punctuation mark of every control token, wherever it stands.

        Every control token that has such a mark needs it, and changes of case, cuts and joins
        make none. So whatever a template does to a veiled text, each control token that comes
        out has its mark from the template.
        """
        return text.translate(self.veil_table)

    def lift(self, text: str) -> str:
        """Give a text its characters back."""
        return text.translate(self.lift_table)

    def _dark(self, text: str, place: int) -> str:
        return text[:place] + self.cast_table.get(text[place], text[place]) + text[place + 1 :]


def _is_mark(character: str) -> bool:
    return not character.isalnum() and not character.isspace()
