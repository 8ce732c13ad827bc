"""The real 135M-Instruct weights through the PyTorch backend, against transformers in float32.

``data/model.json`` has 12 prompts with greedy continuations and the margin between the first and
the second logit of each step.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import smollm2
from smollm2.batch import Batch, Span
from smollm2.generate import SmolLM2
from tests.conftest import DATA

pytest.importorskip("torch")
pytestmark = [pytest.mark.weights, pytest.mark.slow]

CASES: list[dict[str, Any]] = json.loads((DATA / "model.json").read_text())["cases"]
TIE = 0.02
"""Under this margin another order of float additions may choose differently."""


@pytest.fixture(scope="module")
def model(real_gguf: Path) -> SmolLM2:
    return smollm2.load(real_gguf, backend="torch")


@pytest.mark.parametrize("case", CASES[:-1], ids=[case["name"] for case in CASES[:-1]])
def test_greedy_ids(model: SmolLM2, case: dict[str, Any]) -> None:
    greedy, margins = case["greedy_ids"], case["greedy_margins"]
    certain = next((i for i, margin in enumerate(margins) if margin < TIE), len(margins))
    g = model.generate(case["prompt_ids"], max_tokens=certain, ignore_eos=True)
    assert list(g.token_ids) == greedy[:certain]


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_logits_after_the_prompt_and_each_greedy_token(
    model: SmolLM2, case: dict[str, Any]
) -> None:
    """All in one pass without a cache, so also where a margin is small, and after 4,211 tokens."""
    prompt, greedy = case["prompt_ids"], case["greedy_ids"]
    batch = Batch.build([Span(0, 0, [*prompt, *greedy[:-1]])])
    wanted = np.arange(len(prompt) - 1, len(batch), dtype=np.int32)
    logits = model.lm.forward(replace(batch, wanted=wanted))
    for token, value in case["last_top10"]:
        assert logits[0, token] == pytest.approx(value, abs=2e-3)
    assert set(np.argsort(-logits[0])[:10]) == {token for token, _ in case["last_top10"]}
    two = np.sort(logits, axis=-1)[:, -2:]
    np.testing.assert_allclose(two[:, 1] - two[:, 0], case["greedy_margins"], atol=4e-3)
    sure = np.array(case["greedy_margins"]) >= TIE
    assert (logits.argmax(-1)[sure] == np.array(greedy)[sure]).all()
