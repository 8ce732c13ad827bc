"""Checking a model on a hub by its headers, against ``load_checkpoint`` of the same files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

from smollm2.checkpoint import load_checkpoint
from smollm2.cli import main
from smollm2.errors import (
    CheckpointError,
    ConfigError,
    DownloadError,
    FormatError,
    OfflineError,
    SmolLM2Error,
)
from smollm2.export import save_checkpoint
from smollm2.registry import remote
from smollm2.registry.remote import check_hub
from tests.cli_session import write_model
from tests.fakehub import COMMIT, REPO, FakeHub, fake_hub

WEIGHTS = "model.safetensors"
Change = Callable[[dict[str, bytes]], object]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("remote") / "model")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def hub(model: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub that has the model, and an empty store."""
    with fake_hub() as hub:
        hub.files = {**contents(model), "README.md": b"# other"}
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        yield hub


def test_of_weights_only_the_headers_are_fetched(hub: FakeHub, store: Path) -> None:
    """Feature row 110; nothing comes into the store, whatever size the first request has."""
    header = 8 + int.from_bytes(hub.files[WEIGHTS][:8], "little")
    for first, requests in ((2**18, 1), (100, 2), (header, 1)):
        hub.served.clear()
        hub.requests.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(remote, "_FIRST", first)
            snapshot = check_hub(REPO)
        assert (snapshot.repo, snapshot.commit) == (REPO, COMMIT)
        assert {file.name for file in snapshot.files} == {*hub.files} - {"README.md"}
        assert len(hub.gets(WEIGHTS)) == requests
        assert hub.served[WEIGHTS] <= max(first, first % header + header)
    assert not store.exists()


def test_a_hub_that_sends_all_or_shards(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    hub.ranges = False
    check_hub(REPO)
    save_checkpoint(load_checkpoint(model), tmp_path / "shards", max_shard_size=40_000)
    hub.files = contents(tmp_path / "shards")
    assert len(check_hub(REPO).files) > 5


def without(name: str) -> Change:
    return lambda files: files.update({WEIGHTS: save(changed(files, {name: None}))})


def changed(files: dict[str, bytes], changes: dict[str, Any]) -> dict[str, Any]:
    tensors = {**load(files[WEIGHTS]), **changes}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def replaced(name: str, tensor: Any) -> Change:
    return lambda files: files.update({WEIGHTS: save(changed(files, {name: tensor}))})


def config(**changes: Any) -> Change:
    def change(files: dict[str, bytes]) -> None:
        files["config.json"] = json.dumps({**json.loads(files["config.json"]), **changes}).encode()

    return change


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (without(NORM), CheckpointError, f"missing: {NORM}"),
        (replaced(NORM, np.ones(3, np.float32)), CheckpointError, r"expected \[64\], got \[3\]"),
        (replaced(NORM, np.ones(64, np.float16)), CheckpointError, "expected F32, got F16"),
        (replaced("x", np.ones(3, np.float32)), CheckpointError, "unexpected: x"),
        (config(num_hidden_layers=3), CheckpointError, r"missing: model\.layers\.2\."),
        (config(model_type="gpt2"), ConfigError, "model_type"),
        (lambda files: files.update({WEIGHTS: files[WEIGHTS][:-1]}), FormatError, "cut short"),
        (lambda files: files.update({WEIGHTS: b"\xff" * 300}), FormatError, "does not fit a file"),
        (lambda files: files.update({WEIGHTS: b"\x09"}), FormatError, "does not fit a file"),
        (lambda files: files.update({"tokenizer.json": b"{"}), FormatError, "not JSON"),
    ],
)
def test_what_does_not_fit_is_told_as_of_a_folder(
    hub: FakeHub, tmp_path: Path, change: Change, error: type[SmolLM2Error], message: str
) -> None:
    """The very words, bar the place; feature row 110: wrong shape, dtype, missing tensor."""
    change(hub.files)
    with pytest.raises(error, match=message) as caught:
        check_hub(REPO)
    folder = tmp_path / "same"
    folder.mkdir()
    for name, content in hub.files.items():
        (folder / name).write_bytes(content)
    with pytest.raises(error) as expected:
        load_checkpoint(folder)
    assert str(caught.value) == str(expected.value).replace(str(folder), f"{REPO}@{COMMIT}")


def test_connections_that_break(hub: FakeHub) -> None:
    hub.cut[WEIGHTS] = 1
    with pytest.raises(DownloadError, match=rf"broke off {WEIGHTS} at \d+ of \d+ bytes .*: try ag"):
        check_hub(REPO)
    hub.busy[WEIGHTS] = 1
    with pytest.raises(DownloadError, match=r"at 0 of \d+ bytes \(HTTP status 503\): try again"):
        check_hub(REPO)
    with pytest.raises(OfflineError, match="the network is switched off"):
        check_hub(REPO, offline=True)


def test_the_command(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", REPO, "--hub"]) == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert ["ok", WEIGHTS, f"{len(hub.files[WEIGHTS]) / 1000:.1f} kB"] in rows
    assert main(["verify", REPO, "--hub", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert {value["detail"] for value in values} == {f"fits {REPO}@{COMMIT}"}
    config(num_hidden_layers=3)(hub.files)
    assert main(["verify", REPO, "--hub"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {REPO}@{COMMIT}: missing: model.layers.2.input_layernorm")
    assert err.count("\n") == 1
