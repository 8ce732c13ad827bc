"""Packed weights: matrices in the kernels' layout of tiles, made and read.

``native/kernels/kernels.h`` describes the layout. What is here in NumPy is the reference for the
extension's ``pack`` and ``unpack``, has their signatures, and stands in where it is missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smollm2.errors import InputError
from smollm2.extension import compiled
from smollm2.formats.gguf import GROUPS as GGUF_GROUPS
from smollm2.formats.smol import BLOCK, BLOCK_BYTES, TILE_ROWS, packed_bytes, tile_bytes
from smollm2.formats.tensorfile import DENSE_DTYPES
from smollm2.rounding import GROUP, Groups, round_groups

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
RowOrder = NDArray[np.int32]

WITHOUT_LOSS: Mapping[str, str] = MappingProxyType({"Q8_0": "q8", "Q4_0": "q4", "Q4_1": "q4m"})
"""GGUF's kinds of groups, and the packed kind that holds their very numbers."""

PACKABLE = ("F32", "F16", "BF16")
"""Kinds of dense rows that can be packed as they are."""

_LINES = {kind: nbytes // 64 for kind, nbytes in BLOCK_BYTES.items()}
_CHUNK = 2**20
"""Values that are packed or unpacked at a time."""


@dataclass(frozen=True, eq=False, slots=True)
class Packed:
    """A matrix of a packed kind; ``data`` is [tiles, bytes a tile], a view where it can be.

    Raises ``InputError`` where kind, shape and data do not fit each other.
    """

    kind: str
    shape: tuple[int, ...]
    data: Bytes = field(repr=False)

    def __post_init__(self) -> None:
        if self.kind not in BLOCK_BYTES or len(self.shape) != 2:
            raise InputError(
                f"a packed matrix is one of {', '.join(BLOCK_BYTES)} and has two dimensions: "
                f"got {self.kind!r:.80} {self.shape}"
            )
        rows, cols = self.shape
        expected = (-(-rows // TILE_ROWS), tile_bytes(self.kind, cols))
        if self.data.dtype != np.uint8 or self.data.shape != expected:
            raise InputError(
                f"{self.kind} {self.shape} needs bytes of shape {expected}: "
                f"got {self.data.dtype} {self.data.shape}"
            )

    @classmethod
    def of_bytes(cls, kind: str, shape: tuple[int, ...], raw: Bytes) -> Packed:
        """Take the bytes of a whole matrix as they lie in a file."""
        return cls(kind, shape, raw.reshape(-(-shape[0] // TILE_ROWS), -1))

    @property
    def nbytes(self) -> int:
        """Bytes stored, padding included."""
        return self.data.nbytes

    @property
    def bits_per_weight(self) -> float:
        """Bits stored for each value, scales and padding included."""
        rows, cols = self.shape
        return 8 * self.nbytes / (rows * cols)

    def dequantize(self) -> Floats:
        """All values, in ``shape``."""
        rows, cols = self.shape
        return unpack(np.ascontiguousarray(self.data).reshape(-1), self.kind, rows, cols)


def pack(
    data: Bytes,
    row_kind: str,
    cols: int,
    kind: str,
    row_order: RowOrder | None = None,
    threads: int = 1,
    importance: Floats | None = None,
) -> Bytes:
    """Pack rows of bytes [rows, bytes a row] of one of GGUF's kinds as tiles of ``kind``.

    Row i of the result is row ``row_order[i]`` of the data, zeros where that is -1. Dense rows go
    to every kind: f32 exactly, bf16 to nearest even, the others as ``round_groups`` says. Groups
    go to the kind of ``WITHOUT_LOSS`` and to f32. ``threads`` is for the extension. ``importance``
    [cols] says how much a rounding error in a column counts.

    Raises ``InputError`` where kinds and shapes do not fit, and for NaN or infinity in weights
    that are to be quantized.
    """
    native = compiled("pack")
    if native is None:
        return pack_reference(data, row_kind, cols, kind, row_order, importance)
    try:
        packed: Bytes = native(data, row_kind, cols, kind, row_order, threads, importance)
    except ValueError as error:
        raise InputError(str(error)) from None
    return packed


def unpack(packed: Bytes, kind: str, rows: int, cols: int) -> Floats:
    """Return a packed matrix as float32 [rows, cols]."""
    native = compiled("unpack")
    if native is None:
        return unpack_reference(packed, kind, rows, cols)
    values: Floats = native(packed, kind, rows, cols)
    return values


def pack_reference(
    data: Bytes,
    row_kind: str,
    cols: int,
    kind: str,
    row_order: RowOrder | None = None,
    importance: Floats | None = None,
) -> Bytes:
    """Do what ``pack`` does, in NumPy."""
    _check_rows(data, row_kind, cols, kind)
    counts = _importance(importance, cols)
    order = np.arange(len(data), dtype=np.int32) if row_order is None else row_order
    if order.size == 0 or order.min() < -1 or order.max() >= len(data):
        raise InputError(f"rows {order} of a matrix of {len(data)} rows cannot be packed")
    step = max(1, _CHUNK // max(cols, 1) // TILE_ROWS) * TILE_ROWS
    parts = [
        _pack_tiles(data, row_kind, cols, kind, order[start : start + step], counts)
        for start in range(0, len(order), step)
    ]
    return np.concatenate([part.reshape(-1) for part in parts])


def unpack_reference(packed: Bytes, kind: str, rows: int, cols: int) -> Floats:
    """Do what ``unpack`` does, in NumPy."""
    if packed.size != packed_bytes(kind, (rows, cols)):
        raise InputError(f"{kind} {rows} x {cols} has other than {packed.size} bytes")
    out = np.empty((rows, cols), dtype=np.float32)
    tiles = packed.reshape(-(-rows // TILE_ROWS), -1)
    step = max(1, _CHUNK // max(cols, 1) // TILE_ROWS)
    with np.errstate(all="ignore"):
        for start in range(0, len(tiles), step):
            values = _unpack_tiles(tiles[start : start + step], kind)
            first = start * TILE_ROWS
            part = out[first : first + len(values)]
            part[...] = values[: len(part), :cols]
    return out


def fits_bf16(values: Floats) -> bool:
    """Whether every value is a bf16."""
    return not np.any(np.ascontiguousarray(values).view(np.uint32) & 0xFFFF)


def row_bytes(values: NDArray[Any]) -> Bytes:
    """Return a dense matrix as the bytes of its rows, little-endian."""
    array = np.ascontiguousarray(values)
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return array.view(np.uint8).reshape(len(array), -1)


def _check_rows(data: Bytes, row_kind: str, cols: int, kind: str) -> None:
    if kind not in BLOCK_BYTES:
        raise InputError(f"unknown kind {kind!r:.80}: choose from {', '.join(BLOCK_BYTES)}")
    if row_kind not in PACKABLE and row_kind not in WITHOUT_LOSS:
        known = ", ".join((*PACKABLE, *WITHOUT_LOSS))
        raise InputError(f"cannot pack rows of {row_kind}: choose from {known}")
    if row_kind in WITHOUT_LOSS and kind not in ("f32", WITHOUT_LOSS[row_kind]):
        raise InputError(f"{row_kind} is not held without loss by {kind}: decode it first")
    values, nbytes = GGUF_GROUPS.get(row_kind) or (1, DENSE_DTYPES[row_kind].itemsize)
    if cols < 1 or cols % values or data.ndim != 2 or data.shape[1] != cols // values * nbytes:
        raise InputError(f"rows of {cols} values in {row_kind} cannot have shape {data.shape}")


def _importance(given: Floats | None, cols: int) -> Floats:
    """Return how much an error counts in each column of whole blocks; ones beyond the matrix."""
    counts = np.ones(-(-cols // BLOCK) * BLOCK, dtype=np.float32)
    if given is not None:
        if given.shape != (cols,) or not (np.isfinite(given).all() and given.min() >= 0):
            raise InputError(f"importance must be {cols} finite numbers of at least 0")
        counts[:cols] = given
    return counts


def _pack_tiles(
    data: Bytes, row_kind: str, cols: int, kind: str, order: RowOrder, counts: Floats
) -> Bytes:
    """Pack some whole tiles: [tiles, bytes a tile]."""
    rows, width = -(-len(order) // TILE_ROWS) * TILE_ROWS, -(-cols // BLOCK) * BLOCK
    source = np.zeros((rows, data.shape[1]), dtype=np.uint8)
    known = np.flatnonzero(order >= 0)
    source[known] = data[order[known]]
    if row_kind in WITHOUT_LOSS and kind != "f32":
        groups = _stored_groups(source, row_kind)
        empty = np.ones(rows, dtype=bool)
        empty[known] = False
        return _place(_padded(groups, rows, width, kind, empty), kind, rows)
    values = np.zeros((rows, width), dtype=np.float32)
    if row_kind in WITHOUT_LOSS:
        values[:, :cols] = (
            _stored_groups(source, row_kind).values(WITHOUT_LOSS[row_kind]).reshape(rows, cols)
        )
        values[order.size :] = 0
        values[: order.size][order < 0] = 0
    else:
        values[:, :cols] = source.view(DENSE_DTYPES[row_kind])
    if kind in ("f32", "bf16"):
        return _place_floats(values, kind)
    if not np.isfinite(values).all():
        raise InputError(
            f"weights with NaN or infinity cannot be packed as {kind}: pack them as f32 or bf16"
        )
    repeated = np.tile(counts.reshape(-1, GROUP), (rows, 1))
    return _place(round_groups(values.reshape(-1, GROUP), kind, repeated), kind, rows)


def _stored_groups(source: Bytes, row_kind: str) -> Groups:
    """Take rows of ggml's blocks apart: half floats first, then the q."""
    raw = source.reshape(-1, GGUF_GROUPS[row_kind][1])
    halves = 2 if row_kind == "Q4_1" else 1
    scales = np.ascontiguousarray(raw[:, : 2 * halves]).view("<f2")
    stored = raw[:, 2 * halves :]
    if row_kind == "Q8_0":
        q = stored.view(np.int8).astype(np.int16)
    else:
        q = np.concatenate([stored & 15, stored >> 4], axis=1).astype(np.int16)
    minimum = scales[:, 1] if halves == 2 else np.zeros(len(raw), dtype=np.float16)
    return Groups(q, scales[:, 0], minimum)


def _padded(groups: Groups, rows: int, width: int, kind: str, empty: NDArray[np.bool_]) -> Groups:
    """Groups of whole blocks: those beyond the matrix, and of empty rows, stand for zeros."""
    count = len(groups.q) // rows
    q = np.full((rows, width // GROUP, GROUP), 8 if kind == "q4" else 0, dtype=np.int16)
    scale = np.zeros((rows, width // GROUP), dtype=np.float16)
    minimum = np.zeros_like(scale)
    q[~empty, :count] = groups.q.reshape(rows, count, GROUP)[~empty]
    scale[~empty, :count] = groups.scale.reshape(rows, count)[~empty]
    minimum[~empty, :count] = groups.minimum.reshape(rows, count)[~empty]
    return Groups(q.reshape(-1, GROUP), scale.reshape(-1), minimum.reshape(-1))


def _place_floats(values: Floats, kind: str) -> Bytes:
    rows, width = values.shape
    blocks = values.reshape(rows // TILE_ROWS, TILE_ROWS, width // BLOCK, BLOCK)
    if kind == "f32":
        lines = blocks.transpose(0, 2, 3, 1)
    else:
        with np.errstate(invalid="ignore", over="ignore"):
            pairs = blocks.astype(DENSE_DTYPES["BF16"]).reshape(*blocks.shape[:3], BLOCK // 2, 2)
        lines = pairs.transpose(0, 2, 3, 1, 4)
    return np.ascontiguousarray(lines).view(np.uint8).reshape(rows // TILE_ROWS, -1)


def _place(groups: Groups, kind: str, rows: int) -> Bytes:
    """Lay groups out as the lines of blocks."""
    tiles = rows // TILE_ROWS
    q = groups.q.reshape(tiles, TILE_ROWS, -1, BLOCK)
    count = q.shape[2]
    out = np.empty((tiles, count, _LINES[kind], 64), dtype=np.uint8)
    if kind == "q16":
        out[:, :, :32] = _lines(q.transpose(0, 2, 3, 1))
    else:
        stored = (q + (128 if kind == "q8" else 0)).astype(np.uint8)
        quads = stored.reshape(tiles, TILE_ROWS, count, 16, 4).transpose(0, 2, 3, 1, 4)
        if kind == "q8":
            out[:, :, :16] = _lines(quads)
        else:
            out[:, :, :8] = _lines(quads[:, :, 0::2] | quads[:, :, 1::2] << 4)
    first = {"q16": 32, "q8": 16}.get(kind, 8)
    for line, halves in enumerate((groups.scale, groups.minimum)[: _LINES[kind] - first], first):
        pairs = halves.reshape(tiles, TILE_ROWS, count, 2).transpose(0, 2, 3, 1)
        out[:, :, line : line + 1] = _lines(pairs)
    return out.reshape(tiles, -1)


def _lines(values: NDArray[Any]) -> Bytes:
    """Return [tiles, blocks, …] as lines of 64 bytes: [tiles, blocks, lines, 64]."""
    raw = np.ascontiguousarray(values).view(np.uint8)
    return raw.reshape(*values.shape[:2], -1, 64)


def _unpack_tiles(tiles: Bytes, kind: str) -> Floats:
    """Return the values of some whole tiles, [16 · tiles, padded columns]."""
    count = len(tiles)
    if kind not in ("f32", "bf16"):
        return groups_of_tiles(tiles, kind).values(kind).reshape(count * TILE_ROWS, -1)
    lines = np.ascontiguousarray(tiles).reshape(count, -1, _LINES[kind], 64)
    if kind == "f32":
        return _rows(lines.view("<f4"))
    pairs = lines.view(DENSE_DTYPES["BF16"]).reshape(count, -1, BLOCK // 2, TILE_ROWS, 2)
    return _rows(pairs.swapaxes(3, 4).astype(np.float32))


def groups_of_tiles(tiles: Bytes, kind: str) -> Groups:
    """Return the groups of some whole tiles, row by row, those of padding included."""
    count = len(tiles)
    lines = np.ascontiguousarray(tiles).reshape(count, -1, _LINES[kind], 64)
    first = {"q16": 32, "q8": 16}.get(kind, 8)
    if kind == "q16":
        q = _rows(np.ascontiguousarray(lines[:, :, :first]).view("<i2"))
    else:
        stored = lines[:, :, :first]
        if kind != "q8":
            stored = np.stack([stored & 15, stored >> 4], axis=3)
        quads = stored.reshape(count, -1, 16, TILE_ROWS, 4).swapaxes(3, 4)
        q = _rows(quads.astype(np.int16) - (128 if kind == "q8" else 0))

    def halves(line: int) -> NDArray[np.float16]:
        pairs = np.ascontiguousarray(lines[:, :, line]).view("<f2").reshape(count, -1, 2, TILE_ROWS)
        return np.ascontiguousarray(pairs.transpose(0, 3, 1, 2)).reshape(-1)

    scale = halves(first)
    minimum = halves(first + 1) if kind == "q4m" else np.zeros_like(scale)
    return Groups(q.reshape(-1, GROUP).astype(np.int16), scale, minimum)


def _rows(values: NDArray[Any]) -> NDArray[Any]:
    """Return [tiles, blocks, …, 16 rows], columns in order, as [16 · tiles, padded columns]."""
    count, blocks = values.shape[:2]
    by_row = values.reshape(count, blocks, BLOCK, TILE_ROWS).transpose(0, 3, 1, 2)
    return np.ascontiguousarray(by_row).reshape(count * TILE_ROWS, -1)
