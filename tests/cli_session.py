"""What the tests of the command line share: a tiny model on disk, processes, a terminal."""

from __future__ import annotations

import os
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import pexpect
import pyte

from smollm2.template import SMOLLM2_TEMPLATE
from tests.fakes import write_byte_tokenizer
from tests.tiny import random_weights, tiny_config, write_hf

COMMAND = [sys.executable, "-m", "smollm2"]
REPOSITORY = Path(__file__).parents[1]
FIRST_LETTER, LAST_LETTER = 3 + 64, 3 + 90  # ids of A … Z in a tokenizer of bytes


def write_model(folder: Path, **changes: Any) -> Path:
    """A random model that writes capital letters only, and never stops by itself."""
    config = tiny_config(**{"vocab_size": 260, **changes})
    weights = random_weights(config, seed=3)
    embedding = weights.token_embedding
    others = np.ones(len(embedding), dtype=bool)
    others[FIRST_LETTER:LAST_LETTER] = False
    embedding[others] *= 0.01
    write_byte_tokenizer(folder, SMOLLM2_TEMPLATE)
    return write_hf(folder, config, weights)


def environment(**changes: str) -> dict[str, str]:
    """The environment without what changes the command line's ways, and with ``changes``."""
    colors, own = ("NO_COLOR", "FORCE_COLOR"), ("SMOLLM2_DEBUG", "SMOLLM2_OFFLINE")
    removed = (*colors, *own, "HF_HUB_OFFLINE", "PYTHONUNBUFFERED")
    kept = {name: value for name, value in os.environ.items() if name not in removed}
    return {**kept, "TERM": "xterm-256color", **changes}


def run_cli(
    *arguments: str | Path, stdin: str | bytes = b"", **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a command with its three streams in pipes."""
    sent = stdin.encode() if isinstance(stdin, str) else stdin
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        input=sent,
        capture_output=True,
        timeout=60,
        cwd=REPOSITORY,
        env=environment(**env),
        check=False,
    )
    return subprocess.CompletedProcess(
        done.args, done.returncode, done.stdout.decode(), done.stderr.decode()
    )


class Screen:
    """A command in a terminal of 30 rows, and what a person sees there."""

    def __init__(
        self,
        *arguments: str | Path,
        command: Sequence[str] = COMMAND,
        columns: int = 100,
        **env: str,
    ) -> None:
        self.raw = ""
        self._has_ended = False
        self._screen = pyte.Screen(columns, 30)
        self._stream = pyte.Stream(self._screen)
        self._child = pexpect.spawn(
            command[0],
            [*command[1:], *map(str, arguments)],
            dimensions=(30, columns),
            encoding="utf-8",
            cwd=REPOSITORY,
            env=environment(**env),
            timeout=30,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.close(force=True)

    @classmethod
    def of_shell(cls, line: str) -> Self:
        return cls(line, command=["/bin/sh", "-c"])

    @property
    def lines(self) -> list[str]:
        """The rows that are not empty."""
        return [line.rstrip() for line in self._screen.display if line.strip()]

    def type(self, text: str) -> None:
        self._child.send(text)

    @property
    def echoes(self) -> bool:
        """Whether the terminal shows what is typed by itself."""
        return bool(termios.tcgetattr(self._child.child_fd)[3] & termios.ECHO)

    def interrupt(self, until: Callable[[], bool]) -> None:
        """Press Ctrl-C.

        Again, where nothing comes of it: Python overlooks a signal that comes between the
        moment when readline has shown its prompt and that when it begins to wait.
        """
        for _ in range(10):
            self._child.sendintr()
            if self._read_until(until, seconds=3.0):
                return
        raise AssertionError("Ctrl-C does nothing on:\n" + "\n".join(self.lines))

    def end_input(self) -> None:
        self._child.sendeof()

    def wait_for(self, seen: Callable[[], bool]) -> None:
        """Read until the screen is as wanted."""
        if not self._read_until(seen, seconds=30.0):
            raise AssertionError("not seen on:\n" + "\n".join(self.lines))

    def has_ended(self) -> bool:
        """Whether there is nothing more to read."""
        return self._has_ended

    def exit_code(self) -> int | None:
        """Read to the end; the exit code, None where a signal ended it."""
        self.wait_for(self.has_ended)
        self._child.close()
        return self._child.exitstatus

    def _read_until(self, seen: Callable[[], bool], seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not seen():
            if self._has_ended or time.monotonic() > end:
                return False
            self._read()
        return True

    def _read(self) -> None:
        try:
            text = self._child.read_nonblocking(4096, timeout=0.2)
        except pexpect.TIMEOUT:
            return
        except pexpect.EOF:
            self._has_ended = True
            return
        self.raw += text
        self._stream.feed(text)
