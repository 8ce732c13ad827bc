"""README.md: its commands are run and its Python is executed."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

pytestmark = pytest.mark.weights

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, flags=re.DOTALL)
COMMANDS = [
    line.split("  #")[0].strip()
    for language, block in BLOCKS
    if language == "sh"
    for line in block.splitlines()
    if line.strip()
]
SMOLLM2 = str(Path(sys.executable).parent / "smollm2")


def test_the_first_screen_has_the_two_commands() -> None:
    first = README.splitlines()[:15]
    assert any(line.startswith("make run") for line in first)
    assert any(line.startswith("make test") for line in first)
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    for target in ("run", "test"):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)


@pytest.mark.parametrize("command", [c for c in COMMANDS if "smollm2 " in c])
def test_commands(real_gguf: Path, tmp_path: Path, command: str) -> None:
    """Every command runs, in a folder of its own; the chat gets the end of input at once."""
    run = subprocess.run(
        ["sh", "-c", command.replace("smollm2 ", f"{shlex.quote(SMOLLM2)} ", 1)]
        if "|" not in command
        else ["sh", "-c", command.replace("| smollm2 ", f"| {shlex.quote(SMOLLM2)} ")],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    if "capital of France" in command:
        assert "Paris" in run.stdout


def test_python(real_gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The blocks are one program, top to bottom."""
    names: dict[str, object] = {}
    for language, block in BLOCKS:
        if language == "python":
            exec(compile(block, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "Paris" in printed
    assert "Berlin" in printed
    assert " out at " in printed  # the statistics of the stream
