"""Progress: who is told how a model is fetched and prepared."""

from __future__ import annotations

import sys
from typing import Protocol


class Progress(Protocol):
    """What is called as files come. One is under way at a time."""

    def note(self, text: str) -> None:
        """Something that a person should know, in one line."""

    def start(self, name: str, total: int | None, verb: str = "fetching") -> None:
        """A file begins, or begins again after a broken connection; ``total`` is in bytes."""

    def advance(self, count: int) -> None:
        """``count`` more bytes are here."""

    def finish(self) -> None:
        """The file that was started is complete, or was given up."""


class SilentProgress:
    """A ``Progress`` that tells nobody."""

    def note(self, text: str) -> None:
        """Ignore a remark."""

    def start(self, name: str, total: int | None, verb: str = "fetching") -> None:
        """Ignore a beginning."""

    def advance(self, count: int) -> None:
        """Ignore bytes."""

    def finish(self) -> None:
        """Ignore an end."""


class LineProgress(SilentProgress):
    """A ``Progress`` that writes a line for each file to stderr, if that is a terminal."""

    def __init__(self) -> None:
        self._started = ""

    def note(self, text: str) -> None:
        """Write a remark."""
        if sys.stderr is not None and sys.stderr.isatty():
            sys.stderr.write(text + "\n")

    def start(self, name: str, total: int | None, verb: str = "fetching") -> None:
        """Say that a file begins, once."""
        if name != self._started:
            size = "" if total is None else f" ({total / 1e6:.1f} MB)"
            self.note(f"{verb} {name}{size}")
        self._started = name
