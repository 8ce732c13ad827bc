"""How long a user waits: import, --help, and the first token, as wall time of whole processes.

    python benchmarks/startup.py [--repeats 5]

Prints the median of each beside that of a bare interpreter, with the machine. The model is the
one that ``smollm2 run`` takes by default and has to be here already.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import sys
import time

CASES = {
    "python": ["-c", "pass"],
    "import smollm2": ["-c", "import smollm2"],
    "import numpy": ["-c", "import numpy"],
    "smollm2 --help": ["-m", "smollm2", "--help"],
    "first token": [
        "-m",
        "smollm2",
        "run",
        "--offline",
        "-p",
        "The capital of France is",
        "-n",
        "1",
    ],
}


def seconds(arguments: list[str]) -> float:
    """Wall time of one process."""
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    return time.perf_counter() - started


def main() -> None:
    """Measure all cases turn by turn, so that a busy moment touches each alike."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    times: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(repeats):
        for name, arguments in CASES.items():
            times[name].append(seconds(arguments))
    print(f"{platform.machine()}, Python {platform.python_version()}, median of {repeats}")
    bare = statistics.median(times["python"])
    for name, values in times.items():
        median = statistics.median(values)
        print(f"{name:<16} {median:6.3f} s  {median - bare:+6.3f} s over the interpreter")


if __name__ == "__main__":
    main()
