"""The real 135M-Instruct weights through the native engine, in every kind.

``data/model.json`` has 12 prompts with greedy continuations in float32 and the margin between
the first and the second logit of each step.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smollm2.backends import native
from smollm2.backends.native import NativeModel
from smollm2.batch import Span
from smollm2.checkpoint import Checkpoint, load_checkpoint
from smollm2.sampling import log_softmax
from smollm2.smoothing import easier_to_round
from tests.backend_rules import in_parts, spans
from tests.conftest import DATA

pytestmark = [pytest.mark.weights, pytest.mark.slow]

CASES: list[dict[str, Any]] = json.loads((DATA / "model.json").read_text())["cases"]


@pytest.fixture(autouse=True)
def many_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many threads as are asked for, also where there are fewer CPUs."""
    monkeypatch.setattr(native, "_cpus", lambda: 256)


@pytest.fixture(scope="module")
def checkpoint(real_gguf: Path) -> Checkpoint:
    return load_checkpoint(real_gguf)


def load(checkpoint: Checkpoint, **options: Any) -> NativeModel:
    return native.backend.load(checkpoint.config, checkpoint.weights, **options)


def feed(model: NativeModel, cache: Any, ids: list[int], wanted: Any = "last") -> Any:
    return model.forward(spans(cache, Span(0, cache.lengths[0], ids, wanted)), cache)


def test_f32_is_as_strict_as_the_numpy_backend(checkpoint: Checkpoint) -> None:
    """Ten highest logits, greedy ids and mean log-probability of each prompt."""
    model = load(checkpoint, quant="f32")
    for case in CASES:
        prompt, greedy, margins = case["prompt_ids"], case["greedy_ids"], case["greedy_margins"]
        cache = model.new_cache()
        rows = feed(model, cache, prompt, "all")
        logprobs = log_softmax(rows[:-1])[np.arange(len(prompt) - 1), prompt[1:]]
        assert logprobs.mean() == pytest.approx(case["mean_logprob"], abs=1e-4), case["name"]
        logits = rows[-1]
        for token, value in case["last_top10"]:
            assert logits[token] == pytest.approx(value, abs=2e-3), case["name"]
        assert set(np.argsort(-logits)[:10]) == {token for token, _ in case["last_top10"]}
        for expected, margin in zip(greedy, margins, strict=True):
            assert logits.argmax() == expected or margin < 0.02, case["name"]
            logits = feed(model, cache, [expected])[0]


@pytest.mark.parametrize(
    ("quant", "share", "margin"),
    [("bf16", 0.993, 0.1), ("q16", 0.993, 0.02), ("q8", 0.98, 0.3), (None, 0.965, 0.45)],
    ids=["bf16", "q16", "q8", "Q4_1 without loss"],
)
def test_greedy_ids_along_the_golden_ones(
    checkpoint: Checkpoint, quant: str | None, share: float, margin: float
) -> None:
    """Fed along the golden ids, the same one is chosen wherever the margin is clear."""
    weights = easier_to_round(checkpoint, quant)
    model = native.backend.load(checkpoint.config, weights, quant=quant)
    steps, differing = 0, []
    for case in CASES:
        greedy, margins = case["greedy_ids"], case["greedy_margins"]
        cache = model.new_cache()
        feed(model, cache, case["prompt_ids"][:-1], "none")
        logits = feed(model, cache, [case["prompt_ids"][-1], *greedy[:-1]], "all")
        steps += len(greedy)
        differing += [
            clear
            for row, expected, clear in zip(logits, greedy, margins, strict=True)
            if row.argmax() != expected
        ]
    assert len(differing) <= (1 - share) * steps
    assert max(differing, default=0) <= margin


@pytest.mark.parametrize("quant", ["f32", "q8", None], ids=["f32", "q8", "Q4_1 without loss"])
def test_bits_do_not_depend_on_threads_chunks_rows_or_the_cache(
    checkpoint: Checkpoint, quant: str | None
) -> None:
    """512 tokens and 64 more; cases: determinism rows."""
    ids = CASES[-1]["prompt_ids"][:576]
    rng = np.random.default_rng(0)
    ids += [int(i) for i in rng.integers(3, 49152, 576 - len(ids))]
    expected = None
    for threads, parts in [
        (1, [512, *[1] * 64]),
        (2, [128] * 4 + [1] * 64),
        (3, [500, 12, 63, 1]),
        (4, [1, 511, 64]),
    ]:
        model = load(checkpoint, quant=quant, threads=threads)
        cache = model.new_cache(2, 1024)
        feed(model, cache, ids[100:160], "none")
        cache.truncate(0, 0)
        got = in_parts(model, cache, ids, parts)[-65:]
        beside = [Span(1, 0, ids[:300], "none"), Span(0, 576, [7])]
        got = np.concatenate([got, model.forward(spans(cache, *beside), cache)])
        expected = got if expected is None else expected
        np.testing.assert_array_equal(got, expected)
