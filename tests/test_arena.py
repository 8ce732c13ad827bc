"""Weights where they lie: what is packed stays in the file, and computes the same bits."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import numpy as np
import pytest

from smollm2.backends import native
from smollm2.backends.arena import Matrix, matrices_of
from smollm2.checkpoint import Checkpoint, load_checkpoint, state_of
from smollm2.errors import CheckpointError
from smollm2.export import export_smol
from smollm2.formats.smol import open_smol
from smollm2.kinds import packed_kinds
from smollm2.packing import Packed
from smollm2.quantize import Weight, pack_weight
from smollm2.smoothing import easier_to_round
from tests.backend_rules import IDS, full
from tests.tiny import random_weights, tiny_config, write_hf

QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def source(tmp_path: Path) -> Checkpoint:
    config = tiny_config()
    return load_checkpoint(write_hf(tmp_path / "hf", config, random_weights(config)))


def exported(source: Checkpoint, path: Path, *, stacked: bool = False) -> Checkpoint:
    export_smol(source, path, quant="q8", stacked=stacked)
    return load_checkpoint(path)


def named(checkpoint: Checkpoint) -> dict[str, Weight]:
    return dict(checkpoint.weights.items())


def matrices(checkpoint: Checkpoint, quant: str | None = None, *, mapped: bool) -> list[Matrix]:
    weights = named(checkpoint)
    return matrices_of(weights, packed_kinds(weights, quant), threads=1, mapped=mapped)


def lies_in(matrix: Matrix, weights: dict[str, Weight]) -> bool:
    return any(
        np.shares_memory(matrix.data, weight.data)
        for weight in weights.values()
        if isinstance(weight, Packed)
    )


def test_what_is_packed_stays_in_the_file(source: Checkpoint, tmp_path: Path) -> None:
    checkpoint = exported(source, tmp_path / "x.smol")
    weights = named(checkpoint)
    mapped = matrices(checkpoint, mapped=True)
    copied = matrices(checkpoint, mapped=False)
    assert [matrix[:3] for matrix in mapped] == [matrix[:3] for matrix in copied]
    for one, other in zip(mapped, copied, strict=True):
        assert lies_in(one, weights)
        assert not lies_in(other, weights)
        assert np.array_equal(one.data, other.data)
        assert one.data.ctypes.data % 64 == other.data.ctypes.data % 64 == 0
    assert not mapped[0].data.flags.writeable


def test_parts_of_a_stack_are_copied_where_they_are_strided(
    source: Checkpoint, tmp_path: Path
) -> None:
    checkpoint = exported(source, tmp_path / "x.smol", stacked=True)
    weights = named(checkpoint)
    for (name, weight), matrix in zip(
        ((name, weight) for name, weight in weights.items() if len(weight.shape) == 2),
        matrices(checkpoint, mapped=True),
        strict=True,
    ):
        assert isinstance(weight, Packed)
        whole = weight.data.flags.c_contiguous
        assert lies_in(matrix, weights) == whole, name
        assert whole != (".mlp.gate" in name or ".mlp.up" in name)
        assert np.array_equal(matrix.data, weight.data.reshape(-1))


def test_other_kinds_and_places_are_packed_anew(source: Checkpoint, tmp_path: Path) -> None:
    weights = named(exported(source, tmp_path / "x.smol"))
    odd = np.frombuffer(bytes(1) + weights[QUERY].data.tobytes(), dtype=np.uint8)[1:]
    if odd.ctypes.data % 64 == 0:
        odd = np.frombuffer(bytes(2) + weights[QUERY].data.tobytes(), dtype=np.uint8)[2:]
    unaligned = Packed.of_bytes("q8", weights[QUERY].shape, odd)
    (matrix,) = matrices_of({QUERY: unaligned}, {QUERY: "q8"}, threads=1, mapped=True)
    assert not np.shares_memory(matrix.data, odd)
    assert matrix.data.ctypes.data % 64 == 0
    assert np.array_equal(matrix.data, odd)
    (matrix,) = matrices_of(weights, {QUERY: "bf16"}, threads=1, mapped=True)
    assert np.array_equal(matrix.data, pack_weight(weights[QUERY], "bf16").data.reshape(-1))


def test_a_weight_that_cannot_be_packed_is_named(source: Checkpoint) -> None:
    weights = named(source)
    weights[QUERY] = np.full((64, 64), np.nan, dtype=np.float32)
    with pytest.raises(CheckpointError, match=rf"{QUERY}: weights with NaN or infinity"):
        matrices_of(weights, {QUERY: "q8"}, threads=1, mapped=True)


@pytest.mark.parametrize("stacked", [False, True])
def test_the_bits_do_not_depend_on_where_the_weights_lie(
    source: Checkpoint, tmp_path: Path, stacked: bool
) -> None:
    """design: one output's bits depend on its own inputs only"""
    checkpoint = exported(source, tmp_path / "x.smol", stacked=stacked)
    weights = easier_to_round(source, "q8")
    rounded = native.backend.load(source.config, weights, quant="q8", threads=1)
    expected = full(rounded, IDS)
    for mmap in (True, False):
        model = native.backend.load(checkpoint.config, checkpoint.weights, threads=1, mmap=mmap)
        assert np.array_equal(full(model, IDS), expected)


def test_the_file_stays_mapped_as_long_as_the_model_and_no_longer(
    source: Checkpoint, tmp_path: Path
) -> None:
    """cases: P9"""
    path = tmp_path / "x.smol"
    checkpoint = exported(source, path)
    model = native.backend.load(checkpoint.config, checkpoint.weights, threads=1)
    expected = full(model, IDS)
    names = set(state_of(checkpoint.weights))
    path.unlink()
    del checkpoint
    gc.collect()
    assert names
    assert np.array_equal(full(model, IDS), expected)
    assert str(path) in Path("/proc/self/maps").read_text(encoding="utf-8")
    model.close()
    gc.collect()
    assert str(path) not in Path("/proc/self/maps").read_text(encoding="utf-8")


def test_a_mapping_is_let_go_with_its_last_view(source: Checkpoint, tmp_path: Path) -> None:
    """cases: P9"""
    export_smol(source, tmp_path / "x.smol", quant="q8")
    file = open_smol(tmp_path / "x.smol")
    view = file.raw("model.norm.weight")
    owner = weakref.ref(file.data.base)
    del file
    assert owner() is not None
    del view
    assert owner() is None
