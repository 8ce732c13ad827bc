"""Engines: how ours and the peers' are run, each measurement in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from claims import FIRST, OURS, Run

PROMPT = "The capital of France is"
"""What is continued where the first token is waited for; the peers' script has the same."""

LONG_PROMPT = "The sea was calm and"
"""What the real model continues for more than a hundred tokens, in as many tokens itself."""

PACKAGES: Mapping[str, tuple[str, str]] = {
    "llama_cpp": ("llama_cpp", "llama-cpp-python"),
    "llama_cpp_first": ("llama_cpp", "llama-cpp-python"),
    "ik_llama": ("ik_llama_cpp", "ik-llama-cpp-python"),
    "openvino": ("openvino_genai", "openvino-genai"),
}
"""Module and distribution of each peer."""

_VERSION = """
import sys
from importlib import metadata, util
module, package = sys.argv[1:]
print(package, metadata.version(package) if util.find_spec(module) else "")
"""
_ENVIRONMENT = {key: os.environ[key] for key in os.environ if key != "PYTHONDONTWRITEBYTECODE"}
"""Modules are compiled once, as an installation leaves them, and not at each start."""

_MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024


class RunError(Exception):
    """A process has failed; the message has the end of what it said."""


@dataclass(frozen=True, slots=True)
class Engines:
    """The interpreters and scripts that run, and the threads that all get."""

    ours: Path
    peers: Path
    peers_script: Path
    threads: int

    def version(self, engine: str) -> str | None:
        """Name and version of what an engine is part of, None where it is not installed."""
        if engine in (OURS, FIRST):
            said = _said([str(self.ours), "-m", "smollm2", "--version"])
        else:
            try:
                said = _said([str(self.peers), "-c", _VERSION, *PACKAGES[engine]])
            except RunError:
                return None
        name, _, number = said.strip().partition(" ")
        return f"{name} {number}" if number else None

    def measure(self, run: Run, model: Path) -> dict[str, Any]:
        """Run it on a model file: the figures that it found. Raises ``RunError``."""
        command = self.command(run, model)
        with _spinning(run.busy):
            if run.engine in (FIRST, "llama_cpp_first"):
                return _first_byte(command)
            said = _said(command)
        try:
            result: dict[str, Any] = json.loads(said.splitlines()[-1])
        except (IndexError, ValueError):
            raise RunError(f"{run.engine} printed no JSON: {said[-200:]!r}") from None
        return result

    def command(self, run: Run, model: Path) -> list[str]:
        """The command line of a run."""
        threads = ["--threads", str(run.threads or self.threads)]
        names = ("prompt", "decode", "depth", "batch", "repeats")
        counts = [part for name in names for part in (f"--{name}", str(getattr(run, name)))]
        ours = [str(self.ours), "-m", "smollm2"]
        if run.engine == OURS:
            return [*ours, "bench", "-m", str(model), *threads, *counts, "--json"]
        if run.engine == FIRST:
            prompt = PROMPT if run.decode == 1 else LONG_PROMPT
            return [*ours, "run", "-m", str(model), "--offline", "-n", str(run.decode), prompt]
        return [str(self.peers), str(self.peers_script), run.engine, str(model), *threads, *counts]


def _said(command: Sequence[str]) -> str:
    """What a process writes to stdout."""
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
    )
    if done.returncode != 0:
        raise RunError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-500:]}")
    return done.stdout


def _first_byte(command: Sequence[str]) -> dict[str, Any]:
    """Seconds from a process's start to the first byte on its stdout, and its peak memory.

    The peak on Linux is at least what this process has itself, which is little.
    """
    started = time.perf_counter()
    process = subprocess.Popen(
        command,
        env=_ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    with process.stdout:
        first = process.stdout.read(1)
        seconds = time.perf_counter() - started
        process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0 or not first:
        raise RunError(f"{' '.join(command)} ended with {process.returncode}, first {first!r}")
    return {"first_token_s": seconds, "peak_mb": usage.ru_maxrss * _MAXRSS_BYTES / 1e6}


@contextmanager
def _spinning(count: int) -> Iterator[None]:
    """Processes that do nothing as fast as they can."""
    spinners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    if count:
        time.sleep(0.3)  # until they have begun
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()
