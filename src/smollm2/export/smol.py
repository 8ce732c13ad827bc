"""Exporting a checkpoint as one .smol file, which the native engine maps and uses as it lies."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from smollm2.checkpoint import Checkpoint, side_files, state_of
from smollm2.errors import CheckpointError, InputError
from smollm2.export.exported import Exported, Making, Progress, check_free, kind_sizes
from smollm2.extension import cores
from smollm2.formats.smol import (
    TILE_ROWS,
    Bytes,
    SmolTensor,
    tile_bytes,
    write_smol,
)
from smollm2.kinds import QUANTS, packed_kinds
from smollm2.quantize import as_float32, kind_of, kind_without_loss, pack_weight
from smollm2.smoothing import easier_to_round
from smollm2.stacks import Stack, stacks
from smollm2.state import State
from smollm2.tokenizer import COMPACT, compact_form


def export_smol(
    checkpoint: Checkpoint,
    path: Path | str,
    *,
    quant: str | None = None,
    stacked: bool = False,
    force: bool = False,
    calibration: str | None = None,
    progress: Progress | None = None,
    say: Callable[[str], object] = lambda _: None,
) -> Exported:
    """Write a .smol file, atomically; it is opened and verified before it gets its name.

    ``quant`` is one of ``QUANTS``; with the 4-bit ones, the embedding and the head are q8. Without
    it, each matrix is held without loss where that is possible, else as q8. Norms are float32.
    What is rounded to q8 or q4 is smoothed first, calibrated with the text ``calibration`` or, by
    default, with the package's own.
    ``say`` is told when that begins, ``progress`` of each tensor with its number and their count.
    ``stacked`` puts queries, keys and values, and gate and up, into one matrix each.

    Raises ``InputError`` for an unknown quant, a file that exists (unless ``force``), and weights
    to be quantized that are not finite, ``CheckpointError`` for weights that do not fit the
    config, and ``OSError``.
    """
    began = time.perf_counter()
    path = Path(path)
    if quant is not None and quant not in QUANTS:
        raise InputError(f"quant is {quant!r:.80}: it must be one of {', '.join(QUANTS)}")
    check_free(path, ".smol", force=force)
    remarks = () if quant is not None else _remarks(state_of(checkpoint.weights))
    checkpoint = replace(checkpoint, weights=easier_to_round(checkpoint, quant, calibration, say))
    plan = _Plan(checkpoint, quant, stacked=stacked)
    making = Making(checkpoint.path, len(plan.tensors), progress)

    def packed(tensor: SmolTensor) -> Bytes:
        with making.of(tensor):
            return plan.pack(tensor)

    write_smol(path, _sections(checkpoint), plan.tensors, packed)
    seconds = time.perf_counter() - began
    return Exported(path, path.stat().st_size, seconds, kind_sizes(plan.tensors), remarks)


def _sections(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Make the files of a folder beside its weights, and the compact form of the tokenizer."""
    files = side_files(checkpoint)
    declaration = files.get("tokenizer.json")
    form = compact_form(declaration) if declaration is not None else None
    return files if form is None else {**files, COMPACT: form}


def packed_size(checkpoint: Checkpoint, quant: str | None) -> int:
    """Return how many bytes the tensors of a .smol file take, without their padding."""
    return sum(tensor.nbytes for tensor in _Plan(checkpoint, quant, stacked=False).tensors)


class _Plan:
    """Which tensors a file gets, of which kinds, and how each is made."""

    def __init__(self, checkpoint: Checkpoint, quant: str | None, *, stacked: bool) -> None:
        self._weights = state_of(checkpoint.weights)
        shapes = {spec.name: spec.shape for spec in self._weights.descriptor}
        if shapes != checkpoint.config.shapes:
            raise CheckpointError("the weights have other names or shapes than the config asks for")
        matrices = packed_kinds(self._weights, quant)
        kinds = {name: matrices.get(name, "f32") for name in shapes}
        self._stacks: dict[str, Stack] = {}
        whole = {name: SmolTensor(name, kinds[name], shape) for name, shape in shapes.items()}
        for stack in stacks(shapes) if stacked else ():
            first, *others = (part.name for part in stack.parts)
            if all(kinds[name] == kinds[first] for name in others):
                self._stacks[stack.name] = stack
                whole[first] = SmolTensor(stack.name, kinds[first], stack.shape)
                for name in others:
                    del whole[name]
        self.tensors = tuple(whole.values())

    def pack(self, tensor: SmolTensor) -> Bytes:
        """The bytes of a tensor."""
        stack = self._stacks.get(tensor.name)
        if stack is None:
            return self._single(tensor.name, tensor.kind)
        rows, cols = stack.shape
        tiles = np.empty((rows // TILE_ROWS, tile_bytes(tensor.kind, cols)), dtype=np.uint8)
        for part in stack.parts:
            tiles[part.tiles] = self._single(part.name, tensor.kind)
        return tiles

    def _single(self, name: str, kind: str) -> Bytes:
        weight = self._weights[name]
        if len(weight.shape) == 1:
            return as_float32(weight).astype("<f4", copy=False).view(np.uint8)
        return pack_weight(weight, kind, threads=cores()).data


def _remarks(weights: State) -> tuple[str, ...]:
    """What is lost although no kind was asked for."""
    lossy = Counter(
        (kind_of(weights[name]), kind)
        for name, kind in packed_kinds(weights, None).items()
        if kind_without_loss(weights[name]) is None
    )
    return tuple(
        f"{count} tensors of {source} are rounded to {kind}: no kind holds {source} without loss"
        for (source, kind), count in lossy.items()
    )
