"""ggml's groups, made: of packed weights with their numbers, of dense rows as ggml rounds them.

Sources of the rounding: ``quantize_row_q8_0_ref``, ``quantize_row_q4_0_ref``,
``quantize_row_q4_1_ref`` in https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c, in
float32 step by step. What ``rounding`` does for the kernels finds better scales.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from smollm2.errors import InputError
from smollm2.formats.gguf import GROUPS
from smollm2.formats.smol import TILE_ROWS
from smollm2.packing import WITHOUT_LOSS, Packed, groups_of_tiles
from smollm2.quantize import Quantized

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


_GGML_KINDS = {packed: stored for stored, packed in WITHOUT_LOSS.items()}
_CHUNK = 2**20
"""Values that are unpacked at a time."""


def ggml_kind(packed: Packed) -> str | None:
    """The kind of groups that hold the very numbers of a packed matrix; None where none do."""
    kind = _GGML_KINDS.get(packed.kind)
    return None if kind is None or packed.shape[1] % GROUPS[kind][0] else kind


def repacked(packed: Packed, kind: str) -> Quantized:
    """A packed matrix as groups of its ``ggml_kind``: the inverse of packing those."""
    rows, cols = packed.shape
    count, nbytes = GROUPS[kind]
    data = np.empty((len(packed.data), TILE_ROWS, cols // count * nbytes), dtype=np.uint8)
    step = max(1, _CHUNK // cols // TILE_ROWS)
    for start in range(0, len(data), step):
        groups = groups_of_tiles(packed.data[start : start + step], packed.kind)
        halves = [groups.scale, groups.minimum][: 2 if kind == "Q4_1" else 1]
        scales = np.stack(halves, axis=1).astype("<f2", copy=False).view(np.uint8)
        q = groups.q.astype(np.int8).view(np.uint8)
        stored = np.hstack([scales, q if kind == "Q8_0" else _nibbles(q)])
        part = data[start : start + step]
        part[...] = stored.reshape(*part.shape[:2], -1)[..., : part.shape[2]]
    return Quantized(kind, packed.shape, data.reshape(-1, data.shape[2])[:rows])


def ggml_groups(values: Floats, kind: str) -> Bytes:
    """Round rows [rows, columns] to groups of one of ``GGML_ROUNDED``: [rows, bytes a row].

    Raises ``InputError`` for rows that are not whole groups, and for values that are not finite or
    so large that their scale is not.
    """
    count = GROUPS[kind][0]
    rows, cols = values.shape
    if cols % count:
        raise InputError(f"{kind} needs rows of a multiple of {count} values: got {cols}")
    if not np.isfinite(values).all():
        raise InputError(f"weights with NaN or infinity cannot be rounded to {kind}")
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        halves, stored = _ROUNDERS[kind](values.reshape(-1, count))
        scales = np.concatenate(halves, axis=1).astype("<f2")
    if not np.isfinite(scales).all():
        raise InputError(f"weights of up to {np.abs(values).max():.3g} are too large for {kind}")
    return np.concatenate([scales.view(np.uint8), stored], axis=1).reshape(rows, -1)


def _inverse(scale: Floats) -> Floats:
    """One over each scale; 0 where that is no number, and the stored scale will be 0 as well."""
    inverse = np.float32(1) / scale
    return np.where(np.isfinite(inverse), inverse, np.float32(0))


def _q8_0(groups: Floats) -> tuple[list[Floats], Bytes]:
    """Scale = largest magnitude / 127; q rounded, halves away from zero."""
    scale = np.abs(groups).max(axis=1, keepdims=True) / np.float32(127)
    exact = groups * _inverse(scale)
    magnitude = np.abs(exact)
    whole = np.floor(magnitude)
    whole += magnitude - whole >= np.float32(0.5)
    return [scale], np.copysign(whole, exact).astype(np.int8).view(np.uint8)


def _q4_0(groups: Floats) -> tuple[list[Floats], Bytes]:
    """Scale = the value of largest magnitude / -8, the first of equal ones; q from 0 to 15."""
    place = np.abs(groups).argmax(axis=1, keepdims=True)
    scale = np.take_along_axis(groups, place, axis=1) / np.float32(-8)
    return [scale], _cut(groups * _inverse(scale) + np.float32(8.5))


def _q4_1(groups: Floats) -> tuple[list[Floats], Bytes]:
    """Scale = (largest - smallest) / 15, minimum = the smallest; q from 0 to 15."""
    minimum = groups.min(axis=1, keepdims=True)
    scale = (groups.max(axis=1, keepdims=True) - minimum) / np.float32(15)
    return [scale, minimum], _cut((groups - minimum) * _inverse(scale) + np.float32(0.5))


def _cut(exact: Floats) -> Bytes:
    """Cut off fractions, to four bits."""
    return _nibbles(np.minimum(exact.astype(np.uint8), np.uint8(15)))


def _nibbles(q: Bytes) -> Bytes:
    """The low four bits of the bytes have the first half of a group, the high ones the rest."""
    half = q.shape[1] // 2
    packed: Bytes = q[:, :half] | q[:, half:] << np.uint8(4)
    return packed


_ROUNDERS: Mapping[str, Callable[[Floats], tuple[list[Floats], Bytes]]] = MappingProxyType(
    {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1}
)
GGML_ROUNDED = tuple(_ROUNDERS)
"""Kinds that dense rows can be rounded to."""
