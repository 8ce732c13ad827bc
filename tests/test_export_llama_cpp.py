"""llama.cpp opens the GGUF files that we write: the golden ids, and the golden tokens.

For machines that have llama-cpp-python; without it, ``test_export_gguf`` compares with the gguf
package and with our own reader.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smollm2.checkpoint import load_checkpoint
from smollm2.export import export_gguf
from smollm2.template import SMOLLM2_TEMPLATE
from tests.conftest import DATA

llama_cpp = pytest.importorskip("llama_cpp", exc_type=ImportError)
pytestmark = [pytest.mark.weights, pytest.mark.slow]

CASES: list[dict[str, Any]] = json.loads((DATA / "model.json").read_text("utf-8"))["cases"][:6]
TOKENS: list[dict[str, Any]] = json.loads((DATA / "tokens.json").read_text("utf-8"))
NEAR_TIE = 0.02
"""A margin of logits that another order of sums may turn around."""


@pytest.fixture(scope="module")
def model(real_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path = tmp_path_factory.mktemp("llama") / "f32.gguf"
    export_gguf(load_checkpoint(real_gguf), path, quant="f32")
    # One thread: its threads wait for each other by spinning, which never ends on a busy machine.
    llama = llama_cpp.Llama(str(path), n_ctx=512, n_threads=1, n_threads_batch=1, verbose=False)
    yield llama
    llama.close()


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    model.reset()
    ids: list[int] = []
    model.eval(prompt)
    for _ in range(count):
        logits = llama_cpp.llama_get_logits(model.ctx)
        ids.append(int(np.argmax(np.ctypeslib.as_array(logits, (model.n_vocab(),)))))
        model.eval(ids[-1:])
    return ids


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_the_golden_ids(model: Any, case: dict[str, Any]) -> None:
    expected = case["greedy_ids"]
    ids = greedy(model, case["prompt_ids"], len(expected))
    margins = case["greedy_margins"]
    wrong = [place for place, token in enumerate(ids) if token != expected[place]]
    assert not wrong or margins[wrong[0]] < NEAR_TIE


def test_the_golden_tokens(model: Any) -> None:
    """The vocabulary, the merges and the split: nothing in front, nothing read as control."""
    for case in TOKENS:
        ids = model.tokenize(case["text"].encode(), add_bos=False, special=False)
        assert ids == case["ids"], case["text"]
    assert model.tokenize(b"<|im_end|>", add_bos=False, special=True) == [2]


def test_what_llama_cpp_reads_of_the_model(model: Any) -> None:
    assert (model.token_bos(), model.token_eos()) == (1, 2)
    assert model.metadata["tokenizer.chat_template"] == SMOLLM2_TEMPLATE
    assert model.metadata["general.architecture"] == "llama"
