"""Fetching from a hub: content, damage, broken connections."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from smollm2.errors import ChecksumError, DownloadError
from smollm2.registry import download
from smollm2.registry.download import Hub
from tests.fakehub import COMMIT, NEEDED, REPO, FakeHub, RecordedProgress, fake_hub

MODEL = "model.safetensors"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr(download, "_RETRY_DELAYS", (0.0, 0.0, 0.0))
    with fake_hub() as hub:
        yield hub


def fetch_all(fake: FakeHub, folder: Path, progress: RecordedProgress | None = None) -> None:
    hub = Hub(fake.endpoint)
    snapshot = hub.snapshot(REPO, COMMIT)
    for file in snapshot.files:
        hub.fetch(snapshot, file, folder, progress or RecordedProgress())


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_only_what_a_checkpoint_needs_is_fetched(fake: FakeHub, tmp_path: Path) -> None:
    """feature 49"""
    fetch_all(fake, tmp_path)
    assert contents(tmp_path) == NEEDED
    assert sorted(fake.served) == sorted(NEEDED)


def test_our_files_are_those_of_the_hub_library(
    fake: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import HfApi, constants, hf_hub_download

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    hub = Hub(fake.endpoint)
    snapshot = hub.snapshot(REPO, "main")
    info = HfApi(fake.endpoint).model_info(REPO, revision="main", files_metadata=True)
    listed = {entry.rfilename: entry for entry in info.siblings or []}
    assert snapshot.commit == info.sha
    for file in snapshot.files:
        entry = listed[file.name]
        assert file.size == entry.size
        assert file.sha256 == (entry.lfs.sha256 if entry.lfs else None)
        digest = hub.fetch(snapshot, file, ours, RecordedProgress())
        assert digest == hashlib.sha256(NEEDED[file.name]).hexdigest()
        hf_hub_download(
            REPO,
            file.name,
            revision=COMMIT,
            endpoint=fake.endpoint,
            local_dir=theirs,
            cache_dir=tmp_path / "cache",
        )
        assert (ours / file.name).read_bytes() == (theirs / file.name).read_bytes()


def test_shards_and_their_index_are_fetched(fake: FakeHub, tmp_path: Path) -> None:
    shards = {f"model-0000{n}-of-00002.safetensors": b"shard%d" % n for n in (1, 2)}
    fake.files = {"config.json": b"{}", "model.safetensors.index.json": b"{}", **shards}
    fetch_all(fake, tmp_path)
    assert contents(tmp_path) == fake.files


def test_an_empty_file_is_fetched(fake: FakeHub, tmp_path: Path) -> None:
    fake.files["chat_template.jinja"] = b""
    fetch_all(fake, tmp_path)
    assert contents(tmp_path) == NEEDED | {"chat_template.jinja": b""}


def test_the_token_goes_to_the_hub_and_not_to_other_hosts(fake: FakeHub, tmp_path: Path) -> None:
    """feature 163"""
    fetch_all(fake, tmp_path)
    for _, path, headers in fake.requests:
        sent = {key.lower(): value for key, value in headers.items()}.get("authorization")
        assert sent == (None if path.startswith("/cdn/") else "Bearer hf_secret"), path


@pytest.mark.parametrize("name", [MODEL, "config.json"])
def test_damage_is_noticed_and_fetched_again(fake: FakeHub, tmp_path: Path, name: str) -> None:
    """cases: D1"""
    fake.damage[name] = 1
    progress = RecordedProgress()
    fetch_all(fake, tmp_path, progress)
    assert contents(tmp_path) == NEEDED
    assert len(fake.gets(name)) == 2
    assert [note for note in progress.notes if name in note and "damaged" in note]


@pytest.mark.parametrize("name", [MODEL, "config.json"])
def test_damage_that_stays_is_an_error(fake: FakeHub, tmp_path: Path, name: str) -> None:
    """cases: D1, X7 (feature 112)"""
    fake.damage[name] = 99
    with pytest.raises(ChecksumError) as raised:
        fetch_all(fake, tmp_path)
    assert name in str(raised.value)
    assert fake.endpoint in str(raised.value)
    assert len(fake.gets(name)) == 2
    assert name not in contents(tmp_path)
    assert f"{name}.part" not in contents(tmp_path)


@pytest.mark.parametrize(("listed", "said"), [(999_999, "more than"), (1_000_002, "1000001 bytes")])
def test_another_size_than_listed_names_the_endpoint(
    fake: FakeHub, tmp_path: Path, listed: int, said: str
) -> None:
    """cases: D5"""
    lfs = {"sha256": hashlib.sha256(NEEDED[MODEL]).hexdigest(), "size": listed}
    fake.listed[MODEL] = {"size": listed, "lfs": lfs}
    with pytest.raises(ChecksumError, match=f"{MODEL} of .*{fake.endpoint} has .*{said}"):
        fetch_all(fake, tmp_path)
    assert MODEL not in contents(tmp_path)


def test_a_short_digest_accepts_nothing(fake: FakeHub, tmp_path: Path) -> None:
    """cases: X7"""
    size = len(NEEDED[MODEL])
    digest = hashlib.sha256(NEEDED[MODEL]).hexdigest()[:8]
    fake.listed[MODEL] = {"lfs": {"sha256": digest, "size": size}}
    with pytest.raises(ChecksumError):
        fetch_all(fake, tmp_path)


def test_a_cut_connection_is_continued(fake: FakeHub, tmp_path: Path) -> None:
    """cases: D2"""
    fake.cut[MODEL] = 6  # more than the attempts without any progress
    progress = RecordedProgress()
    fetch_all(fake, tmp_path, progress)
    assert contents(tmp_path) == NEEDED
    size = len(NEEDED[MODEL])
    assert fake.served[MODEL] == size
    assert [headers.get("Range") for headers in fake.gets(MODEL)][:2] == [
        None,
        f"bytes={size // 2}-",
    ]
    assert [file for file in progress.files if file[0] == MODEL][-1] == (MODEL, size, size)


def test_a_hub_without_ranges_starts_again(fake: FakeHub, tmp_path: Path) -> None:
    """cases: D2"""
    fake.cut[MODEL] = 1
    fake.ranges = False
    progress = RecordedProgress()
    fetch_all(fake, tmp_path, progress)
    assert contents(tmp_path) == NEEDED
    assert len(fake.gets(MODEL)) == 2
    assert progress.notes == []


def test_a_busy_hub_is_asked_again(fake: FakeHub, tmp_path: Path) -> None:
    fake.busy[MODEL] = 2
    fetch_all(fake, tmp_path)
    assert contents(tmp_path) == NEEDED


def test_a_hub_that_stays_busy_is_an_error_and_what_came_stays(
    fake: FakeHub, tmp_path: Path
) -> None:
    """cases: D2 (feature 163)"""
    hub = Hub(fake.endpoint)
    snapshot = hub.snapshot(REPO, COMMIT)
    model = next(file for file in snapshot.files if file.name == MODEL)
    part = tmp_path / f"{MODEL}.part"
    half = len(NEEDED[MODEL]) // 2
    part.write_bytes(NEEDED[MODEL][:half])
    fake.busy[MODEL] = 99
    with pytest.raises(DownloadError, match=f"broke off {MODEL} at {half} of .* to continue"):
        hub.fetch(snapshot, model, tmp_path, RecordedProgress())
    assert list(contents(tmp_path)) == [part.name]

    fake.busy.clear()
    fetch_all(fake, tmp_path)
    assert contents(tmp_path) == NEEDED
    assert fake.served[MODEL] == len(NEEDED[MODEL]) - half


def test_a_wrong_part_is_noticed_and_left(fake: FakeHub, tmp_path: Path) -> None:
    """cases: D2"""
    for junk in (b"x" * 1000, b"x" * len(NEEDED[MODEL]), b"x" * 2_000_000):
        (tmp_path / MODEL).unlink(missing_ok=True)
        (tmp_path / f"{MODEL}.part").write_bytes(junk)
        fetch_all(fake, tmp_path)
        assert contents(tmp_path) == NEEDED


def test_files_that_are_there_are_checked_and_kept(fake: FakeHub, tmp_path: Path) -> None:
    fetch_all(fake, tmp_path)
    (tmp_path / "config.json").write_bytes(NEEDED["config.json"][::-1])
    fake.served.clear()
    fetch_all(fake, tmp_path)
    assert contents(tmp_path) == NEEDED
    assert list(fake.served) == ["config.json"]


def test_a_file_that_vanishes_from_the_hub_is_an_error(fake: FakeHub, tmp_path: Path) -> None:
    hub = Hub(fake.endpoint)
    snapshot = hub.snapshot(REPO, COMMIT)
    del fake.files[MODEL]
    model = next(file for file in snapshot.files if file.name == MODEL)
    with pytest.raises(DownloadError, match="lost a file"):
        hub.fetch(snapshot, model, tmp_path, RecordedProgress())
