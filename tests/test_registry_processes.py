"""Pulling in processes of their own: killed ones, two at once, and one that may open no socket."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from smollm2.registry import list_models, pull
from tests.fakehub import COMMIT, NEEDED, FakeHub, fake_hub

NAME = "smollm2-135m-instruct"
MODEL = "model.safetensors"
PULL = f"from smollm2 import registry; registry.pull({NAME!r}, source='hub')"


@pytest.fixture
def fake(store: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    with fake_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        yield hub


def run(program: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_a_killed_pull_leaves_no_model_and_is_continued(fake: FakeHub, tmp_path: Path) -> None:
    """cases: D2 (feature 49, 163)"""
    fake.stall = MODEL
    part = tmp_path / "home" / "models" / ".partial" / NAME / COMMIT / f"{MODEL}.part"
    half = len(NEEDED[MODEL]) // 2
    with run(PULL) as process:
        assert fake.stalled.wait(30)
        deadline = time.monotonic() + 10
        while not (part.exists() and part.stat().st_size > half // 2):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.kill()
    kept = part.stat().st_size
    assert 0 < kept <= half
    assert list_models() == []

    fake.served.clear()
    pull(NAME)
    assert list(fake.served) == [MODEL]
    assert fake.gets(MODEL)[-1]["Range"] == f"bytes={kept}-"
    assert fake.served[MODEL] == len(NEEDED[MODEL]) - kept
    assert [model.problem for model in list_models()] == [None]


def test_two_pulls_at_once_fetch_once(fake: FakeHub) -> None:
    fake.stall = MODEL
    note = "class Say(registry.SilentProgress):\n def note(self, text): print(text, flush=True)\n"
    say = f"from smollm2 import registry\n{note}registry.pull({NAME!r}, progress=Say())"
    with run(PULL) as first:
        assert fake.stalled.wait(30)
        with run(say) as second:
            assert second.stdout is not None
            said = second.stdout.readline()
            fake.released.set()
            assert "another process is fetching" in said
            assert (second.wait(30), first.wait(30)) == (0, 0)
    assert len(fake.gets("config.json")) == 1
    assert len(fake.gets(MODEL)) == 2  # the stalled connection and the one that continued it
    assert [model.problem for model in list_models()] == [None]


GUARD = """
import sys
def guard(event, arguments):
    if event.startswith("socket.") or event == "subprocess.Popen":
        raise AssertionError(event)
sys.addaudithook(guard)
from smollm2 import registry
"""


@pytest.mark.parametrize("switch", ["nothing", "SMOLLM2_OFFLINE", "HF_HUB_OFFLINE"])
def test_no_socket_is_opened_for_what_is_here(
    fake: FakeHub, monkeypatch: pytest.MonkeyPatch, switch: str
) -> None:
    """cases: D3 (feature 111)"""
    pull(NAME)
    fake.requests.clear()
    monkeypatch.setenv(switch, "1")
    used = f"registry.resolve({NAME!r}); registry.verify({NAME!r}); registry.list_models()"
    lazy = "assert not {'huggingface_hub', 'filelock', 'httpx', 'httpx2'} & sys.modules.keys()"
    with run(f"{GUARD}\n{used}\n{lazy}") as process:
        output, _ = process.communicate(timeout=30)
    assert (process.returncode, output) == (0, "")
    assert fake.requests == []


def test_no_socket_is_opened_offline_for_what_is_missing(
    fake: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cases: D3"""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with run(f"{GUARD}\nregistry.resolve({NAME!r})") as process:
        output, _ = process.communicate(timeout=30)
    assert "OfflineError" in output.splitlines()[-1]
    assert process.returncode == 1


def test_the_guard_guards(fake: FakeHub) -> None:
    with run(f"{GUARD}\nregistry.resolve({NAME!r})") as process:
        output, _ = process.communicate(timeout=30)
    assert "socket." in output
    assert process.returncode == 1
    assert fake.requests == []
