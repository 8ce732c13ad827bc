"""Ctrl-C while the native engine computes: a real signal ends the work within one step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import smollm2
from smollm2.cli.interrupts import on_interrupt
from smollm2.lane import PREFILL_CHUNK
from tests.cli_session import COMMAND, REPOSITORY, environment

pytestmark = pytest.mark.weights


@pytest.fixture(scope="module")
def model(real_gguf: Path) -> smollm2.SmolLM2:
    return smollm2.load(real_gguf, backend="native")


DAEMON = """
import sys, threading, time
import smollm2
model = smollm2.load(sys.argv[1], threads=int(sys.argv[2]))
def write():
    if sys.argv[3] == "generate":
        model.generate("The sea was calm and", max_tokens=2000, ignore_eos=True)
    for piece in model.stream("The sea was calm and", max_tokens=2000, ignore_eos=True):
        pass
threading.Thread(target=write, daemon=True).start()
time.sleep(0.5)
"""


@pytest.mark.parametrize("way", ["generate", "stream"])
@pytest.mark.parametrize("threads", ["1", "2"])
def test_a_process_ends_quietly_in_the_middle_of_a_forward(
    real_gguf: Path, threads: str, way: str
) -> None:
    """A daemon thread that computes while the interpreter ends stays out of it."""
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", DAEMON, str(real_gguf), threads, way],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            cwd=REPOSITORY,
            env=environment(),
        )
        assert (done.returncode, done.stderr) == (0, "")


@contextmanager
def counted(model: smollm2.SmolLM2, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Tokens of each forward pass that has begun."""
    begun: list[int] = []
    forward = model.lm.forward

    def counting(batch: Any, cache: Any = None) -> Any:
        begun.append(len(batch.ids))
        return forward(batch, cache)

    with monkeypatch.context() as patch:
        patch.setattr(model.lm, "forward", counting)
        yield begun


def interrupt_after(begun: list[int], count: int) -> tuple[threading.Thread, list[int]]:
    """Send SIGINT while pass number ``count`` is being computed; says which one it really was."""
    when: list[int] = []

    def watch() -> None:
        deadline = time.monotonic() + 60
        while len(begun) < count and time.monotonic() < deadline:
            time.sleep(0.0005)
        when.append(len(begun))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread, when


def test_an_answer_ends_with_the_step_that_is_computed(
    model: smollm2.SmolLM2, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cases: V1"""
    stream = model.stream("Once upon a time", max_tokens=2000, ignore_eos=True)
    with counted(model, monkeypatch) as begun, on_interrupt(stream.cancel) as pressed:
        thread, when = interrupt_after(begun, 5)
        result = stream.finish()
        thread.join()
    assert pressed.is_set()
    assert result.finish_reason == "cancelled"
    assert 5 <= len(begun) <= when[0] + 1


def test_a_long_prompt_ends_with_the_chunk_that_is_read(
    model: smollm2.SmolLM2, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cases: V5"""
    stream = model.stream([500, 600] * 3000, max_tokens=100)
    with counted(model, monkeypatch) as begun, on_interrupt(stream.cancel):
        thread, when = interrupt_after(begun, 2)
        result = stream.finish()
        thread.join()
    assert (result.finish_reason, result.token_ids) == ("cancelled", ())
    assert 2 <= len(begun) <= when[0] + 1 < 6000 // PREFILL_CHUNK
    assert set(begun) == {PREFILL_CHUNK}


def test_python_gets_its_keyboard_interrupt_and_can_go_on(
    model: smollm2.SmolLM2, monkeypatch: pytest.MonkeyPatch
) -> None:
    with counted(model, monkeypatch) as begun:
        thread, when = interrupt_after(begun, 3)
        with pytest.raises(KeyboardInterrupt):
            model.generate("Once upon a time", max_tokens=2000, ignore_eos=True)
        thread.join()
    assert len(begun) <= when[0] + 1
    assert model.generate("The capital of France is", max_tokens=1).text == " Paris"


def test_the_command_line_ends_and_keeps_its_text(real_gguf: Path) -> None:
    with subprocess.Popen(
        [*COMMAND, "run", "-m", str(real_gguf), "-p", "The sea was calm and", "-n", "8000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=REPOSITORY,
        env=environment(),
    ) as process:
        assert process.stdout is not None
        first = process.stdout.read(8)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert len(first + out) < 2000
    assert err.endswith("· cancelled\n".encode())
    assert err.count(b"\n") == 1
