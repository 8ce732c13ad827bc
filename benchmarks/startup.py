"""How long a user waits and how much memory it takes, as seen from outside of the process.

    python benchmarks/startup.py [--model model.smol] [--repeats 9]

Prints the median of each case turn by turn with the others, beside a bare interpreter: the end of
the process, and of ``smollm2 run`` the first byte of the answer, and the peak of its resident
memory (what is mapped of a file included) over 100 tokens. The model is the one that ``smollm2
run`` takes by default unless ``--model`` names another, and has to be here already.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from typing import NamedTuple

CASES = {
    "python": ["-c", "pass"],
    "import smollm2": ["-c", "import smollm2"],
    "import numpy": ["-c", "import numpy"],
    "smollm2 --help": ["-m", "smollm2", "--help"],
}
# Modules are compiled once, as an installation leaves them, and not at each start.
ENVIRONMENT = {key: os.environ[key] for key in os.environ if key != "PYTHONDONTWRITEBYTECODE"}
PROMPT = "The capital of France is"


class Run(NamedTuple):
    """One process: seconds to its first byte on stdout and to its end, and peak memory in MB."""

    first: float
    end: float
    peak: float


def measure(arguments: list[str]) -> Run:
    """Run one process."""
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *arguments],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    process.stdout.read(1)
    first = time.perf_counter() - started
    process.stdout.read()
    process.stdout.close()
    _, status, usage = os.wait4(process.pid, 0)
    end = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(arguments)} ended with {process.returncode}")
    unit = 1 if sys.platform == "darwin" else 1024
    return Run(first, end, usage.ru_maxrss * unit / 1e6)


def main() -> None:
    """Measure all cases turn by turn, so that a busy moment touches each alike."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="name, folder or file; by default that of smollm2 run")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    model = ["-m", options.model] if options.model else []
    run = ["-m", "smollm2", "run", "--offline", "--no-echo", "-p", PROMPT, *model]
    cases = CASES | {"first token": [*run, "-n", "1"], "100 tokens": [*run, "-n", "100"]}
    runs: dict[str, list[Run]] = {name: [] for name in cases}
    for _ in range(options.repeats):
        for name, arguments in cases.items():
            runs[name].append(measure(arguments))
    print(f"{platform.machine()}, Python {platform.python_version()}, median of {options.repeats}")
    for name, found in runs.items():
        end = statistics.median(each.end for each in found)
        print(f"{name:<16} {end:6.3f} s  {max(each.peak for each in found):6.0f} MB")
    first = statistics.median(each.first for each in runs["first token"])
    print(f"process start to first token: {first:.3f} s")


if __name__ == "__main__":
    main()
