"""The command line: what `run` writes where, help, versions, and what is imported for it."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from smollm2 import __version__, load
from smollm2.backends import BackendOptions
from smollm2.cli import main
from smollm2.cli.options import Computing, unescape
from smollm2.results import Generation
from smollm2.streaming import Stream
from tests.cli_session import COMMAND, environment, run_cli, write_model

HEAVY = {"torch", "jax", "huggingface_hub", "jinja2", "transformers"}
COMMANDS = ("run", "chat", "pull", "list", "show", "tokenize", "verify", "bench", "eval", "export")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("cli") / "model")


@pytest.fixture(autouse=True)
def no_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))


def test_run_writes_the_text_of_the_library(model: Path, capsys: pytest.CaptureFixture) -> None:
    """cases: W16 (feature 33): the same text from `run` and from `generate`"""
    options = ["-t", "0.8", "-s", "7", "-r", "1.1", "--top-p", "0.9", "--top-k", "20"]
    assert main(["run", "-m", str(model), "-p", "Ab", "-n", "12", *options]) == 0
    with load(model) as loaded:
        expected = loaded.generate(
            "Ab",
            max_tokens=12,
            temperature=0.8,
            seed=7,
            repetition_penalty=1.1,
            top_p=0.9,
            top_k=20,
        )
    out, err = capsys.readouterr()
    assert out == expected.text + "\n"
    assert len(err.splitlines()) == 1
    assert "· 12 out at " in err
    assert err.endswith(" s · seed 7 · length\n")


@pytest.mark.parametrize(
    ("given", "options"),
    [
        (["--quant", "f32", "--kv", "int8", "--threads", "1"], {"quant": "f32", "kv": "int8"}),
        (["--quant", "q4"], {"quant": "q4"}),
    ],
)
def test_run_computes_as_it_is_told(
    model: Path, capsys: pytest.CaptureFixture, given: list[str], options: BackendOptions
) -> None:
    assert main(["run", "-m", str(model), "Ab", "-n", "12", "--backend", "native", *given]) == 0
    with load(model, backend="native", **options) as loaded:
        assert capsys.readouterr().out == loaded.generate("Ab", max_tokens=12).text + "\n"
    assert main(["run", "-m", str(model), "Ab", "--backend", "numpy", *given]) == 1
    assert "the numpy backend has no option" in capsys.readouterr().err


def test_json_is_one_object_and_all_of_it(model: Path, capsys: pytest.CaptureFixture) -> None:
    command = ["run", "-m", str(model), "-p", "Ab", "-n", "5", "-s", "3", "--json"]
    assert main(command) == 0
    out, err = capsys.readouterr()
    value = json.loads(out)
    assert out.count("\n") == 1
    assert err == ""
    assert len(value["token_ids"]) == 5
    assert bytes(i - 3 for i in value["token_ids"]).decode() == value["text"]
    assert (value["model"], value["prompt"], value["seed"]) == (str(model), "Ab", 3)
    assert (value["finish_reason"], value["stopped_by"]) == ("length", None)
    assert value["stats"]["prompt_tokens"] == 2
    assert value["stats"]["generated_tokens"] == 5


def test_a_question_under_a_system_prompt(model: Path, capsys: pytest.CaptureFixture) -> None:
    command = ["run", "-m", str(model), "-p", "Ab?", "-n", "9", "--system", "Be brief."]
    assert main(command) == 0
    with load(model) as loaded:
        answer = loaded.chat("Be brief.").send("Ab?", max_tokens=9)
    assert capsys.readouterr().out == answer.text + "\n"
    assert main(command[:-2]) == 0
    assert capsys.readouterr().out != answer.text + "\n"


def test_a_question_under_the_own_system_prompt(model: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["run", "-m", str(model), "-c", "-n", "9", "Ab?"]) == 0
    with load(model) as loaded:
        answer = loaded.chat().send("Ab?", max_tokens=9)
    out, err = capsys.readouterr()
    assert out == answer.text + "\n"
    assert err.endswith(" s · length\n")
    assert "seed" not in err  # the likeliest token needs none


@pytest.mark.parametrize(
    ("options", "before"),
    [(["--chat"], []), (["--system", ""], [{"role": "system", "content": ""}])],
)
def test_json_has_what_was_asked(
    options: list[str],
    before: list[dict[str, str]],
    model: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    assert main(["run", "-m", str(model), "-n", "2", "--json", "Ab?", *options]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["messages"] == [*before, {"role": "user", "content": "Ab?"}]
    assert "prompt" not in value


@pytest.mark.parametrize(("option", "start"), [("--echo", "Ab"), ("--no-echo", "")])
def test_echo(model: Path, capsys: pytest.CaptureFixture, option: str, start: str) -> None:
    """cases: feature 36"""
    main(["run", "-m", str(model), "-p", "Ab", "-n", "3", "--no-echo"])
    text = capsys.readouterr().out
    assert main(["run", "-m", str(model), "-p", "Ab", "-n", "3", option]) == 0
    assert capsys.readouterr().out == start + text


@pytest.mark.parametrize("arguments", [[], ["-p", "-"], ["-"]])
@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_the_prompt_may_come_through_a_pipe(
    model: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    end: str,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines" + end, newline=""))
    assert main(["run", "-m", str(model), "-n", "1", "--json", *arguments]) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "two\nlines"


def test_stop_strings_know_escapes(model: Path, capsys: pytest.CaptureFixture) -> None:
    main(["run", "-m", str(model), "-p", "Ab", "-n", "20", "--json"])
    text = json.loads(capsys.readouterr().out)["text"]
    stop = text[5:7]
    command = ["run", "-m", str(model), "-p", "Ab", "-n", "20", "--json"]
    assert main([*command, "--stop", r"no\n", "--stop", stop]) == 0
    value = json.loads(capsys.readouterr().out)
    assert (value["finish_reason"], value["stopped_by"]) == ("stop", stop)
    assert value["text"] == text[: text.index(stop)]
    assert unescape(r"a\nb\t\\n\x") == "a\nb\t\\n\\x"


def test_a_closed_pipe_ends_quietly(model: Path) -> None:
    command = [*COMMAND, "run", "-m", str(model), "-p", "Ab", "-n", "250"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert len(process.stdout.read(5)) == 5
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(30) == 0


def test_ctrl_c_ends_json_whole(
    model: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(stream: Stream) -> Generation:
        next(stream)
        os.kill(os.getpid(), signal.SIGINT)
        return finish(stream)

    finish = Stream.finish
    monkeypatch.setattr(Stream, "finish", interrupted)
    assert main(["run", "-m", str(model), "-p", "Ab", "--json"]) == 130
    value = json.loads(capsys.readouterr().out)
    assert (value["finish_reason"], len(value["token_ids"])) == ("cancelled", 1)


@pytest.mark.parametrize("command", ["run", "chat"])
def test_ctrl_c_while_a_model_is_loaded(
    command: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("smollm2.generate.load", interrupted)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Ab"))
    assert main([command]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_one_line(model: Path) -> None:
    command = [*COMMAND, "run", "-m", str(model), "-p", "Ab", "-n", "2"]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, env=environment(), check=False
        )
    assert done.returncode == 1
    assert done.stderr == b"error: No space left on device\n"


def test_a_stream_that_cannot_show_a_character_gets_another(model: Path) -> None:
    done = run_cli("run", "-m", model, "-p", "ö", "-n", "2", "--echo", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout[0]) == (0, "?")


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_the_commands(arguments: list[str], capsys: pytest.CaptureFixture) -> None:
    assert main(arguments) == 0
    out = capsys.readouterr().out
    listed = [line.split()[0] for line in out.partition("Commands:\n")[2].splitlines()]
    assert listed == list(COMMANDS)
    assert "..." not in out.partition("Commands:\n")[2]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command(command: str, capsys: pytest.CaptureFixture) -> None:
    """An example, at most 15 options, and no line that a terminal of 80 columns would break."""
    assert main([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"Example: smollm2 {command}" in out
    options = [line for line in out.splitlines() if line.startswith("  -") and "--help" not in line]
    assert 1 <= len(options) <= 15
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out
    for other in ([command, "-h"], ["help", command]):
        assert main(other) == 0
        assert capsys.readouterr().out == out


@pytest.mark.parametrize("command", ["bench", "eval", "run", "chat"])
def test_help_names_all_that_says_what_computes(
    command: str, capsys: pytest.CaptureFixture
) -> None:
    """Options that the list leaves out stand in the text, and the values of each in bench's."""
    assert main([command, "--help"]) == 0
    words = set(re.findall(r"[\w-]+", capsys.readouterr().out))
    assert {f"--{field.name}" for field in fields(Computing)} | {"--quant"} <= words
    if command == "bench":
        assert {"float32", "bfloat16", "float16"} <= words
        assert {"inductor", "cudagraphs", "xla", "exact", "fast", "cuda", "gpu"} <= words


