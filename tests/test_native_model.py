"""The native model: what it refuses, and what stays flat."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from smollm2.backends import native
from smollm2.backends.native import NativeModel
from smollm2.batch import Batch, Span
from smollm2.cache import Layout
from smollm2.errors import CacheError, CheckpointError, InputError
from tests.backend_rules import CONFIG, IDS, WEIGHTS, full, spans
from tests.tiny import random_weights, tiny_config


def load(quant: str | None = "f32", threads: int = 1, **options: Any) -> NativeModel:
    return native.backend.load(CONFIG, WEIGHTS, quant=quant, threads=threads, **options)


def test_tokens_of_a_sequence_must_lie_side_by_side() -> None:
    model = load()
    cache = model.new_cache(2, 32)
    batch = spans(cache, Span(0, 0, IDS[:4]), Span(1, 0, IDS[:4]))
    order = np.array([0, 4, 1, 5, 2, 6, 3, 7])
    shuffled = {
        name: getattr(batch, name)[order]
        for name in ("ids", "positions", "rows", "slots", "segments")
    }
    for cached in (cache, None):
        with pytest.raises(InputError, match="side by side"):
            model.forward(replace(batch, **shuffled), cached)
    assert cache.lengths == (0, 0)
    assert model.forward(batch, cache).shape == (2, 96)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quant": "q5"}, "quant='q5' is not known: choose from f32, bf16, q16, q8, q4"),
        ({"kv": "q8"}, "kv='q8' is not known: choose from f32, int16, int8"),
        ({"threads": 0}, "threads=0 is not in 1 … 256"),
        ({"threads": 257}, "threads=257 is not in"),
        ({"threads": 2.0}, "threads=2.0 is not in"),
        (
            {"dtype": "int8"},
            "the native backend has no option dtype, which is of torch and jax: leave it out",
        ),
        ({"tensor_parallel": 2}, "the native backend has no option tensor_parallel"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        native.backend.load(CONFIG, WEIGHTS, **options)


def test_more_threads_than_cpus_are_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight threads asked for on two cores are as fast as two."""
    monkeypatch.setattr(native, "_cpus", lambda: 2)
    assert [load(threads=count).threads for count in (1, 2, 3, 8)] == [1, 2, 2, 2]


def test_weights_that_are_no_numbers_cannot_be_quantized() -> None:
    broken = WEIGHTS.map(lambda _, weight: weight.copy())
    broken.blocks[1].mlp.down[3, 5] = np.nan
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.down_proj\.weight: .*NaN"):
        native.backend.load(CONFIG, broken)
    logits = full(native.backend.load(CONFIG, broken, quant="f32"), IDS[:3])
    assert np.isnan(logits).any()


def test_a_head_too_wide_for_the_kernels_is_refused() -> None:
    config = tiny_config(head_dim=258)
    with pytest.raises(InputError, match="head_dim of 258 is over 256: use backend='numpy'"):
        native.backend.load(config, random_weights(config))


def test_a_cache_beyond_all_memory_is_an_error() -> None:
    config = tiny_config(max_position_embeddings=2**24)
    model = native.backend.load(config, WEIGHTS, threads=1)
    with pytest.raises(CacheError, match="no memory for a KV cache of 16777216000000 tokens"):
        model.make_cache(Layout(1_000_000, 2**24))
    model.new_cache(100)  # reserved, not taken


def test_a_closed_model_says_so() -> None:
    model = load()
    model.close()
    model.close()
    with pytest.raises(InputError, match="closed"):
        full(model, [1])


def test_a_cache_of_another_model_is_refused() -> None:
    model, other = load(), load()
    cache = other.new_cache(1, 32)
    with pytest.raises(CacheError, match="another model"):
        model.forward(spans(cache, Span(0, 0, IDS[:3])), cache)


GOOD: dict[str, Any] = {
    "ids": np.array([1, 2], np.int32),
    "positions": np.array([0, 1], np.int32),
    "cosines": np.ones((8, 8), np.float32),
    "sines": np.zeros((8, 8), np.float32),
    "runs": np.array([[2, 0, 0]], np.int32),
    "pages": np.array([[0, 1]], np.int32),
    "wanted": np.array([1], np.int32),
}

WRONG: list[tuple[str, Any]] = [
    ("ids", np.array([1, 96], np.int32)),
    ("ids", np.array([1, -1], np.int32)),
    ("ids", np.array([1, 2, 3], np.int32)),
    ("ids", np.array([1, 2], np.int64)),
    ("ids", np.array([1, 0, 2, 0], np.int32)[::2]),
    ("ids", None),
    ("positions", np.array([0, 8], np.int32)),
    ("positions", np.array([0, -1], np.int32)),
    ("cosines", np.ones((8, 7), np.float32)),
    ("sines", np.zeros((7, 8), np.float32)),
    ("runs", np.array([[2, 0, 1]], np.int32)),
    ("runs", np.array([[2, 0, -1]], np.int32)),
    ("runs", np.array([[1, 0, 0]], np.int32)),
    ("runs", np.array([[2, 127, 0]], np.int32)),
    ("runs", np.array([[2, -1, 0]], np.int32)),
    ("runs", np.array([[2, 2**31 - 1, 0]], np.int32)),
    ("runs", np.array([[3, 0, 0], [-1, 0, 0]], np.int32)),
    ("runs", np.zeros((0, 3), np.int32)),
    ("runs", np.array([[2, 0]], np.int32)),
    ("pages", np.array([[4, 1]], np.int32)),
    ("pages", np.array([[-1, 1]], np.int32)),
    ("pages", np.zeros((1, 0), np.int32)),
    ("wanted", np.array([2], np.int32)),
    ("wanted", np.array([-1], np.int32)),
]

