"""`smollm2 bench` and `smollm2 eval`: what they print, in words and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("backend", ["native", "numpy"])
def test_bench_as_json(model: Path, capsys: pytest.CaptureFixture, backend: str) -> None:
    """The keys are those of the peers' script."""
    command = ["bench", "-m", str(model), "--backend", backend, *SHORT, "--batch", "2", "--json"]
    assert main(command) == 0
    value = json.loads(capsys.readouterr().out)
    assert [*value] == ["engine", "model", "threads", "batch", "depth", "prefill", "decode"]
    assert (value["engine"], value["model"]) == (f"smollm2 {backend}", "model")
    assert (value["batch"], value["depth"]) == (2, 0)
    assert value["prefill"] > 0
    assert value["decode"] > 0


def test_bench_in_words(model: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["bench", "-m", str(model), *SHORT, "--depth", "9"]) == 0
    prefill, decode = capsys.readouterr().out.splitlines()
    assert prefill.startswith("prefill")
    assert prefill.endswith("tokens/s  (40 tokens)")
    assert decode.endswith("tokens/s  (batch 1, depth 9)")


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
    assert "perplexity" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["bench", "--prompt", "0"], 1, "prompt is 0"),
        (["bench", "--depth", "400"], 1, "context length of 256"),
        (["bench", "--backend", "cuda"], 1, "no backend named 'cuda'"),
        (["bench", "--quant", "q3"], 1, "quant='q3' is not known"),
        (["bench", "--backend", "numpy", "--threads", "2"], 1, "has no option threads"),
        (["eval"], 2, "--text"),
        (["eval", "--text", "nowhere.txt"], 1, "nowhere.txt"),
    ],
)
def test_wrong_use_is_one_line(
    model: Path, capsys: pytest.CaptureFixture, arguments: list[str], code: int, message: str
) -> None:
    assert main([*arguments, "-m", str(model)]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
