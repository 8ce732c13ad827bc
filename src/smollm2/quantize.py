"""Quantized weights: the arrays of GGUF's quantized kinds, and their values in float32.

These decoders are the reference for every faster one. Layouts: ggml's ``block_*`` structs,
https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from smollm2.errors import InputError
from smollm2.formats.gguf import GROUPS
from smollm2.formats.tensorfile import DENSE_DTYPES, kind_of_dtype
from smollm2.packing import PACKABLE, WITHOUT_LOSS, Packed, fits_bf16, pack, row_bytes

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

_FLOATS = ("F64", "F32", "F16", "BF16")
_CHUNK = 2**17
"""Values decoded at a time: what is temporary stays in the second-level cache."""


@dataclass(frozen=True, eq=False, slots=True)
class Quantized:
    """A weight whose rows are stored in groups of one of the quantized kinds.

    ``shape`` has the row length last; ``data`` [rows, bytes a row] holds the groups as they lie
    in a file. Raises ``InputError`` where kind, shape and data do not fit each other.
    """

    kind: str
    shape: tuple[int, ...]
    data: Bytes = field(repr=False)

    def __post_init__(self) -> None:
        if self.kind not in GROUPS:
            raise InputError(f"unknown quantized kind {self.kind!r}: known are {', '.join(GROUPS)}")
        values, nbytes = GROUPS[self.kind]
        if not self.shape or self.shape[-1] % values:
            raise InputError(f"{self.kind} needs rows of a multiple of {values}: got {self.shape}")
        expected = (math.prod(self.shape[:-1]), self.shape[-1] // values * nbytes)
        if self.data.dtype != np.uint8 or self.data.shape != expected:
            raise InputError(
                f"{self.kind} {self.shape} needs bytes of shape {expected}: "
                f"got {self.data.dtype} {self.data.shape}"
            )

    @property
    def nbytes(self) -> int:
        """Bytes stored."""
        return self.data.nbytes

    @property
    def bits_per_weight(self) -> float:
        """Bits stored for each value, scales included."""
        values, nbytes = GROUPS[self.kind]
        return 8 * nbytes / values

    def take_rows(self, index: NDArray[np.integer[Any]]) -> Quantized:
        """The rows [*index, row length] of a matrix, still quantized."""
        if len(self.shape) != 2:
            raise InputError(f"rows are taken of a matrix, not of shape {self.shape}")
        flat = index.reshape(-1)
        if flat.size and not 0 <= flat.min() <= flat.max() < len(self.data):
            raise InputError(f"rows {flat.min()} to {flat.max()} of a matrix of {len(self.data)}")
        data = self.data[flat]
        return Quantized(self.kind, (*index.shape, self.shape[-1]), data)

    def dequantize(self) -> Floats:
        """All values, in ``shape``."""
        values, nbytes = GROUPS[self.kind]
        decode = _DECODERS[self.kind]
        groups = np.ascontiguousarray(self.data).reshape(-1, nbytes)
        out = np.empty((len(groups), values), dtype=np.float32)
        step = _CHUNK // values
        # A scale may be any float16: infinities and NaNs pass through as they are.
        with np.errstate(invalid="ignore", over="ignore"):
            for start in range(0, len(groups), step):
                decode(groups[start : start + step], out[start : start + step])
        return out.reshape(self.shape)


@dataclass(frozen=True, eq=False, slots=True)
class Scaled:
    """A matrix whose rows, columns or both are multiplied with factors whenever it is read.

    ``rows`` [R] and ``columns`` [C] are of the matrix [R, C]; ``importance`` [C] says how much an
    error in a column counts where the matrix is rounded.
    """

    base: Weight
    rows: Floats | None = field(default=None, repr=False)
    columns: Floats | None = field(default=None, repr=False)
    importance: Floats | None = field(default=None, repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and columns."""
        return self.base.shape

    @property
    def nbytes(self) -> int:
        """Bytes stored, factors not counted."""
        return self.base.nbytes

    def dequantize(self) -> Floats:
        """All values, in ``shape``."""
        values = as_float32(self.base)
        if self.columns is not None:
            values = values * self.columns
        return values if self.rows is None else values * self.rows[:, None]


Weight: TypeAlias = NDArray[Any] | Quantized | Packed | Scaled
"""A kind of weight: a dense array, a quantized one, one in the kernels' layout, a scaled one."""