FORK_BOMB = """
import resource, sys
from smollm2 import _native
with open("/proc/self/statm") as file:
    size = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + 40_000_000,) * 2)
try:
    _native.Threads(64)
except RuntimeError as error:
    sys.exit(str(error))
"""


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_the_engine_checks_whatever_python_hands_it(name: str, value: Any) -> None:
    """No array that is given by hand makes it read or write beside its memory."""
    engine = load(threads=2).engine
    cache = engine.new_cache("f32", 4)
    assert engine.forward(cache, **GOOD).shape == (1, 96)
    with pytest.raises((ValueError, TypeError)):
        engine.forward(cache, **{**GOOD, name: value})


@pytest.mark.parametrize("quant", ["f32", "q8"])
def test_a_token_may_be_wanted_more_often_than_there_are_tokens(quant: str) -> None:
    """The space for wanted rows is no smaller than what is asked for."""
    model = load(quant=quant, threads=2)
    batch = Batch.build([Span(0, 0, IDS[:3])])
    once = full(model, IDS[:3])
    wanted = np.resize([2, 0, 1], 700).astype(np.int32)
    assert np.array_equal(model.forward(replace(batch, wanted=wanted)), once[wanted])


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="limits memory as Linux does")
def test_threads_that_cannot_be_started_are_an_error() -> None:
    """cases: I6: none of those that were started stays behind, and the process lives."""
    done = subprocess.run(
        [sys.executable, "-c", FORK_BOMB], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert re.search(r"cannot start 64 threads \(.+\): take fewer", done.stderr)


def test_first_calls_side_by_side_agree() -> None:
    """The tables of angles grow once for all threads. cases: K11"""
    config = tiny_config(num_hidden_layers=1, max_position_embeddings=8192)
    weights = random_weights(config)
    batch = Batch.build([Span(0, 7000, IDS[:3], "all")])
    expected = native.backend.load(config, weights, quant="f32", threads=1).forward(batch)
    for _ in range(30):
        model = native.backend.load(config, weights, quant="f32", threads=1)
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(model.forward, [batch] * 4))
        for logits in (*results, model.forward(batch)):
            assert np.array_equal(logits, expected)


def test_segments_of_many_lengths_take_their_own_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short text beside a long one does not reserve the long one's pages."""
    asked: list[int] = []
    reserve = native._reserve

    def counted(engine: Any, kind: str, pages: int) -> Any:
        asked.append(pages)
        return reserve(engine, kind, pages)

    monkeypatch.setattr(native, "_reserve", counted)
    model = load(quant="f32")
    alone = [full(model, ids) for ids in (IDS[:130], IDS[:1], IDS[:1])]
    asked.clear()
    parts = [Span(0, 0, IDS[:130], "all"), *[Span(0, 0, IDS[:1], "all")] * 2]
    assert np.array_equal(model.forward(Batch.build(parts)), np.concatenate(alone))
    assert asked == [5]


def test_the_engine_checks_its_cache() -> None:
    config = tiny_config(num_hidden_layers=1)
    other = native.backend.load(config, random_weights(config)).engine
    with pytest.raises(ValueError, match="another model"):
        load().engine.forward(other.new_cache("f32", 4), **GOOD)


def resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="asks Linux for memory")
def test_memory_stays_flat_over_200_loads() -> None:
    """Threads, caches and weights all go when their owner does."""
    started = len(os.listdir("/proc/self/task"))
    sizes = []
    for i in range(200):
        model = load("q8", 2)
        cache = model.new_cache(2, 256)
        model.forward(spans(cache, Span(0, 0, IDS[:100])), cache)
        full(model, IDS[:20])
        sizes.append(resident())
        if i % 2:
            model.close()
    del model, cache
    assert len(os.listdir("/proc/self/task")) == started
    assert sizes[-1] - sizes[20] < 4 << 20


def test_two_engines_in_one_process() -> None:
    """Each on its own threads, at once."""
    models = [load("q8", 2), load("f32", 2)]
    expected = [full(model, IDS) for model in models]
    with ThreadPoolExecutor(4) as pool:
        jobs = [(i, pool.submit(full, models[i % 2], IDS)) for i in range(40)]
        for i, job in jobs:
            np.testing.assert_array_equal(job.result(), expected[i % 2])
