"""Interrupts: the first Ctrl-C asks for an end, the second takes it; SIGTERM leaves all tidy."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event
from types import FrameType


@contextmanager
def tidy_on_terminate() -> Iterator[None]:
    """Let SIGTERM end the body as an error does, so that it clears away what it began."""

    def handle(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    try:
        previous = signal.signal(signal.SIGTERM, handle)
    except ValueError:  # not in the main thread, where signals arrive
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def on_interrupt(stop: Callable[[], object]) -> Iterator[Event]:
    """Call ``stop`` on the first Ctrl-C instead of raising; the event says whether it came.

    A second Ctrl-C raises ``KeyboardInterrupt``.
    """
    pressed = Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()
        stop()

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, previous)
