"""`smollm2 bench` and `smollm2 eval`: what they print, in words and as JSON."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from smollm2 import evaluate
from smollm2.backends.numpy import NumpyModel
from smollm2.cli import main
from tests.cli_session import write_model

SHORT = ["--prompt", "40", "--decode", "4", "--repeats", "1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("measure") / "model")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("The sea was calm and the wind was low. " * 40, encoding="utf-8")
    return path


PEERS = ["engine", "model", "threads", "batch", "depth", "prefill", "decode"]
"""Keys of the peers' script, in its order."""


@pytest.mark.parametrize("backend", ["native", "numpy"])
def test_bench_as_json(model: Path, capsys: pytest.CaptureFixture, backend: str) -> None:
    """The keys are those of the peers' script, and then ours."""
    command = ["bench", "-m", str(model), "--backend", backend, *SHORT, "--batch", "2", "--json"]
    assert main(command) == 0
    value = json.loads(capsys.readouterr().out)
    assert [*value][:7] == PEERS
    assert (value["engine"], value["model"]) == (f"smollm2 {backend}", "model")
    assert (value["batch"], value["depth"], value["prompt"]) == (2, 0, 40)
    for key in ("prefill", "decode", "first_token_s", "read_gb_s", "decode_of_read"):
        assert value[key] > 0
    assert value["peak_mb"] is None or value["peak_mb"] > 10


