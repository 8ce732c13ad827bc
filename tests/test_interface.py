"""The Python interface that other work relies on, used as it is promised, on the real weights."""

from __future__ import annotations

from pathlib import Path

import pytest

import smollm2

pytestmark = pytest.mark.weights


@pytest.fixture(scope="module")
def model(real_gguf: Path) -> smollm2.SmolLM2:
    """By name: the file that ``real_gguf`` has pulled."""
    return smollm2.load("smollm2-135m-instruct", backend="numpy")


def test_config_and_tokenizer(model: smollm2.SmolLM2) -> None:
    assert model.config.num_hidden_layers == 30
    assert model.config.parameter_count == 134_515_008
    assert model.tokenizer.encode("2023") == [34, 32, 34, 35]
    assert len(model.tokenizer.encode("<|im_end|>")) > 1
    assert model.tokenizer.encode("<|im_end|>", allow_special=True) == [2]


def test_generate(model: smollm2.SmolLM2) -> None:
    options = {"max_tokens": 80, "temperature": 0.8, "top_p": 0.9, "seed": 42, "stop": ["\n\n"]}
    g = model.generate("The sea was calm and", **options, logprobs=3)
    assert g.text
    assert "\n\n" not in g.text
    assert g.finish_reason in ("stop", "length")
    assert g.logprobs is not None
    assert len(g.logprobs) == len(g.token_ids)
    assert all(len(entry.top) == 3 for entry in g.logprobs)
    assert g.stats.seed == 42
    by_ids = model.generate(model.tokenizer.encode("The sea was calm and"), **options)
    assert (by_ids.text, by_ids.token_ids) == (g.text, g.token_ids)


def test_stream(model: smollm2.SmolLM2) -> None:
    pieces = list(model.stream("The capital of France is", max_tokens=8))
    whole = model.generate("The capital of France is", max_tokens=8)
    assert "".join(piece.text for piece in pieces) == whole.text
    assert whole.text.startswith(" Paris")


def test_chat(model: smollm2.SmolLM2) -> None:
    chat = model.chat(system="You are terse.")
    reply = chat.send("Hello", max_tokens=20)
    assert [m["role"] for m in chat.messages] == ["user", "assistant"]
    assert chat.messages[1]["content"] == reply.text


def test_score(model: smollm2.SmolLM2) -> None:
    right = model.score("The capital of France is Paris")
    wrong = model.score("The capital of France is Berlin")
    assert right.logprobs[0] is None
    assert len(right.logprobs) == len(right.token_ids)
    assert right.total > wrong.total


def test_checkpoint(real_gguf: Path) -> None:
    checkpoint = smollm2.load_checkpoint(real_gguf)
    assert checkpoint.config.vocab_size == 49_152
    assert len(dict(checkpoint.weights.items())) == 272
    assert checkpoint.tokenizer is not None
    assert checkpoint.report.missing == ()


def test_prefill_is_much_faster_than_decode(model: smollm2.SmolLM2) -> None:
    """cases: P6; a ratio within one run."""
    g = model.generate([500 + i for i in range(500)], max_tokens=20, ignore_eos=True)
    assert g.stats.prefill_tokens_per_second > 2 * g.stats.decode_tokens_per_second
