"""Memory of a process: what is mapped is shared, and nothing grows."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
from pathlib import Path

import pytest

import smollm2
from smollm2.checkpoint import load_checkpoint
from smollm2.export import export_smol

SMAPS = Path("/proc/self/smaps_rollup")
pytestmark = pytest.mark.skipif(not SMAPS.exists(), reason="asks Linux for memory")

PROGRAM = """
import re, sys, smollm2
model = smollm2.load(sys.argv[1])
model.generate([1, 5, 7], max_tokens=4)
print("ready", flush=True)
sys.stdin.readline()
for line in open("/proc/self/smaps_rollup"):
    if match := re.match(r"(Rss|Pss|Pss_File|Anonymous): +([0-9]+) kB", line):
        print(match[1], match[2])
"""


def rollup() -> dict[str, int]:
    """Sums over all mappings of this process, in bytes."""
    found = re.findall(r"^(\w+): +(\d+) kB$", SMAPS.read_text(encoding="ascii"), re.MULTILINE)
    return {name: int(size) * 1024 for name, size in found}


@pytest.fixture(scope="module")
def real_smol(real_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real weights in 8 bit: 144.6 MB."""
    path = tmp_path_factory.mktemp("smol") / "q8.smol"
    export_smol(load_checkpoint(real_gguf), path, quant="q8")
    return path


def sums_of(path: Path, count: int) -> list[dict[str, int]]:
    """What smaps_rollup of each of ``count`` processes says while all of them have the model."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(count)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    sums = []
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout is not None
        lines = [process.stdout.readline().split() for _ in range(4)]
        sums.append({name: int(size) * 1024 for name, size in lines})
    for process in processes:
        process.communicate(timeout=30)
    return sums


@pytest.mark.weights
def test_two_processes_share_the_pages_of_one_file(real_smol: Path) -> None:
    """Each counts half of the file: PSS is a process's part of what it shares."""
    size = real_smol.stat().st_size
    (alone,) = sums_of(real_smol, 1)
    both = sums_of(real_smol, 2)
    assert alone["Pss_File"] > 0.9 * size
    for each in both:
        assert each["Rss"] > 0.9 * size
        assert alone["Pss"] - each["Pss"] > 0.4 * size
        assert each["Anonymous"] < 0.5 * size


@pytest.mark.weights
@pytest.mark.slow
def test_200_loads_and_generations_of_the_real_model_stay_flat(real_smol: Path) -> None:
    """cases: P9"""
    sizes = []
    for _ in range(200):
        with smollm2.load(real_smol, threads=2) as model:
            assert model.generate("The capital of France is", max_tokens=4).text
        sizes.append(rollup()["Anonymous"])
    del model
    gc.collect()
    assert max(sizes[100:]) - max(sizes[20:100]) < 4_000_000
    assert str(real_smol) not in Path("/proc/self/maps").read_text(encoding="utf-8")
