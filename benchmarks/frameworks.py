"""Frameworks: the model in PyTorch and JAX beside transformers, one workload, turn by turn.

    python benchmarks/frameworks.py [--size 135M] [--rounds 5] [--only transformers torch jax]

Each turn is a process of its own: it opens a checkpoint of random weights, reads a prompt of 512
ids (100 … 20,000, seed 0) and writes 128 tokens, greedily, 3 times to warm up and then as often as
--iterations says. The medians of all turns are printed, with the ratios to transformers of the
same run. On a CPU all compute in float32; where there is a GPU, in bfloat16, and the compiled
modes take part. A framework that is not installed is left out, and that is said.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from contenders import CONTENDERS, Setting, run
from random_model import SIZES

from smollm2.config import Config
from smollm2.files import atomic_write, json_bytes
from smollm2.formats.safetensors import write_safetensors

COLUMNS = ("prefill tok/s", "TTFT ms", "decode tok/s", "load s", "peak MiB", "max |Δlogit|")


def main() -> int:
    """Measure what the command line asks for, and print the table."""
    arguments = _arguments()
    if arguments.worker is not None:
        print(json.dumps(run(arguments.worker, Setting(**json.loads(arguments.setting)))))
        return 0
    gpu = _has_gpu()
    names = [
        name
        for name, contender in CONTENDERS.items()
        if (gpu or not contender.gpu_only) and (not arguments.only or name in arguments.only)
    ]
    for name in [name for name in names if find_spec(CONTENDERS[name].package) is None]:
        _say(f"LEFT OUT: {name}: {CONTENDERS[name].package} is not installed")
        names.remove(name)
    results: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        config = SIZES[arguments.size]
        _say(f"writing a checkpoint of {config.parameter_count:,} random weights")
        write_checkpoint(Path(folder), config)
        for number in range(arguments.rounds):
            for name in names:
                setting = Setting(
                    folder=folder,
                    device="cuda" if gpu else "cpu",
                    dtype="bfloat16" if gpu else "float32",
                    threads=arguments.threads,
                    iterations=arguments.iterations,
                    prompt=arguments.prompt,
                    decode=arguments.decode,
                )
                found = _turn(name, setting)
                if found is not None:
                    results[name].append(found)
                    _say(f"round {number + 1}, {name}: {json.dumps(found)}")
        differences = _differences(Path(folder), names)
    print(_heading(arguments, gpu))
    print(table(results, differences))
    return 0


def write_checkpoint(folder: Path, config: Config) -> None:
    """Write a Hugging Face folder of random bfloat16 weights that keep the scale of what passes."""
    import ml_dtypes

    rng = np.random.default_rng(0)
    tensors = {
        name: (
            rng.standard_normal(shape, dtype=np.float32) / np.float32(shape[1] ** 0.5)
            if len(shape) == 2
            else np.ones(shape, np.float32)
        ).astype(ml_dtypes.bfloat16)
        for name, shape in config.shapes.items()
    }
    write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})
    with atomic_write(folder / "config.json") as file:
        file.write(json_bytes(config.to_dict()))


def table(results: dict[str, list[dict[str, float]]], differences: dict[str, float | None]) -> str:
    """Medians of each contender in Markdown, and the ratios to the first one."""
    medians = {
        name: {key: median(turn[key] for turn in turns) for key in turns[0]}
        for name, turns in results.items()
        if turns
    }
    base = next(iter(medians.values()), None)
    lines = [
        f"| method | {' | '.join(COLUMNS)} | prefill × | decode × |",
        "|---|" + "---|" * (len(COLUMNS) + 2),
    ]
    for name, found in medians.items():
        assert base is not None
        difference = differences.get(name)
        lines.append(
            f"| {name} | {found['prefill']:.0f} | {found['ttft_ms']:.1f} | {found['decode']:.1f} "
            f"| {found['load_s']:.2f} | {found['peak_mib']:.0f} "
            f"| {'–' if difference is None else f'{difference:.2g}'} "
            f"| {found['prefill'] / base['prefill']:.2f} | {found['decode'] / base['decode']:.2f} |"
        )
    return "\n".join(lines)


def _turn(name: str, setting: Setting) -> dict[str, float] | None:
    """Run a contender in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(setting.threads)}
    command = [sys.executable, __file__, "--worker", name, "--setting", json.dumps(vars(setting))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        _say(f"FAILED: {name}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
        return None
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _differences(folder: Path, names: Sequence[str]) -> dict[str, float | None]:
    """The largest difference of the prompt's last logits to those of the first contender."""
    stored = {
        name: np.load(path)
        for name in names
        if (path := folder / f"{CONTENDERS[name].file_name}.npy").is_file()
    }
    first: Any = next(iter(stored.values()), None)
    return {name: float(np.abs(logits - first).max()) for name, logits in stored.items()}


def _has_gpu() -> bool:
    if find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def _heading(arguments: argparse.Namespace, gpu: bool) -> str:
    if gpu:
        import torch

        machine = f"{torch.cuda.get_device_name()}, bfloat16"
    else:
        machine = (
            f"{platform.processor() or platform.machine()}, {arguments.threads} threads, float32"
        )
    versions = []
    for package in ("torch", "jax", "transformers"):
        if find_spec(package) is not None:
            from importlib.metadata import version

            versions.append(f"{package} {version(package)}")
    return (
        f"{arguments.size}, {arguments.prompt} ids read, {arguments.decode} written, batch 1; "
        f"{machine}; {', '.join(versions)}; medians of {arguments.rounds} turns\n"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="135M")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=None)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--decode", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=CONTENDERS)
    parser.add_argument("--worker", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--setting", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.iterations is None:
        arguments.iterations = 10 if _has_gpu() else 3
    return arguments


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