def kind_of(weight: Weight) -> str:
    """The kind under which files know this weight: ``"BF16"``, ``"Q4_1"``, or ``"q4m"`` packed.

    Raises ``InputError`` for an array that no file holds.
    """
    if isinstance(weight, Quantized | Packed):
        return weight.kind
    if isinstance(weight, Scaled):
        return "F32"
    kind = kind_of_dtype(weight.dtype)
    if kind is None:
        raise InputError(f"a weight cannot be an array of {weight.dtype}")
    return kind


def as_float32(weight: Weight) -> Floats:
    """The weight's values as a contiguous float32 array; float32 comes back as it is.

    Raises ``InputError`` for arrays of integers, which are no weights by themselves.
    """
    if isinstance(weight, Quantized | Packed | Scaled):
        return weight.dequantize()
    if kind_of(weight) not in _FLOATS:
        raise InputError(f"a weight must be floating-point, not {weight.dtype}")
    if weight.dtype == np.float32:
        return weight
    return np.ascontiguousarray(weight, dtype=np.float32).reshape(weight.shape)


def as_dense(weight: Weight, kind: str) -> NDArray[Any]:
    """The weight's values as F32, BF16 or F16, rounded to nearest even; not copied if they are.

    Raises ``InputError`` for finite values that the kind has no room for.
    """
    dtype = DENSE_DTYPES[kind]
    if isinstance(weight, np.ndarray) and weight.dtype == dtype:
        return weight
    values = as_float32(weight)
    with np.errstate(over="ignore", invalid="ignore"):
        dense = values.astype(dtype, copy=False)
    if kind != "F32" and np.isinf(dense).sum() > np.isinf(values).sum():
        raise InputError(f"weights of up to {np.abs(values).max():.3g} are too large for {kind}")
    return dense


def kind_without_loss(weight: Weight) -> str | None:
    """The smallest packed kind that holds every value of a matrix exactly, None where none does.

    Dense values that are all bf16 are packed as such.
    """
    if isinstance(weight, Packed):
        return weight.kind
    if isinstance(weight, Quantized):
        return WITHOUT_LOSS.get(weight.kind)
    kind = kind_of(weight)
    if kind == "F64" or isinstance(weight, Scaled):
        return None
    return "bf16" if kind == "BF16" or fits_bf16(as_float32(weight)) else "f32"


def pack_weight(weight: Weight, kind: str, *, threads: int = 1) -> Packed:
    """A matrix in the kernels' layout: the numbers that are stored where ``kind`` holds them.

    Other values are rounded from float32. Raises ``InputError`` as ``packing.pack`` does.
    """
    if isinstance(weight, Packed):
        if weight.kind == kind:
            return weight
    elif isinstance(weight, Quantized):
        if WITHOUT_LOSS.get(weight.kind) == kind:
            return _packed(weight.data, weight.kind, weight.shape, kind, threads)
    elif not isinstance(weight, Scaled) and kind_of(weight) in PACKABLE:
        return _packed(row_bytes(weight), kind_of(weight), weight.shape, kind, threads)
    importance = weight.importance if isinstance(weight, Scaled) else None
    rows = row_bytes(as_float32(weight))
    return _packed(rows, "F32", weight.shape, kind, threads, importance)


def _packed(
    data: Bytes,
    row_kind: str,
    shape: tuple[int, ...],
    kind: str,
    threads: int,
    importance: Floats | None = None,
) -> Packed:
    packed = pack(data, row_kind, shape[-1], kind, threads=threads, importance=importance)
    return Packed.of_bytes(kind, shape, packed)


def _halves(raw: Bytes) -> Floats:
    """float16 bytes [n, 2] as float32 [n, 1]."""
    return np.ascontiguousarray(raw).view("<f2").astype(np.float32)


def _nibbles(raw: Bytes) -> Bytes:
    """The low four bits of [..., m] bytes, then the high ones: [..., 2, m]."""
    out = np.empty((*raw.shape[:-1], 2, raw.shape[-1]), dtype=np.uint8)
    np.bitwise_and(raw, 15, out=out[..., 0, :])
    np.right_shift(raw, 4, out=out[..., 1, :])
    return out


def _fifth_bits(raw: Bytes) -> Bytes:
    """Bit i of 32-bit words [n, 4], little-endian, as 16 times 0 or 1: [n, 32]."""
    bits = np.unpackbits(raw, axis=1, bitorder="little")
    bits <<= 4
    return bits


def _q4_0(groups: Bytes, out: Floats) -> None:
    """Value (q - 8) d. Stored: d f16, 32 nibbles q."""
    quants = _nibbles(groups[:, 2:]).reshape(out.shape).view(np.int8) - np.int8(8)
    np.multiply(quants, _halves(groups[:, :2]), out=out)


