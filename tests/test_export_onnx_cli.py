"""`smollm2 export --to onnx`: entries, their sizes, and what is said of wrong ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from smollm2 import entries
from smollm2.backends import get_backend
from smollm2.checkpoint import load_checkpoint
from smollm2.cli import main
from smollm2.entries import ENTRIES
from tests.cli_session import write_model

Capture = pytest.CaptureFixture[str]
pytestmark = pytest.mark.usefixtures("place")
PREFILL = ["--to", "onnx", "--entry", "prefill", "--bind", "B=1", "--bind", "S=8"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("export") / "tiny")


def test_prefill_of_one_row(model: Path, place: Path, capsys: Capture) -> None:
    """The path goes to stdout, stages and sizes to stderr; a row holds the context length."""
    ort = pytest.importorskip("onnxruntime")
    assert main(["export", str(model), *PREFILL]) == 0
    out, err = capsys.readouterr()
    assert out == "tiny-prefill.onnx\n"
    sizes = "Batch=1, S=8, MaxSeq=256"  # the last one is nobody's choice: so it is said
    stages = (
        f"tracing prefill with {sizes}",
        "writing tiny-prefill.onnx",
        "checking tiny-prefill.onnx",
    )
    *lines, kinds, total = err.splitlines()
    assert tuple(lines) == stages
    assert kinds.startswith(" f32: 20 tensors, 32.00 bits per weight, ")
    assert total.startswith("tiny-prefill.onnx: ")
    session = ort.InferenceSession("tiny-prefill.onnx", providers=["CPUExecutionProvider"])
    tokens = np.arange(8, dtype=np.int32)[None] + 60
    inputs = {"tokens": tokens, "pos": np.array(0, np.int32)}
    for item in session.get_inputs()[2:]:
        assert item.shape == [257, 2, 16]
        inputs[item.name] = np.zeros(item.shape, np.float32)
    checkpoint = load_checkpoint(model)
    lm = get_backend("numpy").load(checkpoint.config, checkpoint.weights)
    expected = entries.prefill(lm, lm.new_cache(), tokens)
    np.testing.assert_allclose(session.run(["logits"], inputs)[0], expected, atol=2e-5)
    assert main(["export", str(model), *PREFILL]) == 1
    message = "error: tiny-prefill.onnx: exists: give another name, or --force to replace it\n"
    assert capsys.readouterr().err == message
    assert [path.name for path in place.iterdir()] == ["tiny-prefill.onnx"]


def test_entries_without_a_model(capsys: Capture) -> None:
    assert main(["export", "--entries"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("(")[0] for line in lines] == [*ENTRIES]
    assert lines[0] == "forward(tokens [B, S]) → logits [B, S, Vocab]"
    assert lines[3].endswith("→ logits [Batch, Vocab], fixed cache [Batch, MaxSeq]")
    assert lines[9].endswith("→ logits [Rows, Vocab], paged cache [Pool]")


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--to", "onnx"], 2, "--to onnx needs --entry: smollm2 export --entries lists them"),
        (["--entry", "prefill"], 2, "--entry is for --to onnx, stablehlo, not for smol"),
        (["--to", "gguf", "--bind", "S=8"], 2, "--bind is for --to onnx, stablehlo, not for gguf"),
        ([*PREFILL, "--bind", "S"], 2, "bind is 'S': give a symbol and its size, such as S=8"),
        ([*PREFILL, "--bind", "S=9"], 2, "S is bound twice: to 8 and 9"),
        ([*PREFILL, "--bind", "X=9"], 1, "entry prefill has no symbol 'X': it has Batch, S, MaxS"),
        ([*PREFILL, "--bind", "MaxSeq=300"], 1, "MaxSeq of entry prefill is 300, but may be 256 "),
        ([*PREFILL, "--quant", "bf16"], 2, "--quant is 'bf16': --to onnx takes f16, f32"),
        ([*PREFILL, "-o", "x.gguf"], 1, "x.gguf: is the name of another format: give one that e"),
        (["--to", "onnx", "--entry", "decod"], 1, "no entry named 'decod': did you mean decode? T"),
        (["--to", "onnx", "--entry", "decode"], 1, "Batch of entry decode is not bound: give a n"),
    ],
)
def test_what_is_wrong_in_one_line(
    options: list[str], code: int, message: str, model: Path, place: Path, capsys: Capture
) -> None:
    assert main(["export", str(model), *options]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1
    assert [*place.iterdir()] == []


def test_without_torch(model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr("smollm2.backends.find_spec", lambda name: None)
    assert main(["export", str(model), *PREFILL]) == 1
    message = "this export needs PyTorch, which is not installed: pip install 'smollm2[export]'"
    assert capsys.readouterr().err == f"error: {message}\n"


def test_nothing_to_export(capsys: Capture) -> None:
    assert main(["export"]) == 2
    assert capsys.readouterr().err.startswith("error: give MODEL, MODEL OUT, or CONFIG TOKENIZER")
