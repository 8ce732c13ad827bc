"""Budget: what a template may use up, in characters and items, and how values are measured."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

from jinja2.exceptions import SecurityError

ITEM = 16
"""The price of an item of a list, which takes more memory than a character."""

MAX_BITS = 4096
"""The size of the largest whole number."""

_STEP = 32  # the price of a call, of a turn of a loop, of an item that is handed on
_SECONDS = 5.0  # a second bound, for what the prices underrate
_NOTHING: dict[str, str] = {}
_VIEWS = (type(_NOTHING.keys()), type(_NOTHING.values()), type(_NOTHING.items()))
_LISTS = (list, tuple, set, frozenset, *_VIEWS)


class Budget:
    """An amount of units that is spent before the work is done.

    A unit is a character that is read or written or a part of a template that is run, roughly
    what a microsecond or ten bytes suffice for.
    """

    def __init__(self, units: int) -> None:
        self._left = units
        self._deadline = time.monotonic() + _SECONDS

    def spend(self, units: int) -> None:
        """Pay for a step and ``units``. Raises ``SecurityError`` where they are not left."""
        self._left -= _STEP + units
        if self._left < 0 or time.monotonic() > self._deadline:
            raise SecurityError("it takes too much time or memory")

    def pay(self, *values: Any) -> None:
        """Pay for a step and for the size of values."""
        self.spend(size(values, self._left))

    def walk(self, values: Iterable[Any], *more: Any) -> Iterator[Any]:
        """Hand values on, each of them paid for before, and each time ``more`` with it."""
        for value in values:
            self.pay(value, *more)
            yield value


def size(value: Any, limit: int) -> int:
    """Characters and items of a value, each counted as often as it appears; stops at ``limit``.

    So it bounds what it takes to write, compare or copy the value, however its parts are shared.
    Raises ``SecurityError`` for a number that is too large.
    """
    total = 0
    waiting = [value]
    while waiting and total <= limit:
        item = waiting.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, _LISTS):
            total += 1 + ITEM * len(item)
            waiting.extend(item if total <= limit else ())
        elif isinstance(item, dict):
            total += 1 + 2 * ITEM * len(item)
            waiting.extend((*item.keys(), *item.values()) if total <= limit else ())
        else:
            if isinstance(item, int):
                check_bits(item.bit_length())
            total += 1
    return total


def check_bits(bits: int) -> None:
    """Raise ``SecurityError`` for a whole number of more than ``MAX_BITS``."""
    if bits > MAX_BITS:
        raise SecurityError("numbers so large are not allowed")


def text_price(method: str, text: str, arguments: tuple[Any, ...]) -> int:
    """What a method of a text costs at most, beside the size of its arguments.

    Python searches forward in linear time. Backward, and when it strips given characters, the
    time grows with the product of both lengths.
    """
    texts = [argument for argument in arguments if isinstance(argument, str)]
    price = len(text)
    if method in ("rfind", "rindex", "rpartition", "rsplit", "strip", "lstrip", "rstrip"):
        price *= max([1, *map(len, texts)])
    if method in ("split", "rsplit", "splitlines"):
        pieces = text.count(texts[0]) if texts and texts[0] else len(text) // 2
        price += ITEM * (1 + pieces)
    return price
