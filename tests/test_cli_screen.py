"""What a person sees of a chat: how an answer ended, nothing typed in it, 80 columns."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest

from smollm2.cli.keyboard import no_echo
from smollm2.cli.stats import stats_parts
from smollm2.cli.terminal import Terminal, cut_in_front
from smollm2.results import Generation, Stats
from smollm2.sampling import SamplingParams
from tests.cli_session import Screen, write_model

YOU = "You ›"
CONTEXT = 60000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("cli") / "model", max_position_embeddings=CONTEXT)


def wait_for_prompt(screen: Screen, count: int) -> None:
    """Wait until a chat has asked so often."""
    screen.wait_for(lambda: screen.raw.count(YOU) == count and screen.lines[-1] == YOU)


def test_an_answer_that_is_stopped(model: Path) -> None:
    """Nothing that is typed meanwhile is shown, ^C neither; then the terminal is as it was."""
    with Screen("chat", "-m", model, "-n", "50000") as screen:
        wait_for_prompt(screen, 1)
        screen.type("Ab\r")
        screen.wait_for(lambda: re.search("[A-Z]{9}", screen.raw) is not None)
        assert not screen.echoes
        screen.type("hidden")
        screen.interrupt(until=lambda: screen.raw.count(YOU) == 2)
        wait_for_prompt(screen, 2)
        assert "hidden" not in screen.raw
        assert "^C" not in screen.raw
        assert "\x1b[2m (stopped)\x1b[0m" in screen.raw
        screen.end_input()
        screen.wait_for(screen.has_ended)


def test_the_terminal_is_restored_after_a_chat(model: Path) -> None:
    """The shell that started it echoes again, after an answer that was stopped."""
    shell = f"trap : INT; {sys.executable} -m smollm2 chat -m {model} -n 50000; stty -a"
    with Screen.of_shell(shell) as screen:
        wait_for_prompt(screen, 1)
        screen.type("Ab\r")
        screen.wait_for(lambda: re.search("[A-Z]{9}", screen.raw) is not None)
        screen.interrupt(until=lambda: screen.raw.count(YOU) == 2)
        wait_for_prompt(screen, 2)
        screen.end_input()
        screen.wait_for(screen.has_ended)
        settings = "".join(screen.lines)
        assert " echo " in settings
        assert " icanon" in settings


def test_the_terminal_is_restored_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way out of the block; without a terminal there is nothing to do."""
    termios = pytest.importorskip("termios")
    pty = pytest.importorskip("pty")
    controller, terminal = pty.openpty()

    def interrupted(error: type[BaseException]) -> None:
        with no_echo():
            assert not termios.tcgetattr(terminal)[3] & termios.ECHO
            raise error

    with open(controller, "rb"), open(terminal, encoding="utf-8") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        before = termios.tcgetattr(stdin)
        assert before[3] & termios.ECHO
        for error in (KeyboardInterrupt, ValueError):
            with pytest.raises(error):
                interrupted(error)
            assert termios.tcgetattr(stdin) == before
    for nothing in (None, io.StringIO("")):
        monkeypatch.setattr(sys, "stdin", nothing)
        with no_echo():
            pass


def test_an_answer_of_all_its_tokens(model: Path) -> None:
    with Screen("chat", "-m", model, "-n", "7") as screen:
        wait_for_prompt(screen, 1)
        screen.type("Ab\r")
        wait_for_prompt(screen, 2)
        assert "… stopped at 7 tokens: -n sets more" in screen.lines
        assert "(stopped)" not in screen.raw
        screen.type("/bye\r")
        assert screen.exit_code() == 0


def test_an_answer_that_fills_the_context(tmp_path: Path) -> None:
    """More tokens cannot be had: the way out is another."""
    folder = write_model(tmp_path / "model", max_position_embeddings=100)
    with Screen("chat", "-m", folder, "--no-system") as screen:
        wait_for_prompt(screen, 1)
        screen.type("Ab\r")
        wait_for_prompt(screen, 2)
        assert "… stopped, the context is full: /reset starts anew" in screen.lines
        screen.end_input()
        assert screen.exit_code() == 0


def test_a_saved_conversation_shows_where_it_was(model: Path, tmp_path: Path) -> None:
    saved = tmp_path / "chat.json"
    said = ["first?", "FIRST", "last?", "LAST\n\x1b[31mred"]
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)
    ]
    value = {"format": "smollm2-chat-1", "system": None, "messages": messages}
    saved.write_text(json.dumps(value), encoding="utf-8")
    with Screen("chat", "-m", model, NO_COLOR="1") as screen:
        wait_for_prompt(screen, 1)
        screen.type(f"/load {saved}\r")
        screen.wait_for(lambda: screen.raw.count(YOU) >= 3 and screen.lines[-1] == YOU)
        assert f"loaded 4 messages from {saved}" in screen.lines
        assert screen.lines[-4:-1] == ["You › last?", " AI › LAST", "[31mred"]
        assert "FIRST" not in screen.raw
        screen.end_input()
        assert screen.exit_code() == 0


def test_the_greeting_fits_80_columns(tmp_path: Path) -> None:
    folder = write_model(tmp_path / ("long" * 20) / "the-end", max_position_embeddings=8192)
    with Screen("chat", "-m", folder, columns=80) as screen:
        wait_for_prompt(screen, 1)
        assert len(screen.lines) == 2
        assert screen.lines[0].startswith("…")
        assert "the-end · 8192 tokens of context · /help, Ctrl-D to leave" in screen.lines[0]
        screen.end_input()
        assert screen.exit_code() == 0


def test_a_cut_text_is_as_long_as_it_may_be() -> None:
    assert cut_in_front("a" * 70, "b" * 10) == "a" * 70
    assert cut_in_front("x" + "a" * 70, "b" * 10) == "…" + "a" * 69
    assert cut_in_front("long", "b" * 90) == "…g"


def answered(finish_reason: str, seed: int, temperature: float, cached: int) -> Generation:
    stats = Stats(
        8192, cached, 8192, ttft=999.9, prefill_seconds=6.0, decode_seconds=60.0, seed=seed
    )
    params = SamplingParams(temperature=temperature)
    return Generation(None, (1,), "", (2,), finish_reason, None, None, stats, params)


@pytest.mark.parametrize(("temperature", "lines"), [(0.0, 1), (0.8, 2)])
def test_the_longest_stats_fit_80_columns(
    temperature: float,
    lines: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On a terminal a seed may go to a line of its own; in a pipe all is one line."""
    terminal = Terminal()
    result = answered("cancelled", 2**63 - 1, temperature, cached=0)
    parts = stats_parts(result, with_reason=True)
    terminal.note(*parts)
    assert capsys.readouterr().err == " · ".join(parts) + "\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    terminal.note(*parts)
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == lines
    assert max(map(len, shown)) <= 80
    assert " · ".join(shown) == " · ".join(parts)


def test_the_longest_stats_of_a_chat_fit_80_columns() -> None:
    assert len(stats_parts(answered("stop", 1, 0.0, cached=192))[0]) <= 80
