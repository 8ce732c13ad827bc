"""The store: what counts as a model, and what broken folders do."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from smollm2.registry import store
from smollm2.registry.store import FileCheck, FileRecord, LocalModel, Manifest, list_models

CONTENT = b"weights"
DIGEST = hashlib.sha256(CONTENT).hexdigest()
GOOD: dict[str, Any] = {
    "name": "a/b",
    "source": "hub",
    "repo": "a/b",
    "revision": "0" * 40,
    "files": {
        "config.json": {"size": 7, "sha256": DIGEST},
        "model.safetensors": {"size": 7, "sha256": DIGEST},
    },
}


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SMOLLM2_HOME", str(tmp_path))
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


def put(folder: Path, manifest: object) -> Path:
    """A folder with both files and this manifest."""
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes(CONTENT)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_a_good_folder_is_a_model(models: Path) -> None:
    folder = put(models / "a--b", GOOD)
    files = {name: FileRecord(7, DIGEST) for name in GOOD["files"]}
    assert store.find("a/b", "hub") == Manifest("a/b", "hub", "a/b", "0" * 40, files)
    assert list_models() == [LocalModel("a/b", folder, "hub", "0" * 40, 14)]
    assert list(store.check(folder)) == [
        FileCheck(folder / name, True, f"sha256 {DIGEST}") for name in files
    ]


BROKEN: list[object] = [
    None,
    [],
    {},
    *({key: value for key, value in GOOD.items() if key != left_out} for left_out in GOOD),
    GOOD | {"name": 1},
    GOOD | {"source": "ftp"},
    GOOD | {"source": ["hub"]},
    GOOD | {"revision": None},
    GOOD | {"files": {}},
    GOOD | {"files": []},
    GOOD | {"files": {"config.json": 7}},
    GOOD | {"files": {"config.json": {"size": 7}}},
    GOOD | {"files": {"config.json": {"size": "7", "sha256": DIGEST}}},
    GOOD | {"files": {"config.json": {"size": 7, "sha256": None}}},
    *(
        GOOD | {"files": {name: {"size": 7, "sha256": DIGEST}}}
        for name in ("../a", "/etc/passwd", "a/b", "..", "", ".hidden", "C:x", "a\0", "a\\b")
    ),
]


@pytest.mark.parametrize("manifest", BROKEN)
def test_a_broken_manifest_is_a_problem_and_no_model(models: Path, manifest: object) -> None:
    """cases: X7"""
    folder = put(models / "a--b", manifest)
    assert store.find("a/b", "hub") is None
    (found,) = list_models()
    assert (found.name, found.path, found.nbytes) == ("a--b", folder, 0)
    assert found.problem is not None
    assert str(folder / "manifest.json") in found.problem
    (check,) = store.check(folder)
    assert check == FileCheck(folder / "manifest.json", False, found.problem)


@pytest.mark.parametrize("raw", [b"", b"\xff", b"{", b"[" * 100_000, b'{"a": NaN}', b"{}{}"])
def test_a_manifest_that_is_no_json_is_a_problem(models: Path, raw: bytes) -> None:
    folder = put(models / "a--b", GOOD)
    (folder / "manifest.json").write_bytes(raw)
    assert store.find("a/b", "hub") is None
    assert list_models()[0].problem


def test_broken_ones_do_not_hide_the_others(models: Path) -> None:
    put(models / "a--b", GOOD)
    (models / "empty").mkdir()
    (models / "a-file").touch()
    (models / ".partial").mkdir()
    (models / ".locks").mkdir()
    assert [(model.name, model.problem is None) for model in list_models()] == [
        ("a/b", True),
        ("empty", False),
    ]


def test_a_copy_under_another_name_is_not_taken(models: Path) -> None:
    put(models / "c--d", GOOD)
    assert store.find("c/d", "hub") is None


def test_missing_short_and_changed_files_are_told_apart(models: Path) -> None:
    """cases: D1, D2, W11"""
    folder = put(models / "a--b", GOOD)
    path = folder / "model.safetensors"
    path.write_bytes(CONTENT[::-1])
    changed = hashlib.sha256(CONTENT[::-1]).hexdigest()
    assert list(store.check(folder))[1].detail == f"has sha256 {changed} instead of {DIGEST}"
    path.write_bytes(b"short")
    assert list(store.check(folder))[1].detail == "has 5 bytes instead of 7"
    path.unlink()
    check = list(store.check(folder))[1]
    assert (check.path, check.ok) == (path, False)
    assert check.detail == "cannot be read: No such file or directory"
    assert list_models()[0].problem == f"{path.name} {check.detail}"


def test_a_file_that_cannot_be_read_is_a_finding(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = put(models / "a--b", GOOD)

    def refuse(path: Path) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(store, "sha256_of", refuse)
    assert {check.detail for check in store.check(folder)} == {"cannot be read: Permission denied"}


def test_no_store_yet_is_an_empty_list(models: Path) -> None:
    models.rmdir()
    assert list_models() == []


def test_a_copy_appears_in_one_step(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """cases: D2, W12 (feature 163)"""
    manifest = Manifest("a/b", "hub", "a/b", "0" * 40, {"model.safetensors": FileRecord(7, DIGEST)})
    folder = store.staging("a/b", "hub", "0" * 40)
    (folder / "model.safetensors").write_bytes(CONTENT)
    (folder / "config.json.part").write_bytes(b"left over")
    assert list_models() == []
    real = Path.rename

    def crash(self: Path, target: Path) -> Path:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "rename", crash)
    with pytest.raises(OSError, match="Input/output"):
        store.commit(folder, manifest)
    assert list_models() == []
    monkeypatch.setattr(Path, "rename", real)
    store.commit(folder, manifest)
    assert sorted(os.listdir(models / "a--b")) == ["manifest.json", "model.safetensors"]
    assert os.listdir(models / ".partial") == []
    (found,) = list_models()
    assert found.path == models / "a--b" / "model.safetensors"


def test_what_an_older_revision_left_behind_goes_away(models: Path) -> None:
    old = store.staging("a/b", "hub", "1" * 40)
    (old / "model.safetensors.part").write_bytes(b"half")
    new = store.staging("a/b", "hub", "0" * 40)
    assert list(new.iterdir()) == []
    (new / "model.safetensors").write_bytes(CONTENT)
    files = {"model.safetensors": FileRecord(7, DIGEST)}
    store.commit(new, Manifest("a/b", "hub", "a/b", "0" * 40, files))
    assert not old.exists()


def test_a_run_that_died_before_it_tidied_up_is_no_obstacle(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cases: D2"""
    files = {"model.safetensors": FileRecord(7, DIGEST)}

    def fetch(revision: str) -> None:
        folder = store.staging("a/b", "hub", revision)
        (folder / "model.safetensors").write_bytes(CONTENT)
        store.commit(folder, Manifest("a/b", "hub", "a/b", revision, files))

    def die(path: Path) -> None:
        raise KeyboardInterrupt

    fetch("0" * 40)
    with monkeypatch.context() as patch:
        patch.setattr(store.shutil, "rmtree", die)
        with pytest.raises(KeyboardInterrupt):
            fetch("1" * 40)
    assert os.listdir(models / ".partial" / "a--b") == ["replaced"]
    for revision in ("2" * 40, "3" * 40):
        fetch(revision)
        assert [model.revision for model in list_models()] == [revision]
        assert os.listdir(models / ".partial") == []
