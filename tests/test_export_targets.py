"""`smollm2 export --to`: the formats, what each takes, and what is said of the rest."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from transformers import LlamaForCausalLM

from smollm2.checkpoint import Checkpoint, load_checkpoint
from smollm2.cli import main, targets
from smollm2.cli.targets import TARGETS, Asked, Target
from smollm2.export import DTYPES, GGUF_QUANTS, Exported, KindSize
from smollm2.export.onnx import ONNX_DTYPES
from smollm2.export.stablehlo import STABLEHLO_DTYPES
from smollm2.kinds import QUANTS
from tests.cli_session import write_model
from tests.tiny import random_weights, tiny_config, write_gguf, write_hf

Capture = pytest.CaptureFixture[str]
pytestmark = pytest.mark.usefixtures("place")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("export") / "tiny-1.7B")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_quants_are_those_of_the_formats() -> None:
    """The table says them again, since the help must not import what computes."""
    assert sorted(TARGETS["smol"].quants) == sorted(QUANTS)
    assert sorted(TARGETS["gguf"].quants) == sorted(GGUF_QUANTS)
    assert sorted(TARGETS["huggingface"].quants) == sorted(kind.lower() for kind in DTYPES.values())
    for name, dtypes in (("onnx", ONNX_DTYPES), ("stablehlo", STABLEHLO_DTYPES)):
        assert sorted(TARGETS[name].quants) == sorted(kind.lower() for kind in dtypes.values())


def test_the_help_names_every_format_and_kind(capsys: Capture) -> None:
    assert main(["export", "--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for name, target in TARGETS.items():
        assert f"{name}" in out
        assert f"{', '.join(target.quants[:-1])} or {target.quants[-1]}" in out


def test_another_format_is_another_row(
    model: Path, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """It is asked for the path before anything is loaded, and gets what was asked for."""
    told: list[object] = []

    def write(checkpoint: Checkpoint, path: Path, asked: Asked) -> Exported:
        told.append((checkpoint.path, path, asked.name, asked.force))
        return Exported(path, 12, 0.5, (KindSize("f32", 1, 3, 12),), ("a remark",))

    row = Target(
        ending=".mine",
        quants=(),
        options=(),
        check=lambda path, force: told.append((path, force)),
        write=write,
    )
    monkeypatch.setattr(targets, "TARGETS", {**TARGETS, "mine": row})
    assert main(["export", str(model), "--to", "mine", "--force"]) == 0
    out, err = capsys.readouterr()
    assert out == "tiny-1.7B.mine\n"
    assert "a remark\n" in err
    path = Path("tiny-1.7B.mine")
    assert told == [(path, True), (model, path, "tiny-1.7B", True)]
    assert main(["export", str(model), "--to", "mine", "--quant", "f32"]) == 2
    message = "error: --quant is for --to smol, gguf, huggingface, onnx, stablehlo, not for mine\n"
    assert capsys.readouterr().err == message


def test_gguf(model: Path, place: Path, capsys: Capture) -> None:
    """Progress and sizes on stderr, the path on stdout. Cases: features 15, 16."""
    assert main(["export", str(model), "--to", "gguf", "--quant", "q4_0"]) == 0
    out, err = capsys.readouterr()
    assert out == "tiny-1.7B-q4_0.gguf\n"
    lines = err.splitlines()
    assert lines[0] == "1/20 token_embd.weight q8_0"
    assert lines[2] == "3/20 blk.0.attn_q.weight q4_0"
    assert lines[20] == "q8_0: 1 tensors, 8.50 bits per weight, 17.7 kB"
    assert lines[21].strip() == "f32: 5 tensors, 32.00 bits per weight, 1.3 kB"
    assert lines[22].startswith("q4_0: 14 tensors, 4.50 bits per weight, ")
    assert lines[23].startswith("tiny-1.7B-q4_0.gguf: ")
    assert lines[23].split(", ")[2] == "checked"
    assert len(lines) == 24
    reader = gguf.GGUFReader(place / "tiny-1.7B-q4_0.gguf")
    assert reader.fields["general.name"].contents() == "tiny-1.7B"
    assert len(reader.tensors) == 20


def test_gguf_is_a_model(model: Path, capsys: Capture) -> None:
    assert main(["export", str(model), "x.gguf", "--to", "gguf"]) == 0
    capsys.readouterr()
    texts = []
    for path in (str(model), "x.gguf"):
        assert main(["run", "-m", path, "HELLO", "-n", "8", "--backend", "numpy"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def test_huggingface(model: Path, place: Path, capsys: Capture) -> None:
    assert main(["export", str(model), "--to", "huggingface"]) == 0
    out, err = capsys.readouterr()
    assert out == "tiny-1.7B-hf\n"
    lines = err.splitlines()
    assert lines[0].startswith("1/20 ")
    assert lines[0].endswith(" f32")
    assert lines[20].strip().startswith("f32: 20 tensors, 32.00 bits per weight, ")
    assert lines[21].startswith("tiny-1.7B-hf: ")
    assert len(lines) == 22
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        one, other = (
            LlamaForCausalLM.from_pretrained(path)(ids).logits
            for path in (model, place / "tiny-1.7B-hf")
        )
    assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("size", "files"), [("50kB", 4), ("50000", 0), ("500 MB", 1), ("1gb", 1), ("20000B", 11)]
)
def test_shard_size(model: Path, place: Path, size: str, files: int, capsys: Capture) -> None:
    arguments = ["export", str(model), "x", "--to", "huggingface", "--quant", "bf16"]
    code = main([*arguments, "--shard-size", size])
    if not files:
        assert code == 2
        error = capsys.readouterr().err
        assert error == "error: --shard-size is '50000': give a size such as 500MB or 5GB\n"
        return
    assert code == 0
    weights = [path for path in (place / "x").iterdir() if path.suffix == ".safetensors"]
    assert len(weights) == files
    assert load_checkpoint(place / "x").config.dtype == "bfloat16"


def test_force(model: Path, place: Path, capsys: Capture) -> None:
    """A file, and a folder of an earlier export; never what no export has written."""
    for to, out in (("gguf", "x.gguf"), ("huggingface", "x")):
        arguments = ["export", str(model), out, "--to", to]
        assert main(arguments) == 0
        capsys.readouterr()
        assert main(arguments) == 1
        assert capsys.readouterr().err.startswith("error: ")
        assert main([*arguments, "--force"]) == 0
    (place / "mine").mkdir()
    (place / "mine" / "letter.txt").write_text("mine")
    assert main(["export", str(model), "mine", "--to", "huggingface", "--force"]) == 1
    assert "holds 'letter.txt', which no export writes" in capsys.readouterr().err
    assert names(place / "mine") == ["letter.txt"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--to", "onyx"], "--to is 'onyx': it must be one of smol, gguf, huggingface"),
        (
            ["--to", "gguf", "--quant", "q8"],
            "--quant is 'q8': --to gguf takes q8_0, q4_0, q4_1, f16, bf16, f32",
        ),
        (
            ["--to", "huggingface", "--quant", "q8_0"],
            "--quant is 'q8_0': --to huggingface takes f16, bf16, f32",
        ),
        (["--quant", "f16"], "--quant is 'f16': --to smol takes q8, q4, q4m, q16, bf16, f32"),
        (
            ["--to", "gguf", "--quant", "q8_0", "--calibration", "x.txt"],
            "--calibration is for --to smol, not for gguf",
        ),
        (["--shard-size", "1GB"], "--shard-size is for --to huggingface, not for smol"),
        (["--to", "huggingface", "--shard-size", "0MB"], "--shard-size is '0MB': give a size"),
    ],
)
def test_wrong_options(
    model: Path, place: Path, options: list[str], message: str, capsys: Capture
) -> None:
    """cases: exit code 2 and one line that says what there is"""
    assert main(["export", str(model), *options]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1
    assert names(place) == []


def test_a_model_without_a_tokenizer(place: Path, capsys: Capture) -> None:
    """It goes to a folder, but llama.cpp could not open it."""
    write_hf(place / "bare", tiny_config(), random_weights(tiny_config()))
    assert main(["export", "bare", "--to", "gguf"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        "error: bare: has no tokenizer, without which llama.cpp opens no GGUF file: put its "
        "tokenizer.json beside the weights"
    )
    assert main(["export", "bare", "--to", "huggingface"]) == 0
    assert names(place) == ["bare", "bare-hf"]


@pytest.mark.parametrize("to", TARGETS)
def test_failures_leave_nothing(place: Path, to: str, capsys: Capture) -> None:
    """cases: W12"""
    path = write_gguf(place / "y.gguf", tiny_config(), random_weights(tiny_config()))
    path.write_bytes(path.read_bytes()[:-1])
    entry = ["--entry", "forward"] if TARGETS[to].needs_entry else []
    assert main(["export", "y.gguf", "x", "--to", to, *entry]) == 1
    assert "cut short" in capsys.readouterr().err
    assert names(place) == ["y.gguf"]


def test_files_one_by_one(model: Path, place: Path) -> None:
    paths = [str(model / name) for name in ("config.json", "tokenizer.json", "model.safetensors")]
    assert main(["export", *paths, "x.gguf", "--to", "gguf"]) == 0
    again = load_checkpoint(place / "x.gguf")
    assert again.config.vocab_size == 260
    assert again.tokenizer is not None
