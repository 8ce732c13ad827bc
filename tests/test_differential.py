"""Backends × entries × dtypes × shards, each against the NumPy reference."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from smollm2 import entries
from smollm2.backends import get_backend
from smollm2.causal_lm import CausalLM
from smollm2.entries import ENTRIES
from tests.conftest import REPOSITORY
from tests.every_entry import CONFIG, DRAWN, STEPS, WEIGHTS, every_entry, prompts

TOLERANCE = {"float32": 2e-5, "float16": 0.01, "bfloat16": 0.06}
"""Of each number, as a part of the largest in the result; measured: a third of these at most."""

CASES = [
    ("native", "f32", 1),
    *(
        (name, dtype, shards)
        for name in ("torch", "jax")
        for dtype in TOLERANCE
        for shards in (1, 2)
    ),
]

Results = dict[str, NDArray[Any]]


@cache
def reference() -> CausalLM:
    return get_backend("numpy").load(CONFIG, WEIGHTS)


@cache
def expected() -> Results:
    return every_entry(reference())


@cache
def found(name: str, dtype: str, shards: int) -> Results:
    if shards == 2:
        return of_two_shards(name, dtype)
    options: Any = {"quant": dtype} if name == "native" else {"dtype": dtype}
    return every_entry(get_backend(name).load(CONFIG, WEIGHTS, **options))


def of_two_shards(name: str, dtype: str) -> Results:
    """The results of one of the shards, which are equal to the other's."""
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder, ExitStack() as until_ended:
        files = [Path(folder) / f"{rank}.npz" for rank in range(2 if name == "torch" else 1)]
        flags = "--xla_force_host_platform_device_count=2"
        workers = [
            until_ended.enter_context(
                subprocess.Popen(
                    [
                        *(sys.executable, "-m", "tests.every_entry", name, dtype, str(file)),
                        *([str(rank), f"{folder}/meeting"] if name == "torch" else []),
                    ],
                    cwd=REPOSITORY,
                    env={**os.environ, "XLA_FLAGS": flags, "OMP_NUM_THREADS": "1"},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
            for rank, file in enumerate(files)
        ]
        try:
            said = [worker.communicate(timeout=500)[0] for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
        assert not any(worker.returncode for worker in workers), "\n".join(said)
        first, *others = (dict(np.load(file)) for file in files)
        for other in others:
            for entry, result in first.items():
                np.testing.assert_array_equal(other[entry], result, err_msg=entry)
        return first


@pytest.mark.parametrize(("name", "dtype", "shards"), CASES)
@pytest.mark.parametrize("entry", ENTRIES)
def test_every_entry_equals_the_reference(name: str, dtype: str, shards: int, entry: str) -> None:
    """Feature rows 52 to 71, 103 to 107 and 114."""
    if name != "native" and find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    got, wanted = found(name, dtype, shards)[entry], expected()[entry]
    assert got.shape == wanted.shape
    if entry not in DRAWN:
        tolerance = TOLERANCE.get(dtype, TOLERANCE["float32"])
        np.testing.assert_allclose(got, wanted, rtol=0, atol=tolerance * abs(wanted).max())
        assert np.array_equal(got == 0, wanted == 0)  # what is padded or idle
    elif dtype in ("float32", "f32"):
        np.testing.assert_array_equal(got, wanted)
    elif entry == "generate":
        check_greedy(got, TOLERANCE[dtype])


def check_greedy(ids: NDArray[Any], tolerance: float) -> None:
    """That each id is as good as the reference's own choice, but for rounding."""
    sequences = np.hstack([prompts(), ids])
    logits = entries.forward(reference(), sequences)
    for step in range(STEPS):
        after = logits[:, prompts().shape[1] + step - 1]
        chosen = np.take_along_axis(after, ids[:, step, None], axis=1)[:, 0]
        assert (after.max(axis=1) - chosen <= 2 * tolerance * abs(after).max()).all()


def test_every_entry_is_compared() -> None:
    assert set(expected()) == set(ENTRIES)
