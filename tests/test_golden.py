"""The real 135M-Instruct weights against numbers that transformers gave in float32.

``data/model.json``: 12 prompts, their greedy continuations with the margin between first and
second logit at each step, the ten highest logits after the prompt, and its mean log-probability.
``data/perplexity.json``: 32 windows of 1,024 tokens of a text.
"""

from __future__ import annotations

import json
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import smollm2
from smollm2.generate import SmolLM2
from smollm2.lane import Lane
from tests.conftest import DATA

pytestmark = [pytest.mark.weights, pytest.mark.slow]

CASES: list[dict[str, Any]] = json.loads((DATA / "model.json").read_text())["cases"]
TIE = 0.02
"""Under this margin another order of float additions may choose differently."""


@pytest.fixture(scope="module")
def model(real_gguf: Path) -> SmolLM2:
    return smollm2.load(real_gguf, backend="numpy")


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_prompt_logits_and_greedy_ids(model: SmolLM2, case: dict[str, Any]) -> None:
    prompt, greedy, margins = case["prompt_ids"], case["greedy_ids"], case["greedy_margins"]
    assert model.encode(case["prompt"], allow_special=True) == prompt

    lane = Lane(model.lm)
    logits = lane.feed(prompt)
    assert logits is not None
    for token, value in case["last_top10"]:
        assert logits[0, token] == pytest.approx(value, abs=2e-3)
    assert set(np.argsort(-logits[0])[:10]) == {token for token, _ in case["last_top10"]}
    lane.close()

    certain = next((i for i, margin in enumerate(margins) if margin < TIE), len(margins))
    g = model.generate(prompt, max_tokens=len(greedy))
    assert list(g.token_ids[:certain]) == greedy[:certain]


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_mean_logprob_of_the_prompt(model: SmolLM2, case: dict[str, Any]) -> None:
    score = model.score(case["prompt_ids"])
    assert score.mean == pytest.approx(case["mean_logprob"], abs=1e-4)


def test_perplexity_of_a_text(model: SmolLM2, shared: Path) -> None:
    golden = json.loads((DATA / "perplexity.json").read_text())
    text = (shared / "data" / "wikitext2-test.txt").read_text(encoding="utf-8")
    ids = model.tokenizer.encode(text)
    assert len(ids) == golden["tokens_total"]
    size = golden["window"]
    total = scored = 0.0
    for start in range(0, golden["windows"] * size, size):
        score = model.score(ids[start : start + size])
        total += score.total
        scored += size - 1
    assert scored == golden["scored"]
    assert exp(-total / scored) == pytest.approx(golden["perplexity"], rel=1e-4)


def test_it_knows_paris(model: SmolLM2) -> None:
    """Feature row 33."""
    g = model.generate("The capital of France is", max_tokens=4)
    assert g.text.startswith(" Paris")


def test_chat_answers_and_stops(model: SmolLM2) -> None:
    """cases: S1, C5."""
    chat = model.chat()
    g = chat.send("What is the capital of France?", max_tokens=60)
    assert "Paris" in g.text
    assert (g.finish_reason, g.stopped_by) == ("stop", 2)
    assert model.stop_ids == {0, 2}
    ids = model.tokenizer.encode(chat.build_prompt(), allow_special=True)
    assert chat.cached_ids == tuple(ids[: len(chat.cached_ids)])
    again = chat.send("And of Italy?", max_tokens=60)
    assert "Rome" in again.text
    assert again.stats.cached_tokens > g.stats.prompt_tokens
