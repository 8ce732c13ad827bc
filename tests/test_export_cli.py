"""`smollm2 export`: its forms, what it says, and what it leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from smollm2.checkpoint import load_checkpoint
from smollm2.cli import main
from smollm2.cli.targets import TARGETS
from smollm2.errors import InputError
from smollm2.formats.smol import open_smol
from tests.cli_session import Screen, write_model
from tests.tiny import random_weights, tiny_config, write_gguf, write_hf

Capture = pytest.CaptureFixture[str]
pytestmark = pytest.mark.usefixtures("place")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("export") / "tiny")


def files_in(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir())


def test_a_folder(model: Path, place: Path, capsys: Capture) -> None:
    """cases: features 13, 15; Q1: progress and sizes on stderr, the path on stdout"""
    assert main(["export", str(model), "--to", "smol", "--quant", "q8"]) == 0
    out, err = capsys.readouterr()
    assert out == "tiny-q8.smol\n"
    lines = err.splitlines()
    assert lines[0] == "1/20 model.embed_tokens.weight q8"
    assert lines[19] == "20/20 model.norm.weight f32"
    assert lines[20].strip().startswith("q8: 15 tensors, ")
    assert " bits per weight, " in lines[20]
    assert lines[21].strip() == "f32: 5 tensors, 32.00 bits per weight, 1.3 kB"
    assert lines[22].startswith("tiny-q8.smol: ")
    assert lines[22].split(", ")[2] == "checked"
    assert len(lines) == 23
    assert files_in(place) == ["tiny-q8.smol"]
    open_smol(place / "tiny-q8.smol", verify=True)


def test_names_of_the_file(model: Path, place: Path, capsys: Capture) -> None:
    """cases: features 13, 14"""
    for arguments, name in (
        ([str(model)], "tiny.smol"),
        ([str(model), "a.smol"], "a.smol"),
        ([str(model), "-o", "b.smol", "--quant", "q4m"], "b.smol"),
        (["a.smol", "--quant", "bf16"], "a-bf16.smol"),
    ):
        assert main(["export", *arguments]) == 0
        assert capsys.readouterr().out == f"{name}\n"
    assert files_in(place) == ["a-bf16.smol", "a.smol", "b.smol", "tiny.smol"]


def test_files_one_by_one(model: Path, place: Path, capsys: Capture) -> None:
    """cases: feature 13: config, tokenizer and weights from three folders"""
    for name in "config.json", "tokenizer.json", "model.safetensors":
        (place / name.split(".")[0]).mkdir()
        (place / name.split(".")[0] / name).write_bytes((model / name).read_bytes())
    paths = ["config/config.json", "tokenizer/tokenizer.json", "model/model.safetensors"]
    assert main(["export", *paths, "x.smol"]) == 0
    assert main(["export", *paths, "-o", "y.smol"]) == 0
    assert (place / "x.smol").read_bytes() == (place / "y.smol").read_bytes()
    one, other = load_checkpoint(place / "x.smol"), load_checkpoint(model)
    assert one.config == other.config
    assert one.tokenizer is not None
    assert other.tokenizer is not None
    assert one.tokenizer.to_json() == other.tokenizer.to_json()


@pytest.mark.parametrize(
    "arguments",
    [
        ["a", "b", "c"],
        ["a", "b", "c", "d", "e"],
        ["a", "b", "-o", "c"],
        ["a", "b", "c", "d", "-o", "e"],
        [],
    ],
)
def test_a_wrong_number_of_paths(arguments: list[str], capsys: Capture) -> None:
    """cases: feature 13"""
    assert main(["export", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert "export --help" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--quant", "q5"], "q5"),
        (["--to", "onnx"], "onnx"),
    ],
)
def test_wrong_options(model: Path, options: list[str], message: str, capsys: Capture) -> None:
    assert main(["export", str(model), *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "text", "message"),
    [
        ([], "The sea.", "--calibration is for --quant q8, q4, q4m"),
        (["--quant", "f32"], "The sea.", "--calibration is for --quant q8, q4, q4m"),
        (["--quant", "q8"], " \n", "text.txt: there is no text to calibrate with"),
    ],
)
def test_a_calibration_without_effect(
    model: Path, place: Path, options: list[str], text: str, message: str, capsys: Capture
) -> None:
    (place / "text.txt").write_text(text)
    assert main(["export", str(model), "x.smol", "--calibration", "text.txt", *options]) == 2
    assert message in capsys.readouterr().err
    assert not (place / "x.smol").exists()


def test_only_a_regular_file_is_replaced(model: Path, place: Path, capsys: Capture) -> None:
    """Not what a link points to, nor a device (``-o /dev/null --force`` by root)."""
    (place / "real").write_text("mine")
    (place / "link").symlink_to(place / "real")
    (place / "dangling").symlink_to(place / "nowhere")
    os.mkfifo(place / "pipe")
    for name in ("link", "dangling", "pipe"):
        assert main(["export", str(model), name, "--force"]) == 1
        assert f"{name}: is no regular file" in capsys.readouterr().err
    assert main(["export", str(model), "x.gguf"]) == 1
    assert "x.gguf: is the name of another format" in capsys.readouterr().err
    assert sorted(path.name for path in place.iterdir()) == ["dangling", "link", "pipe", "real"]


@pytest.mark.parametrize("ending", [".smol", ".gguf", ".onnx", ".mlir", ".mlirbc"])
def test_a_name_of_another_format_is_refused(ending: str) -> None:
    for to, target in TARGETS.items():
        path = Path(f"x{ending}")
        if (
            target.ending == ending
            or to == "huggingface"
            or (to, ending) == ("stablehlo", ".mlirbc")
        ):
            target.check(path, False)
        else:
            with pytest.raises(InputError, match=f"x{ending}: is the name of another format"):
                target.check(path, False)


@pytest.mark.parametrize("to", [name for name in TARGETS if name != "huggingface"])
def test_a_folder_that_is_not_there_is_told_before_anything_is_read(to: str) -> None:
    target = TARGETS[to]
    with pytest.raises(InputError, match="there is no folder nowhere: make it first"):
        target.check(Path(f"nowhere/x{target.ending}"), False)


def test_a_terminated_export_leaves_nothing(model: Path, place: Path) -> None:
    """SIGTERM arrives while tensors are written; cases: W12"""
    script = """