def test_version(capsys: pytest.CaptureFixture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"smollm2 {__version__}\n"


def loaded_by(*arguments: str | Path) -> set[str]:
    """Which of the heavy packages a command imports."""
    code = (
        "import sys; from smollm2.cli import main; code = main(sys.argv[1:]);"
        "print(*{name.partition('.')[0] for name in sys.modules}, file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment(),
        check=True,
    )
    return set(done.stderr.split("\n")[-2].split())


def test_what_is_imported(model: Path) -> None:
    """cases: P5"""
    helped = loaded_by("--help")
    assert not helped & (HEAVY | {"numpy", "tokenizers", "rich"})
    assert not loaded_by("run", "-m", model, "-p", "Ab", "-n", "1") & (HEAVY | {"rich"})


@pytest.mark.weights
def test_the_readme_command(real_gguf: Path, capsys: pytest.CaptureFixture) -> None:
    """cases: feature 33"""
    prompt = "The capital of France is"
    assert main(["run", "-m", str(real_gguf), prompt, "-n", "2"]) == 0
    assert capsys.readouterr().out == " Paris.\n"


@pytest.mark.weights
def test_a_question_without_chat(real_gguf: Path, capsys: pytest.CaptureFixture) -> None:
    """Not a word where the model ends at once, but a hint at what was meant."""
    command = ["run", "-m", str(real_gguf), "What is the capital of Germany?", "-n", "9"]
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith("the model ended at once: to ask a question, add --chat\n")
    assert main([*command, "--chat"]) == 0
    out, err = capsys.readouterr()
    assert out == "The capital of Germany is Berlin.\n"
    assert "add --chat" not in err


@pytest.mark.parametrize("streams", [">&-", "2>&-", ">&- 2>&-", "2>/dev/full"])
@pytest.mark.parametrize("command", ["--help", "run"])
def test_closed_streams_are_no_reason_to_fail(model: Path, streams: str, command: str) -> None:
    arguments = f"run -m {model} -p Ab -n 3" if command == "run" else command
    line = f"{sys.executable} -m smollm2 {arguments} {streams}"
    done = subprocess.run(
        ["sh", "-c", line], capture_output=True, text=True, check=False, env=environment()
    )
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
