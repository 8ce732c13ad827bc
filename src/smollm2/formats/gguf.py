"""The GGUF format, versions 2 and 3: a strict and fast reader.

Layout, little-endian: ``GGUF``, u32 version, u64 tensor count, u64 metadata count, metadata
(key, u32 type, value), tensor infos (name, u32 number of dimensions, u64 dimensions with the
row length first, u32 ggml type, u64 offset), padding to ``general.alignment``, tensor data.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from struct import Struct
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from smollm2.errors import FormatError
from smollm2.formats.tensorfile import DENSE_DTYPES, TensorEntry, TensorFile, map_bytes

GROUPS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "Q4_0": (32, 18),
        "Q4_1": (32, 20),
        "Q5_0": (32, 22),
        "Q5_1": (32, 24),
        "Q8_0": (32, 34),
        "Q4_K": (256, 144),
        "Q5_K": (256, 176),
        "Q6_K": (256, 210),
    }
)
"""Quantized kinds: how many values a group has, and how many bytes."""

_TYPE_NAMES = (
    "F32 F16 Q4_0 Q4_1 - - Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K "
    "IQ2_XXS IQ2_XS IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M "
    "BF16 - - - TQ1_0 TQ2_0 - - - MXFP4 NVFP4 Q1_0"
)
GGML_TYPES: Mapping[int, str] = MappingProxyType(
    {number: name for number, name in enumerate(_TYPE_NAMES.split()) if name != "-"}
)
"""Names of ggml's tensor types by their number; numbers that ggml gave up are left out."""

_SUPPORTED = ("F32", "F16", "BF16", "F64", *GROUPS)
SCALARS: Mapping[int, np.dtype[Any]] = MappingProxyType(
    {
        0: np.dtype("u1"),
        1: np.dtype("i1"),
        2: np.dtype("<u2"),
        3: np.dtype("<i2"),
        4: np.dtype("<u4"),
        5: np.dtype("<i4"),
        6: np.dtype("<f4"),
        7: np.dtype("?"),
        10: np.dtype("<u8"),
        11: np.dtype("<i8"),
        12: np.dtype("<f8"),
    }
)
STRING, ARRAY = 8, 9
_KEY_LIMIT = 65_535
NAME_LIMIT = 64
MAX_DIMS = 4
_MIN_KEY_VALUE = 8 + 4 + 1
_MIN_TENSOR_INFO = 8 + 4 + 8 + 4 + 8
_U32 = Struct("<I")
_U64 = Struct("<Q")