def test_bench_of_several_cases(model: Path, capsys: pytest.CaptureFixture) -> None:
    """Depths and batches may have commas or be repeated, and are combined."""
    command = ["bench", "-m", str(model), *SHORT, "--json"]
    assert main([*command, "--depth", "0,9", "--depth", "30", "--batch", "1,3"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    cases = [(row["depth"], row["batch"]) for row in rows]
    assert cases == [(0, 1), (0, 3), (9, 1), (9, 3), (30, 1), (30, 3)]
    assert len({row["prefill"] for row in rows}) == 1


def test_bench_in_words(model: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["bench", "-m", str(model), *SHORT, "--depth", "9", "--batch", "1,2"]) == 0
    facts, table = capsys.readouterr().out.split("\n\n")
    named = dict(line.split("\t") for line in facts.splitlines())
    assert named["model"] == "model"
    assert named["engine"].startswith("smollm2 native, ")
    assert named["first token"].endswith(" s after loading begins")
    assert re.fullmatch(r"reads [\d.]+ GB/s, multiplies \d+ GMAC/s in 8 bit", named["machine"])
    rows = [line.split("\t") for line in table.splitlines()]
    assert [row[:4] for row in rows] == [
        ["prefill", "40", "0", "1"],
        ["decode", "4", "9", "1"],
        ["decode", "4", "9", "2"],
    ]
    assert all(len(row) == 9 for row in rows)


def test_bench_without_the_extension(
    model: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not known is said, and null in JSON."""
    monkeypatch.setitem(sys.modules, "smollm2._native", None)
    command = ["bench", "-m", str(model), "--backend", "numpy", *SHORT]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "its limits are not known without the native engine" in out
    last = out.splitlines()[-1].split("\t")
    assert (last[6], last[8]) == ("–", "–")
    assert main([*command, "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["read_gb_s"] is value["decode_of_read"] is None


def test_eval_of_several_kinds(model: Path, text: Path, capsys: pytest.CaptureFixture) -> None:
    """cases: Q6; fewer bits are further from float32."""
    command = ["eval", "-m", str(model), "--text", str(text), "--windows", "2", "--json"]
    assert main([*command, "--quant", "f32", "--quant", "q8", "--quant", "q4"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["kind"] for row in rows] == ["f32", "q8", "q4"]
    assert rows[0]["mean_kl"] < 1e-6 < rows[1]["mean_kl"] < rows[2]["mean_kl"]
    assert rows[0]["top1"] > 0.999
    assert all(row["tokens"] == 2 * (row_size - 1) for row in rows for row_size in [256])
    assert main([*command[:-1], "--quant", "q8"]) == 0
    cells = capsys.readouterr().out.split()
    assert cells[0] == "q8"
    assert float(cells[1]) == pytest.approx(rows[1]["perplexity"], abs=1e-4)
    change = rows[1]["perplexity"] / rows[1]["reference_perplexity"] - 1
    shares = [float(cell.removesuffix("%")) / 100 for cell in (cells[2], cells[4])]
    assert shares == pytest.approx([change, rows[1]["top1"]], abs=1e-4)
    assert float(cells[3]) == pytest.approx(rows[1]["mean_kl"], abs=1e-6)


def test_eval_of_all_kinds(model: Path, text: Path, capsys: pytest.CaptureFixture) -> None:
    command = ["eval", "-m", str(model), "--text", str(text), "--windows", "1", "--json"]
    assert main([*command, "--quant", "all"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["kind"] for row in rows] == ["as it is", "f32", "q16", "bf16", "q8", "q4", "q4m"]
    assert all(row["tolerable"] for row in rows[:5])
    assert len({row["reference_perplexity"] for row in rows}) == 1


def test_eval_reads_the_reference_once(
    model: Path, text: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many kinds are compared; none is computed by NumPy here."""
    read = []
    forward = NumpyModel.forward

    def counted(self, batch, cache=None):
        read.append(len(batch.ids))
        return forward(self, batch, cache)

    monkeypatch.setattr(NumpyModel, "forward", counted)
    command = ["eval", "-m", str(model), "--text", str(text), "--windows", "2", "--quant"]
    for kinds in ("q8", "all"):
        read.clear()
        assert main([*command, kinds]) == 0
        assert sum(read) == 2 * 255


def test_eval_reads_the_windows_that_are_chosen(
    model: Path, text: Path, capsys: pytest.CaptureFixture
) -> None:
    command = ["eval", "-m", str(model), "--text", str(text), "--json", "--quant", "f32"]
    means = []
    for windows in ("2", "0,1", "1,2"):
        assert main([*command, "--windows", windows]) == 0
        (row,) = map(json.loads, capsys.readouterr().out.splitlines())
        means.append(row["perplexity"])
    assert means[0] == means[1] != means[2]


def test_eval_warns_of_a_kind_that_changes_much(
    model: Path,
    text: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """cases: Q7"""
    command = ["eval", "-m", str(model), "--text", str(text), "--windows", "1", "--quant", "q4"]
    monkeypatch.setattr(evaluate, "TOLERATED", 10.0)
    assert main(command) == 0
    assert "everyday" not in capsys.readouterr().err
    monkeypatch.setattr(evaluate, "TOLERATED", 1e-9)
    assert main(command) == 0
    assert "q4 changes perplexity by" in capsys.readouterr().err


def test_eval_keeps_what_it_has_when_it_is_interrupted(
    model: Path, text: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cases: N rows: a long run of several kinds is not lost to Ctrl-C"""
    calls: list[int] = []
    real = evaluate.evaluate

    def second_fails(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(evaluate, "evaluate", second_fails)
    command = ["eval", "-m", str(model), "--text", str(text), "--windows", "1", "--json"]
    assert main([*command, "--quant", "f32", "--quant", "q8"]) == 130
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["kind"] == "f32"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["bench", "--prompt", "0"], 2, "prompt is 0"),
        (["bench", "--depth", "400"], 1, "context length of 256"),
        (["bench", "--depth", "0,x"], 2, "--depth takes numbers with commas between them"),
        (["bench", "--batch", "0"], 2, "batch is 0"),
        (["bench", "--threads", "0"], 2, "--threads"),
        (["bench", "--backend", "cuda"], 1, "no backend named 'cuda'"),
        (["bench", "--quant", "q3"], 1, "quant='q3' is not known"),
        (["bench", "--backend", "numpy", "--threads", "2"], 1, "has no option threads"),
        (["eval"], 2, "--text"),
        (["eval", "--text", "x", "--quant", "q8", "--quant", "q9"], 2, "--quant takes"),
        (["eval", "--text", "nowhere.txt"], 1, "nowhere.txt"),
        (["eval", "--text", "x", "--windows", "0"], 2, "--windows"),
        (["eval", "--text", "x", "--windows", "1,x"], 2, "--windows"),
    ],
)
def test_wrong_use_is_one_line(
    model: Path, capsys: pytest.CaptureFixture, arguments: list[str], code: int, message: str
) -> None:
    assert main([*arguments, "-m", str(model)]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