import os, signal, sys
from smollm2.cli import main
from smollm2.export import smol
pack = smol._Plan.pack
def slow(self, tensor):
    if len(list(os.scandir("."))) > 0:
        os.kill(os.getpid(), signal.SIGTERM)
    return pack(self, tensor)
smol._Plan.pack = slow
sys.exit(main(sys.argv[1:]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, "export", str(model), "x.smol"],
        cwd=place,
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 128 + signal.SIGTERM
    assert list(place.iterdir()) == []


def test_a_file_is_not_replaced_unless_told(model: Path, place: Path, capsys: Capture) -> None:
    (place / "x.smol").write_text("mine")
    assert main(["export", str(model), "x.smol"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "error: x.smol: exists: give another name, or --force to replace it\n"
    assert (place / "x.smol").read_text() == "mine"
    assert main(["export", str(model), "x.smol", "--force"]) == 0
    open_smol(place / "x.smol", verify=True)


def test_failures_leave_nothing(place: Path, capsys: Capture) -> None:
    """cases: feature 16; W12: one line, exit 1, no file"""
    config = tiny_config()
    weights = random_weights(config)
    weights.blocks[0].mlp.up[0, 0] = np.nan
    write_hf(place / "nan", config, weights)
    assert main(["export", "nan", "x.smol", "--quant", "q8"]) == 1
    assert "mlp.up_proj.weight: weights with NaN" in capsys.readouterr().err.splitlines()[-1]
    assert main(["export", "nothing", "x.smol"]) == 1
    assert main(["export", "nan", "no/such/folder/x.smol"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: no/such/folder/x.smol: ")
    (place / "cut.gguf").write_bytes(
        write_gguf(place / "y.gguf", config, random_weights(config)).read_bytes()[:-1]
    )
    assert main(["export", "cut.gguf", "x.smol"]) == 1
    assert "cut short" in capsys.readouterr().err
    assert files_in(place) == ["cut.gguf", "nan", "y.gguf"]


def test_what_is_rounded_is_said(place: Path, capsys: Capture) -> None:
    """cases: Q1, Q2"""
    write_gguf(place / "x.gguf", tiny_config(), random_weights(tiny_config()), "Q5_0")
    assert main(["export", "x.gguf"]) == 0
    err = capsys.readouterr().err
    assert "15 tensors of Q5_0 are rounded to q8: no kind holds Q5_0 without loss\n" in err


def test_the_file_is_a_model(model: Path, place: Path, capsys: Capture) -> None:
    assert main(["export", str(model), "x.smol"]) == 0
    capsys.readouterr()
    texts = []
    for path in str(model), "x.smol":
        assert main(["run", "-m", path, "HELLO", "-n", "8"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert main(["show", "x.smol"]) == 0
    assert "format\tsmol" in capsys.readouterr().out
    assert main(["show", "x.smol", "--tensors"]) == 0
    assert "model.layers.0.mlp.up_proj.weight\tf32\t128x64\t32768" in capsys.readouterr().out


def test_on_a_terminal_progress_is_one_line(model: Path, tmp_path: Path) -> None:
    """cases: feature 15"""
    with Screen("export", str(model), str(tmp_path / "x.smol")) as screen:
        assert screen.exit_code() == 0
        lines = screen.lines
    assert not [line for line in lines if line.startswith("1/20")]
    assert [line.split(":")[0].strip() for line in lines[:2]] == ["f32", "x.smol"]
