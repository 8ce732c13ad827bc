"""Bench: what is fed is what is said, what is counted is what is used; not how long it takes."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from smollm2 import bench
from smollm2.backends import get_backend
from smollm2.bench import FIRST_PROMPT, WARM_DEPTH, Workload, measure, read_first_prompt
from smollm2.errors import InputError
from tests.fakes import ScriptedModel
from tests.tiny import random_weights, tiny_config


def test_what_is_fed() -> None:
    lm = ScriptedModel({}, config=tiny_config(vocab_size=260, max_position_embeddings=4096))
    (case,) = measure(lm, [Workload(prompt=1100, decode=4, depth=600, batch=3, repeats=1)])
    prompt = [512, 512, 76]
    depth = [512, 88] * 3
    assert lm.fed == [*prompt, *depth, *[3] * 4]
    assert case.prefill.rate > 0
    assert case.decode.rate > 0


def test_rows_are_filled_once_for_all_repeats() -> None:
    lm = ScriptedModel({})
    measure(lm, [Workload(prompt=5, decode=2, repeats=2)])
    assert lm.fed == [5, 5, WARM_DEPTH, *[1, 1] * 2]


def test_a_prompt_is_read_once_for_several_workloads() -> None:
    lm = ScriptedModel({})
    told: list[str] = []
    works = [Workload(prompt=6, decode=1, depth=3, batch=rows, repeats=1) for rows in (1, 2)]
    first, second = measure(lm, works, told.append)
    assert lm.fed == [6, 3, 1, 3, 3, 2]
    assert first.prefill is second.prefill
    assert told == [
        "prefill of 6 tokens",
        "decode at depth 3, batch 1",
        "decode at depth 3, batch 2",
    ]


def test_the_prompt_of_the_first_token() -> None:
    lm = ScriptedModel({})
    read_first_prompt(lm)
    assert lm.fed == [FIRST_PROMPT]


def test_the_best_repeat_counts_and_what_it_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that says 4, 2 and 3 seconds: the model moves 1,000 bytes and 10 a stored token."""
    ticks = itertools.chain.from_iterable((0.0, seconds) for seconds in (4.0, 2.0, 3.0) * 2)
    monkeypatch.setattr(bench, "perf_counter", lambda: next(ticks))
    lm = ScriptedModel({}, config=tiny_config(vocab_size=260, max_position_embeddings=4096))
    (case,) = measure(lm, [Workload(prompt=600, decode=3, depth=20, batch=2, repeats=3)])
    attention, mlp, head = 64 * 64 * 2 + 64 * 32 * 2, 3 * 64 * 128, 260 * 64
    products = 2 * (attention + mlp)
    assert case.prefill.rate == 600 / 2
    assert case.prefill.read_gb_s == pytest.approx(2 * 1000 / 2 / 1e9)
    assert case.prefill.dot_gmac_s == pytest.approx(600 * products / 2 / 1e9)
    assert case.decode.rate == 2 * 3 / 2
    stored = [21, 22, 23]
    read = sum(1000 + 2 * 10 * length for length in stored)
    assert case.decode.read_gb_s == pytest.approx(read / 2 / 1e9)
    assert case.decode.dot_gmac_s == pytest.approx(6 * (products + head) / 2 / 1e9)


@pytest.mark.parametrize("tied", [True, False])
def test_traffic_of_the_backends(tied: bool) -> None:
    """All values but those of an embedding that is no head; keys and values of a token."""
    config = tiny_config(tie_word_embeddings=tied)
    weights = random_weights(config)
    values = sum(array.size for name, array in weights.items() if tied or "embed" not in name)
    stored = 2 * 2 * 2 * 16
    numpy = get_backend("numpy").load(config, weights)
    assert (numpy.traffic.weights, numpy.traffic.token) == (4 * values, 4 * stored)
    assert numpy.threads is None
    exact = get_backend("native").load(config, weights, quant="f32", threads=1)
    assert (exact.traffic.weights, exact.traffic.token) == (4 * values, 4 * stored)
    assert exact.threads == 1
    norms = sum(array.size for _, array in weights.items() if array.ndim == 1)
    packed = get_backend("native").load(config, weights, quant="q8", kv="f32")
    assert packed.traffic.weights == (values - norms) * 34 // 32 + 4 * norms


@pytest.mark.parametrize("name", ["prompt", "decode", "batch", "repeats"])
def test_counts_are_positive(name: str) -> None:
    with pytest.raises(InputError, match=f"{name} is 0: it must be at least 1"):
        Workload(**{name: 0})
    with pytest.raises(InputError, match="depth is -1"):
        Workload(depth=-1)


def test_a_workload_must_fit_the_context() -> None:
    lm = ScriptedModel({})
    with pytest.raises(
        InputError, match="300 tokens a row are more than the context length of 256"
    ):
        measure(lm, [Workload(prompt=8), Workload(prompt=300)])
    assert lm.fed == []


def test_the_probe_finds_limits() -> None:
    limits = bench.probe(1)
    assert limits is not None
    assert limits.read_gb_s > 0
    assert limits.dot_gmac_s >= 0


def test_without_the_extension_there_are_no_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "smollm2._native", None)
    assert bench.probe() is None


def test_peak_memory_is_of_this_process_and_stays() -> None:
    """A child of a large parent begins anew, and what was given back still counts."""
    code = (
        "import json\n"
        "from smollm2.bench import peak_memory\n"
        "before = peak_memory()\n"
        "block = b'x' * 100_000_000\n"
        "del block\n"
        "print(json.dumps([before, peak_memory()]))"
    )
    weight = b"x" * 400_000_000
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, env=os.environ
    )
    del weight
    before, after = json.loads(run.stdout)
    assert before is not None
    assert 95_000_000 <= after - before < 130_000_000
    if Path("/proc/self/status").exists():
        assert after < 400_000_000
