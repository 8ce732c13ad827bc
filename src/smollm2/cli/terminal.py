"""Terminal: text to stdout, everything else to stderr, colour only where a person looks."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

BOLD, DIM, RED, GREEN, CYAN = "1", "2", "1;31", "32", "36"
_ESCAPE_CODE = re.compile("\033\\[[0-9;]*m")
_COLUMNS = 80
"""A terminal that is no wider shows each line whole."""


def settle_streams() -> None:
    """Let no character that a terminal or a pipe cannot show be an error; read UTF-8 only.

    A stream that the shell has closed becomes one that nobody reads.
    """
    sys.stdout = sys.stdout or _nobody()
    sys.stderr = sys.stderr or _nobody()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")


def drop_unwritten() -> None:
    """Let what could not be written be no error a second time, when the interpreter ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with suppress(OSError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())


def _nobody() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")


def _say(text: str) -> None:
    """Write to stderr. That it cannot be written to is no reason to fail."""
    with suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()


def _width() -> int:
    """Columns of the terminal that stderr is, at most as many as we ever fill."""
    try:
        return min(os.get_terminal_size(sys.stderr.fileno()).columns or _COLUMNS, _COLUMNS)
    except OSError:
        return _COLUMNS


def has_color(stream: TextIO) -> bool:
    """Whether escape codes may be written to a stream: https://no-color.org."""
    return (
        stream.isatty()
        and not os.environ.get("NO_COLOR")
        and os.environ.get("TERM", "dumb") != "dumb"
    )


def styled(text: str, style: str) -> str:
    """Put a text between the escape codes of a style."""
    return f"\033[{style}m{text}\033[0m"


def printable(text: str) -> str:
    """Show line breaks as spaces and control characters by their names."""
    return "".join(_shown(character) for character in text)


def cut_in_front(text: str, beside: str) -> str:
    """Leave out the start of a text that does not fit a line with what stands ``beside`` it."""
    room = max(_COLUMNS - len(beside), 2)
    return text if len(text) <= room else f"…{text[1 - room :]}"


def oserror_text(error: OSError) -> str:
    """Say what the system refused, and for which file."""
    name = "" if error.filename is None else f"{error.filename}: "
    return f"{name}{error.strerror or error}"


def print_error(message: str, *, color: bool = True) -> None:
    """One line on stderr."""
    label = "error:"
    if color and has_color(sys.stderr):
        label = styled(label, RED)
    _say(f"{label} {printable(message)}\n")


def show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """One line on stderr, in place of ``warnings.showwarning`` and its two with the source."""
    _say(f"warning: {printable(str(message))}\n")


class Terminal:
    """Where a command writes.

    ``interactive`` tells whether a person reads stdout, ``is_live`` whether stderr is a terminal
    on which lines may be drawn anew.
    """

    def __init__(self, *, no_color: bool = False) -> None:
        self.interactive = sys.stdout.isatty()
        self._stdout_color = not no_color and has_color(sys.stdout)
        self._stderr_color = not no_color and has_color(sys.stderr)
        self.is_live = self._stderr_color
        self._at_line_start = True

    def text(self, text: str, style: str | None = None) -> None:
        """Write text to stdout, at once. On a terminal, control characters are left out."""
        if not text:
            return
        if self.interactive:
            text = "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")
        self._at_line_start = text.endswith("\n")
        sys.stdout.write(styled(text, style) if style and self._stdout_color else text)
        sys.stdout.flush()

    def end_line(self) -> None:
        """Begin a new line on stdout, unless it is at the start of one."""
        if not self._at_line_start:
            self.text("\n")

    def line(self, text: str = "") -> None:
        """Write a line to stdout."""
        self.text(f"{text}\n")

    def prompt(self, text: str, style: str, *, hides_codes: bool) -> str:
        """Return what ``input`` is to show; where stdout is not a terminal, stderr has it already.

        ``hides_codes``: mark escape codes for readline, which would count them as characters.
        """
        if not self.interactive:
            _say(text)
            return ""
        if not self._stdout_color:
            return text
        shown = styled(text, style)
        return _ESCAPE_CODE.sub("\001\\g<0>\002", shown) if hides_codes else shown

    def json(self, value: Any) -> None:
        """Write a value to stdout as one line of JSON."""
        self.line(json.dumps(value, ensure_ascii=False))

    def note(self, *parts: str) -> None:
        """Write a line to stderr; on a terminal two, where the parts are too long for one."""
        lines: list[str] = []
        for part in map(printable, parts):
            joined = f"{lines[-1]} · {part}" if lines else part
            if lines and (not sys.stderr.isatty() or len(joined) <= _COLUMNS):
                lines[-1] = joined
            else:
                lines.append(part)
        for text in lines:
            _say(f"{styled(text, DIM) if self._stderr_color else text}\n")

    @contextmanager
    def status(self) -> Iterator[Callable[[str], None]]:
        """Give a way to say on stderr how far something is: in one line, if that can be redrawn."""
        if not self.is_live:
            yield self.note
            return
        try:
            yield lambda text: _say(f"\r\033[K{styled(printable(text)[: _width() - 1], DIM)}")
        finally:
            _say("\r\033[K")

    def error(self, message: str) -> None:
        """Write an error to stderr, in one line."""
        print_error(message, color=self._stderr_color)

    def table(
        self, header: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: int = 0
    ) -> None:
        """Write rows to stdout: aligned under a header on a terminal, else split by tabs.

        The last ``numbers`` columns are aligned to the right.
        """
        cells = [[self._cell(value) for value in row] for row in rows]
        if not self.interactive:
            for row in cells:
                self.line("\t".join(row))
            return
        widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
        self.text(_aligned(header, widths, numbers), BOLD)
        self.line()
        for row in cells:
            self.line(_aligned(row, widths, numbers))

    def facts(self, facts: Iterable[tuple[str, object]]) -> None:
        """Write names and values to stdout, a line each."""
        shown = [(name, self._cell(value)) for name, value in facts]
        if not self.interactive:
            for name, value in shown:
                self.line(f"{name}\t{value}")
            return
        width = max(len(name) for name, _ in shown)
        for name, value in shown:
            self.text(name.ljust(width), CYAN)
            self.line(f"  {value}")

    def _cell(self, value: object) -> str:
        """Write a value in one line; to a person, a path in the home folder begins with ``~``."""
        if self.interactive and isinstance(value, Path):
            home = os.path.expanduser("~")
            if value.is_relative_to(home):
                value = Path("~", value.relative_to(home))
        return printable(str(value))


def _shown(character: str) -> str:
    if character.isspace():
        return " "
    if unicodedata.category(character) in ("Cc", "Cs"):
        return character.encode("unicode_escape").decode()
    return character


def _aligned(cells: Sequence[str], widths: Sequence[int], numbers: int) -> str:
    left = len(cells) - numbers
    padded = (
        cell.ljust(width) if column < left else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join(padded).rstrip()
