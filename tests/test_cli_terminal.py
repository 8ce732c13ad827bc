"""The command line in a terminal: colour, Ctrl-C, and a chat as a person has it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from smollm2.cli.interrupts import on_interrupt
from tests.cli_session import COMMAND, REPOSITORY, Screen, environment, write_model

YOU = "You ›"
LONG = ("-n", "50000")  # minutes of answer, unless somebody stops it


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("cli") / "model", max_position_embeddings=60000)


def wait_for_prompt(screen: Screen, count: int) -> None:
    """Wait until a chat has asked so often."""
    screen.wait_for(lambda: screen.raw.count(YOU) == count and screen.lines[-1] == YOU)


def wait_for_answer(screen: Screen) -> None:
    """Wait until some of the letters that the model writes are there."""
    screen.wait_for(lambda: re.search("[A-Z]{9}", screen.raw) is not None)


def test_run_shows_the_prompt_in_colour(model: Path) -> None:
    """cases: feature 47"""
    with Screen("run", "-m", model, "-p", "Ab", "-n", "4", "-s", "1") as screen:
        assert screen.exit_code() == 0
        assert screen.lines[0].startswith("Ab")
        assert len(screen.lines[0]) == 6
        assert screen.lines[1].startswith("2 tokens in")
        assert "\x1b[36mA\x1b[0m" in screen.raw
        assert "\x1b[2m2 tokens" in screen.raw


@pytest.mark.parametrize(
    ("command", "options", "env"),
    [
        ("run", ["-p", "Ab", "-n", "4"], {"NO_COLOR": "1"}),
        ("run", ["-p", "Ab", "-n", "4", "--no-color"], {}),
        ("chat", ["-n", "4"], {"TERM": "dumb"}),
        ("chat", ["-n", "4", "--no-color"], {}),
    ],
)
def test_no_colour_no_escape_codes(
    model: Path, command: str, options: list[str], env: dict[str, str]
) -> None:
    """cases: feature 47"""
    with Screen(command, "-m", model, *options, **env) as screen:
        if command == "chat":
            wait_for_prompt(screen, 1)
            screen.type("Ab\r")
            wait_for_prompt(screen, 2)
            screen.end_input()
        assert screen.exit_code() == 0
        assert screen.lines
        # The terminal's line editor asks that pasted text be marked: that is no colour.
        assert "\x1b" not in re.sub(r"\x1b\[\?2004[hl]", "", screen.raw)


def test_help_is_in_colour_unless_told_not_to() -> None:
    """cases: feature 47"""
    with Screen("--help") as screen:
        assert screen.exit_code() == 0
        assert "\x1b[1mCommands:\x1b[0m" in screen.raw
        assert "\x1b[36mtokenize\x1b[0m" in screen.raw
    with Screen("run", "--help", NO_COLOR="1") as screen:
        assert screen.exit_code() == 0
        assert "\x1b" not in screen.raw


def test_control_characters_of_a_model_do_not_reach_the_terminal(model: Path) -> None:
    """cases: S of promise 5: what a model writes is text"""
    arguments = ["run", "-m", str(model), "-p", "A\x1b]0;title\x07b\tc", "-n", "1", "--echo"]
    with Screen(*arguments, NO_COLOR="1") as screen:
        assert screen.exit_code() == 0
        assert "\x1b" not in screen.raw
        assert "\x07" not in screen.raw
        assert "A]0;titleb" in screen.raw


def test_ctrl_c_ends_a_run_and_keeps_its_text(model: Path) -> None:
    with Screen("run", "-m", model, "-p", "Ab", *LONG) as screen:
        wait_for_answer(screen)
        screen.interrupt(until=screen.has_ended)
        assert screen.exit_code() == 130
        assert "· cancelled" in "".join(screen.lines)
        assert "Traceback" not in screen.raw


def test_ctrl_c_ends_a_run_in_a_pipe(model: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "run", "-m", str(model), "-p", "Ab", *LONG],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=REPOSITORY,
        env=environment(),
    )
    assert process.stdout is not None
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert (first + out).decode().rstrip("\n").isalpha()
    assert err.endswith("· cancelled\n".encode())
    assert err.count(b"\n") == 1


def test_ctrl_c_in_a_chat_ends_the_answer_only(model: Path) -> None:
    """cases: feature 45"""
    with Screen("chat", "-m", model, *LONG) as screen:
        wait_for_prompt(screen, 1)
        screen.type("Ab\r")
        wait_for_answer(screen)
        screen.interrupt(until=lambda: screen.raw.count(YOU) == 2)
        wait_for_prompt(screen, 2)
        screen.type("/stats\r")
        wait_for_prompt(screen, 3)
        assert " out at " in screen.raw
        screen.interrupt(until=screen.has_ended)
        assert screen.exit_code() == 0
        assert "Traceback" not in screen.raw


def test_ctrl_c_drops_what_is_typed_and_then_leaves(model: Path) -> None:
    with Screen("chat", "-m", model) as screen:
        wait_for_prompt(screen, 1)
        screen.type("not sent")
        screen.wait_for(lambda: screen.lines[-1] == f"{YOU} not sent")
        screen.interrupt(until=lambda: screen.raw.count(YOU) == 2)
        wait_for_prompt(screen, 2)
        screen.interrupt(until=screen.has_ended)
        assert screen.exit_code() == 0


@pytest.mark.parametrize("way", ["exit\r", None])
def test_a_chat_ends(model: Path, way: str | None) -> None:
    """cases: feature 45"""
    with Screen("chat", "-m", model) as screen:
        wait_for_prompt(screen, 1)
        screen.end_input() if way is None else screen.type(way)
        assert screen.exit_code() == 0


def test_a_chat(model: Path, tmp_path: Path) -> None:
    """cases: feature 45: labels, commands, errors that do not end it, the full text at last"""
    saved = tmp_path / "chat.json"
    with Screen("chat", "-m", model, "-n", "6", "--system", "Be short.") as screen:
        wait_for_prompt(screen, 1)
        assert "60000 tokens of context" in screen.lines[0]
        for count, (typed, seen) in enumerate(
            {
                "hello": " AI › ",
                "/stats on": "numbers follow each answer",
                "/rest": "error: there is no command /rest: try /reset",
                "/system": "the system prompt is 'Be short.'",
                f"/save {saved}": "saved 2 messages",
                "/reset": "the conversation starts anew",
                "/load nothing": "error: nothing: no such file",
                "/prompt": "<|im_start|>system",
            }.items(),
            start=2,
        ):
            screen.type(f"{typed}\r")
            wait_for_prompt(screen, count)
            assert seen in "\n".join(screen.lines)
        assert "\x1b[36mYou › \x1b[0m" in screen.raw
        assert "\x1b[32m AI › \x1b[0m" in screen.raw
        screen.type("/exit\r")
        assert screen.exit_code() == 0
    assert "hello" in saved.read_text(encoding="utf-8")


def test_the_prompt_goes_to_stderr_where_stdout_is_a_file(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = " ".join(f"'{part}'" for part in [*COMMAND, "chat", "-m", str(model), "-n", "5"])
    with Screen.of_shell(f"{command} > {out}") as screen:
        wait_for_prompt(screen, 1)
        screen.type("Ab\r")
        wait_for_prompt(screen, 2)
        screen.end_input()
        assert screen.exit_code() == 0
    assert len(out.read_text(encoding="utf-8").strip()) == 5


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_a_second_ctrl_c_leaves_at_once() -> None:
    stops: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    with on_interrupt(lambda: stops.append("stop")) as pressed:
        assert not pressed.is_set()
        os.kill(os.getpid(), signal.SIGINT)
        assert pressed.is_set()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert stops == ["stop"]
    assert signal.getsignal(signal.SIGINT) is before
