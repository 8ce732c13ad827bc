"""Rounding to ggml's groups: dense rows as Q8_0, Q4_0 and Q4_1, bit for bit as ggml rounds them.

Sources: ``quantize_row_q8_0_ref``, ``quantize_row_q4_0_ref`` and ``quantize_row_q4_1_ref`` in
https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c, in float32 step by step. What
``rounding`` does for the kernels finds better scales; this is for files of llama.cpp's own kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from smollm2.errors import InputError
from smollm2.formats.gguf import GROUPS

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


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
    return [scale], _nibbles(groups * _inverse(scale) + np.float32(8.5))


def _q4_1(groups: Floats) -> tuple[list[Floats], Bytes]:
    """Scale = (largest - smallest) / 15, minimum = the smallest; q from 0 to 15."""
    minimum = groups.min(axis=1, keepdims=True)
    scale = (groups.max(axis=1, keepdims=True) - minimum) / np.float32(15)
    return [scale, minimum], _nibbles((groups - minimum) * _inverse(scale) + np.float32(0.5))


def _nibbles(exact: Floats) -> Bytes:
    """Cut off fractions; the low four bits have the first half of a group, the high the rest."""
    q = np.minimum(exact.astype(np.uint8), np.uint8(15))
    half = q.shape[1] // 2
    packed: Bytes = q[:, :half] | q[:, half:] << np.uint8(4)
    return packed


_ROUNDERS: Mapping[str, Callable[[Floats], tuple[list[Floats], Bytes]]] = MappingProxyType(
    {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1}
)
GGML_ROUNDED = tuple(_ROUNDERS)
"""Kinds that dense rows can be rounded to."""