def _q4_1(groups: Bytes, out: Floats) -> None:
    """Value q d + m. Stored: d f16, m f16, 32 nibbles q."""
    out[...] = _nibbles(groups[:, 4:]).reshape(out.shape)
    out *= _halves(groups[:, :2])
    out += _halves(groups[:, 2:4])


def _q5_0(groups: Bytes, out: Floats) -> None:
    """Value (q - 16) d. Stored: d f16, 32 fifth bits of q, their 32 nibbles."""
    quants = _nibbles(groups[:, 6:]).reshape(out.shape) | _fifth_bits(groups[:, 2:6])
    np.multiply(quants.view(np.int8) - np.int8(16), _halves(groups[:, :2]), out=out)


def _q5_1(groups: Bytes, out: Floats) -> None:
    """Value q d + m. Stored: d f16, m f16, 32 fifth bits of q, their 32 nibbles."""
    out[...] = _nibbles(groups[:, 8:]).reshape(out.shape) | _fifth_bits(groups[:, 4:8])
    out *= _halves(groups[:, :2])
    out += _halves(groups[:, 2:4])


def _q8_0(groups: Bytes, out: Floats) -> None:
    """Value q d. Stored: d f16, 32 signed bytes q."""
    out[...] = groups[:, 2:].view(np.int8)
    out *= _halves(groups[:, :2])


def _scales_and_mins(groups: Bytes) -> tuple[Floats, Floats]:
    """What each eighth of a Q4_K or Q5_K group is multiplied by and lessened by, [n, 8, 1].

    Twelve bytes hold eight 6-bit scales and eight 6-bit minimums. The first four of each are
    the low six bits of bytes 0-3 and 4-7; the last four have their low four bits in the
    nibbles of bytes 8-11 and their high two in the top bits of bytes 0-3 and 4-7.
    """
    first, second, third = groups[:, 4:8], groups[:, 8:12], groups[:, 12:16]
    scales = np.hstack([first & 63, (third & 15) | (first >> 6 << 4)])
    mins = np.hstack([second & 63, (third >> 4) | (second >> 6 << 4)])
    return (
        (_halves(groups[:, :2]) * scales.astype(np.float32))[:, :, None],
        (_halves(groups[:, 2:4]) * mins.astype(np.float32))[:, :, None],
    )


def _q4_k(groups: Bytes, out: Floats) -> None:
    """Value q d s - dmin m, with a 6-bit s and m for each eighth of a group.

    Stored: d f16, dmin f16, 12 bytes of s and m, the nibbles q of four pairs of eighths.
    """
    scales, mins = _scales_and_mins(groups)
    eighths = out.reshape(-1, 8, 32)
    eighths[...] = _nibbles(groups[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    eighths *= scales
    eighths -= mins


def _q5_k(groups: Bytes, out: Floats) -> None:
    """Value as of Q4_K. Stored: the fifth bits of q come first, bit i of 32 bytes for eighth i."""
    scales, mins = _scales_and_mins(groups)
    fifths = (groups[:, 16:48].reshape(-1, 1, 32) >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    eighths = out.reshape(-1, 8, 32)
    eighths[...] = _nibbles(groups[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32) | (fifths << 4)
    eighths *= scales
    eighths -= mins


def _q6_k(groups: Bytes, out: Floats) -> None:
    """Value (q - 32) s d, with a signed byte s for each sixteenth of a group.

    Stored: the low four bits of q in 128 bytes, the high two in 64, 16 s, d f16. Each half of
    a group has 64 low, then 64 high nibbles, and 32 bytes of four bit pairs.
    """
    low = _nibbles(groups[:, :128].reshape(-1, 2, 64)).reshape(-1, 8, 32)
    pairs = groups[:, 128:192].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    quants = (low | ((pairs.reshape(-1, 8, 32) & 3) << 4)).view(np.int8) - np.int8(32)
    scales = _halves(groups[:, 208:]) * groups[:, 192:208].view(np.int8).astype(np.float32)
    np.multiply(quants.reshape(-1, 16, 16), scales[:, :, None], out=out.reshape(-1, 16, 16))


_DECODERS: Mapping[str, Callable[[Bytes, Floats], None]] = MappingProxyType(
    {
        "Q4_0": _q4_0,
        "Q4_1": _q4_1,
        "Q5_0": _q5_0,
        "Q5_1": _q5_1,
        "Q8_0": _q8_0,
        "Q4_K": _q4_k,
        "Q5_K": _q5_k,
        "Q6_K": _q6_k,
    }
)
