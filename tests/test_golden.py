"""The real 135M-Instruct weights against numbers that transformers gave in float32.

``data/model.json``: 12 prompts, their greedy continuations with the margin between first and
second logit at each step, the ten highest logits after the prompt, and its mean log-probability.
``data/perplexity.json``: 32 windows of 1,024 tokens of a text, and the mean of each window.
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
from smollm2.sampling import log_softmax
from tests.conftest import DATA

pytestmark = [pytest.mark.weights, pytest.mark.slow]

CASES: list[dict[str, Any]] = json.loads((DATA / "model.json").read_text())["cases"]
TIE = 0.02
"""Under this margin another order of float additions may choose differently."""


@pytest.fixture(scope="module")
def model(real_gguf: Path) -> SmolLM2:
    return smollm2.load(real_gguf, backend="numpy")


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_prompt_and_greedy_ids(model: SmolLM2, case: dict[str, Any]) -> None:
    """The mean log-probability of the prompt, the logits after it, and each likeliest id then."""
    prompt, greedy, margins = case["prompt_ids"], case["greedy_ids"], case["greedy_margins"]
    assert model.encode(case["prompt"], allow_special=True) == prompt

    lane = Lane(model.lm)
    chosen = list[float]()
    for logits in lane.all_logits(prompt):
        targets = prompt[len(chosen) + 1 : len(chosen) + 1 + len(logits)]
        chosen.extend(log_softmax(logits)[np.arange(len(targets)), targets])
    assert np.mean(chosen) == pytest.approx(case["mean_logprob"], abs=1e-4)

    last = logits[-1]
    for token, value in case["last_top10"]:
        assert last[token] == pytest.approx(value, abs=2e-3)
    assert set(np.argsort(-last)[:10]) == {token for token, _ in case["last_top10"]}
    for expected, margin in zip(greedy, margins, strict=True):
        assert last.argmax() == expected or margin < TIE
        ((last,),) = lane.all_logits([expected])
    lane.close()


@pytest.mark.parametrize("case", CASES[:-2], ids=[case["name"] for case in CASES[:-2]])
def test_greedy_ids_of_generate(model: SmolLM2, case: dict[str, Any]) -> None:
    greedy, margins = case["greedy_ids"], case["greedy_margins"]
    certain = next((i for i, margin in enumerate(margins) if margin < TIE), len(margins))
    g = model.generate(case["prompt_ids"], max_tokens=min(certain, 16))
    assert list(g.token_ids) == greedy[: min(certain, 16)]


def test_perplexity_of_a_text(model: SmolLM2, shared: Path) -> None:
    """Of every sixth window; all of them make the perplexity that the file has."""
    golden = json.loads((DATA / "perplexity.json").read_text())
    windows, size = golden["nll_of_windows"], golden["window"]
    assert exp(np.mean(windows)) == pytest.approx(golden["perplexity"], rel=1e-9)
    text = (shared / "data" / "wikitext2-test.txt").read_text(encoding="utf-8")
    ids = model.tokenizer.encode(text)
    assert len(ids) == golden["tokens_total"]
    for number in range(0, len(windows), 6):
        score = model.score(ids[number * size : (number + 1) * size])
        assert -score.total / (size - 1) == pytest.approx(windows[number], abs=1e-5)


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
