"""Packed weights for tests: how to make them and what their values are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smollm2 import _native

FLOAT_KINDS = ("f32", "bf16", "q16")
INTEGER_KINDS = ("q8", "q4", "q4m")
KINDS = FLOAT_KINDS + INTEGER_KINDS
ISAS = tuple(_native.kernels.isa_names())

Floats = NDArray[np.float32]


def padded(cols: int) -> int:
    return -(-cols // 64) * 64


def row_data(values: NDArray[Any]) -> NDArray[np.uint8]:
    """A matrix as the bytes of its rows."""
    return np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1)


@dataclass(frozen=True)
class Packed:
    """A packed matrix and its values as float32."""

    kind: str
    rows: int
    cols: int
    data: NDArray[np.uint8]
    values: Floats


def pack(values: Floats, kind: str, **options: Any) -> Packed:
    rows, cols = values.shape
    data = _native.pack(row_data(values), "F32", cols, kind, **options)
    return Packed(kind, rows, cols, data, _native.unpack(data, kind, rows, cols))


def random_weights(rows: int, cols: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal((rows, cols), dtype=np.float32) * 0.05


def dequantized(rows: tuple[NDArray[Any], ...], cols: int) -> NDArray[np.float64]:
    """The values that quantized activations stand for."""
    q, scale, _ = rows
    groups = q.reshape(len(q), -1, 32).astype(np.float64) * scale[:, :, None].astype(np.float64)
    return groups.reshape(len(q), -1)[:, :cols]


def linear(
    isa: str,
    weights: Packed,
    activations: Any,
    m: int,
    *,
    out: Floats | None = None,
    **options: Any,
) -> Floats:
    """What a kernel gives for m rows: floats (padded here), or what quantize() returned."""
    if out is None:
        out = np.full((m, weights.rows), 7.5, dtype=np.float32)
    if weights.kind in INTEGER_KINDS:
        call, x = _native.kernels.linear_integer, activations
    else:
        x = np.zeros((m, padded(weights.cols)), dtype=np.float32)
        x[:, : weights.cols] = activations
        call = _native.kernels.linear_float
    call(isa, weights.data, weights.kind, weights.cols, x, out, **options)
    return out
