"""Keyboard: the lines that a person types, and none of them shown while an answer is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from smollm2.cli.terminal import Terminal


def typed_lines(terminal: Terminal, label: str, style: str) -> Iterator[str]:
    """Lines that a person types. Ctrl-C drops what is on the line, and leaves where nothing is."""
    readline = _import_readline()
    while True:
        if terminal.interactive:
            terminal.line()
        try:
            line = input(terminal.prompt(label, style, hides_codes=readline is not None))
        except EOFError:
            terminal.line()
            return
        except KeyboardInterrupt:
            terminal.line()
            if readline is None or not readline.get_line_buffer():
                return
            continue
        yield line


@contextmanager
def no_echo() -> Iterator[None]:
    """Keep what is typed, ``^C`` too, off the screen; it is there for the next line.

    Does nothing where stdin is not a terminal, or one of Windows.
    """
    if sys.platform == "win32" or sys.stdin is None or not sys.stdin.isatty():
        yield
        return
    import termios

    before = termios.tcgetattr(sys.stdin)
    silent = termios.tcgetattr(sys.stdin)
    silent[3] &= ~termios.ECHO
    try:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, silent)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


def _import_readline() -> ModuleType | None:
    """Find the line editor and its history, where Python was built with one."""
    try:
        import readline
    except ImportError:
        return None
    return readline