def open_gguf(path: Path) -> TensorFile:
    """Map a file and check its metadata and where each tensor lies.

    Names are GGUF's. Shapes have the row length last, so they are ggml's dimensions reversed.
    Metadata are Python scalars, lists of strings, and NumPy arrays of numbers.

    Raises ``FormatError`` for anything that the format forbids, for big-endian files, and for
    tensors of a type that is not supported.
    """
    data = map_bytes(path)
    reader = _Reader(path, data)
    tensor_count, key_count = _preamble(reader)
    metadata = _metadata(reader, key_count)
    alignment = _alignment(reader, metadata)
    infos = _tensor_infos(reader, tensor_count)
    start = -(-reader.position // alignment) * alignment
    entries = [_entry(reader, info, start, alignment) for info in infos]
    _check_overlap(reader, entries)
    return TensorFile(
        path=path,
        format="gguf",
        metadata=MappingProxyType(metadata),
        entries=MappingProxyType({entry.name: entry for entry in entries}),
        data=data,
    )


class _Reader:
    """A cursor over the file's bytes that never reads or allocates beyond them."""

    def __init__(self, path: Path, data: NDArray[np.uint8]) -> None:
        self.path = path
        self.size = len(data)
        self.position = 0
        self._view = data.data

    def error(self, text: str) -> FormatError:
        return FormatError(f"{self.path}: {text}")

    def take(self, count: int, what: str) -> memoryview:
        """The next bytes, not copied."""
        end = self.position + count
        if end > self.size:
            raise self.error(f"the file ends inside {what}")
        taken = self._view[self.position : end]
        self.position = end
        return taken

    def count(self, item_size: int, what: str) -> int:
        """A u64 count of items that must fit the rest of the file."""
        count = self.u64(what)
        if count > (self.size - self.position) // item_size:
            raise self.error(f"{what} is {count}, more than the file can hold")
        return count

    def u32(self, what: str) -> int:
        value: int = _U32.unpack(self.take(4, what))[0]
        return value

    def u64(self, what: str) -> int:
        value: int = _U64.unpack(self.take(8, what))[0]
        return value

    def string(self, limit: int, what: str) -> str:
        """A u64 length of at most ``limit``, and UTF-8."""
        size = self.u64(what)
        if size > limit:
            raise self.error(f"{what} has {size} bytes, more than the limit {limit}")
        try:
            return str(self.take(size, what), "utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8: {error.reason}") from None

    def strings(self, count: int, what: str) -> list[str]:
        """Strings one after another: the loop that decides how long opening takes."""
        view, position, size = self._view, self.position, self.size
        unpack = _U64.unpack_from
        texts: list[str] = []
        try:
            for _ in range(count):
                start = position + 8
                if start > size:
                    break
                position = start + unpack(view, position)[0]
                if position > size:
                    break
                texts.append(str(view[start:position], "utf-8"))
        except UnicodeDecodeError as error:
            raise self.error(f"{what}, item {len(texts)}: not UTF-8: {error.reason}") from None
        if len(texts) < count:
            raise self.error(f"the file ends inside {what}")
        self.position = position
        return texts

    def numbers(self, dtype: np.dtype[Any], count: int, what: str) -> NDArray[Any]:
        """Numbers one after another, copied."""
        raw = np.frombuffer(self.take(count * dtype.itemsize, what), dtype=np.uint8)
        if dtype.kind == "b" and raw.size and raw.max() > 1:
            raise self.error(f"{what} has a bool that is neither 0 nor 1")
        return raw.view(dtype).copy()

    def value(self, type_id: int, what: str) -> Any:
        """A metadata value of this type."""
        if type_id == STRING:
            return self.string(self.size, what)
        if type_id == ARRAY:
            return self._array(what)
        if type_id not in SCALARS:
            raise self.error(f"{what} has the unknown type {type_id}")
        return self.numbers(SCALARS[type_id], 1, what).item()

    def _array(self, what: str) -> Any:
        type_id = self.u32(what)
        if type_id == STRING:
            return self.strings(self.count(8, f"the length of {what}"), what)
        if type_id not in SCALARS:
            fault = "nested arrays" if type_id == ARRAY else f"items of the unknown type {type_id}"
            raise self.error(f"{what} has {fault}")
        dtype = SCALARS[type_id]
        return self.numbers(dtype, self.count(dtype.itemsize, f"the length of {what}"), what)


def _preamble(reader: _Reader) -> tuple[int, int]:
    """Check magic and version; how many tensors and metadata keys there are."""
    if reader.size < 4 or reader.take(4, "the magic").tobytes() != b"GGUF":
        raise reader.error("not a GGUF file: it does not start with 'GGUF'")
    version = reader.u32("the version")
    if version not in (2, 3):
        if version != 0 and version & 0xFFFF == 0:
            raise reader.error("a big-endian GGUF file: convert it to little-endian")
        raise reader.error(f"GGUF version {version} is not supported: supported are 2 and 3")
    tensor_count = reader.count(_MIN_TENSOR_INFO, "the number of tensors")
    return tensor_count, reader.count(_MIN_KEY_VALUE, "the number of metadata keys")


def _metadata(reader: _Reader, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = reader.string(_KEY_LIMIT, "a metadata key")
        what = f"metadata {key!r:.80}"
        if key in metadata:
            raise reader.error(f"{what} appears twice")
        metadata[key] = reader.value(reader.u32(what), what)
    return metadata


def _alignment(reader: _Reader, metadata: Mapping[str, Any]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
        raise reader.error(
            f"general.alignment is {alignment!r:.80}: it must be a power of two from 8 on"
        )
    return alignment


class _TensorInfo(NamedTuple):
    """What the file says of a tensor: shape has the row length last, offset is in the data."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


def _tensor_infos(reader: _Reader, count: int) -> list[_TensorInfo]:
    infos: dict[str, _TensorInfo] = {}
    for _ in range(count):
        name = reader.string(NAME_LIMIT, "a tensor name")
        what = f"tensor {name!r}"
        if name in infos:
            raise reader.error(f"{what} appears twice")
        dims = reader.u32(what)
        if not 1 <= dims <= MAX_DIMS:
            raise reader.error(f"{what} has {dims} dimensions, not 1 to {MAX_DIMS}")
        shape = tuple(reader.u64(what) for _ in range(dims))[::-1]
        infos[name] = _TensorInfo(name, shape, reader.u32(what), reader.u64(what))
    return list(infos.values())


def _entry(reader: _Reader, info: _TensorInfo, start: int, alignment: int) -> TensorEntry:
    """Check one tensor against the file, whose tensor data begin at ``start``."""
    what, row = f"tensor {info.name!r}", info.shape[-1]
    kind = GGML_TYPES.get(info.type_id)
    if kind not in _SUPPORTED:
        raise reader.error(
            f"{what} has the type {kind or info.type_id}, which is not supported: "
            f"supported are {', '.join(_SUPPORTED)}"
        )
    if 0 in info.shape:
        raise reader.error(f"{what} has an empty dimension: {list(info.shape)}")
    values, nbytes = GROUPS.get(kind) or (1, DENSE_DTYPES[kind].itemsize)
    if row % values:
        raise reader.error(f"{what} is {kind} with rows of {row}, not a multiple of {values}")
    if info.offset % alignment:
        raise reader.error(f"{what} starts at {info.offset}, not a multiple of {alignment}")
    size = math.prod(info.shape) // values * nbytes
    end = start + info.offset + size
    if end > reader.size:
        raise reader.error(
            f"{what} ends at byte {end} of {reader.size}: the file is cut short or broken"
        )
    return TensorEntry(info.name, kind, info.shape, start + info.offset, size)


def _check_overlap(reader: _Reader, entries: list[TensorEntry]) -> None:
    position = 0
    for entry in sorted(entries, key=lambda entry: entry.offset):
        if entry.offset < position:
            raise reader.error(f"tensor {entry.name!r} overlaps the one before it")
        position = entry.offset + entry.nbytes
