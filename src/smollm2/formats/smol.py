"""The .smol format, version 3: sections of text and tensors in the kernels' layout, in one file.

Layout, little-endian: ``SMOL``, u32 version, u64 length of the header, the header, then sections
and tensors. The header is JSON::

    {"sections": {name: {"offset", "length", "checksum"}},
     "tensors": {name: {"kind", "shape", "offset", "length", "checksum"}}}

padded with spaces. All items follow each other in the header's order, each at the next multiple of
64 bytes, and the last ends the file; so a file has one form, without hidden bytes or overlaps.
Sections are the files of a Hugging Face folder beside its weights, byte for byte, and a form of its
tokenizer.json that is read faster (``tokenizer/compact.py``). A tensor of one dimension is ``f32``,
plain floats; one of two is packed as ``native/kernels/kernels.h`` describes: tiles of 16 rows,
blocks of 64 columns, so that mapping the file is all there is to load.

A checksum is the CRC-32 of an item's bytes, as eight hexadecimal digits: it is there against
damage, not against people, it is in every language's library, and zlib computes it four times
faster than BLAKE2b.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from smollm2.errors import FormatError, InputError
from smollm2.files import atomic_write, parse_json
from smollm2.formats.tensorfile import TensorEntry, TensorFile, map_bytes

Bytes = NDArray[np.uint8]

MAGIC, VERSION = b"SMOL", 3
TILE_ROWS, BLOCK = 16, 64
"""Rows of a tile, and columns of a block of it."""

BLOCK_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "f32": 64 * 64,
        "bf16": 32 * 64,
        "q16": 33 * 64,
        "q8": 17 * 64,
        "q4": 9 * 64,
        "q4m": 10 * 64,
    }
)
"""Kinds of packed matrices: how many bytes a block of a tile has."""

SECTIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.compact.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)

_ALIGNMENT = 64
_PREFIX = 16
_HEADER_LIMIT = 100_000_000
_DIM_LIMIT = 2**31 - 1
_NAME_LIMIT = 256
_NO_CHECKSUM = "00000000"
_PIECE = 2**21


class SmolTensor(NamedTuple):
    """A tensor that is to be written: ``shape`` is [rows, columns], or [length] of a vector."""

    name: str
    kind: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return packed_bytes(self.kind, self.shape)


class _Item(NamedTuple):
    """Where the header says that a section or tensor lies."""

    what: str
    offset: int
    length: int
    checksum: str


def tile_bytes(kind: str, cols: int) -> int:
    """Bytes of one tile of 16 rows."""
    return -(-cols // BLOCK) * BLOCK_BYTES[kind]


def packed_bytes(kind: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor: a packed matrix [rows, columns], or a plain vector of ``f32``."""
    if len(shape) == 1:
        return 4 * shape[0]
    rows, cols = shape
    return -(-rows // TILE_ROWS) * tile_bytes(kind, cols)


def open_smol(path: Path, *, verify: bool = False) -> TensorFile:
    """Map a file, check all of its structure and its sections; tensors are not touched.

    ``metadata`` has the sections as ``bytes``. A vector's kind is ``F32``, as of any dense array;
    a packed matrix's is that of the file, in lower case. ``verify`` reads all tensors as well and
    compares their checksums.

    Raises ``FormatError`` for anything that the format forbids, and names what is damaged.
    """
    data = map_bytes(path)
    header, start = _header(path, data)
    items = [_item(path, "section", name, value) for name, value in header["sections"].items()]
    entries: dict[str, TensorEntry] = {}
    for name, value in header["tensors"].items():
        entries[name], item = _tensor(path, name, value)
        items.append(item)
    _check_places(path, items, start, len(data))
    count = len(header["sections"])
    for item in items if verify else items[:count]:
        part = data[item.offset : item.offset + item.length]
        if _checksum(part) != item.checksum:
            raise FormatError(f"{path}: {item.what} is damaged: its checksum does not match")
    texts = {
        name: data[item.offset : item.offset + item.length].tobytes()
        for name, item in zip(header["sections"], items, strict=False)
    }
    return TensorFile(path, "smol", MappingProxyType(texts), MappingProxyType(entries), data)


def write_smol(
    path: Path,
    sections: Mapping[str, bytes],
    tensors: Sequence[SmolTensor],
    packed: Callable[[SmolTensor], Bytes],
) -> None:
    """Write a file, atomically, asking ``packed`` for the bytes of one tensor at a time.

    The file is opened again and verified before it gets its name.

    Raises ``InputError`` for what the format cannot hold, ``FormatError`` where what was written
    cannot be read, and ``OSError``.
    """
    header = _Layout(sections, tensors)
    with atomic_write(path) as file:
        items = _Items(file, header.encoded())
        for name, text in sections.items():
            header.fill("sections", name, items.write(np.frombuffer(text, dtype=np.uint8)))
        for tensor in tensors:
            raw = packed(tensor)
            if raw.dtype != np.uint8 or raw.size != tensor.nbytes:
                raise InputError(
                    f"tensor {tensor.name!r} needs {tensor.nbytes} bytes: "
                    f"got {raw.size} items of {raw.dtype}"
                )
            header.fill("tensors", tensor.name, items.write(raw))
        items.flush()
        file.seek(0)
        file.write(header.encoded())
        file.flush()
        open_smol(Path(file.name), verify=True)


class _Layout:
    """The header of a file to be written; checksums have a fixed width, so it keeps its length."""

    def __init__(self, sections: Mapping[str, bytes], tensors: Sequence[SmolTensor]) -> None:
        self._header: dict[str, dict[str, dict[str, Any]]] = {"sections": {}, "tensors": {}}
        for name, text in sections.items():
            if name not in SECTIONS:
                raise InputError(f"a .smol file has no section {name!r}")
            self._header["sections"][name] = {"length": len(text)}
        for name, kind, shape in tensors:
            if fault := _tensor_fault(name, kind, shape) or (
                "is given twice" if name in self._header["tensors"] else ""
            ):
                raise InputError(f"tensor {name!r:.80} {fault}")
            length = packed_bytes(kind, shape)
            self._header["tensors"][name] = {"kind": kind, "shape": list(shape), "length": length}
        self._place()

    def fill(self, group: str, name: str, checksum: str) -> None:
        """Put in the checksum of an item that has been written."""
        self._header[group][name]["checksum"] = checksum

    def encoded(self) -> bytes:
        """All bytes before the first item."""
        raw = json.dumps(self._header, separators=(",", ":")).encode("ascii")
        raw += b" " * (-(_PREFIX + len(raw)) % _ALIGNMENT)
        return MAGIC + VERSION.to_bytes(4, "little") + len(raw).to_bytes(8, "little") + raw

    def _place(self) -> None:
        """Give each item its offset; since digits add to the header, until nothing moves."""
        items = [item for group in self._header.values() for item in group.values()]
        for item in items:
            item.update(offset=0, checksum=_NO_CHECKSUM)
        start = -1
        while start != (start := len(self.encoded())):
            position = start
            for item in items:
                item["offset"] = position = _aligned(position)
                position += item["length"]


class _Items:
    """The bytes of a file, in pieces of the size of a huge page: Linux keeps and maps them so."""

    def __init__(self, file: BinaryIO, start: bytes) -> None:
        self._file = file
        self._piece = bytearray()
        self._position = 0
        self._append(memoryview(start))

    def write(self, raw: Bytes) -> str:
        """Put an item at the next aligned place; returns its checksum."""
        self._append(memoryview(bytes(-self._position % _ALIGNMENT)))
        item = np.ascontiguousarray(raw).reshape(-1)
        self._append(item.data)
        return _checksum(item)

    def flush(self) -> None:
        """Write what is left of the last piece."""
        self._file.write(self._piece)
        self._piece = bytearray()

    def _append(self, rest: memoryview) -> None:
        self._position += len(rest)
        while rest:
            room = _PIECE - len(self._piece)
            self._piece += rest[:room]
            rest = rest[room:]
            if len(self._piece) == _PIECE:
                self.flush()


def _aligned(position: int) -> int:
    return -(-position // _ALIGNMENT) * _ALIGNMENT


def _checksum(raw: Bytes) -> str:
    return f"{zlib.crc32(raw.data):08x}"


def _header(path: Path, data: Bytes) -> tuple[dict[str, Any], int]:
    """Read the header, and where the items start."""
    prefix = data[:_PREFIX].tobytes()
    if prefix[:4] != MAGIC:
        raise FormatError(f"{path}: not a .smol file: it does not start with 'SMOL'")
    version = int.from_bytes(prefix[4:8], "little")
    if len(prefix) < _PREFIX or version != VERSION:
        fault = (
            "the file ends inside its prefix"
            if len(prefix) < _PREFIX
            else (f".smol version {version} is not supported: supported is {VERSION}")
        )
        raise FormatError(f"{path}: {fault}")
    size = int.from_bytes(prefix[8:], "little")
    start = _PREFIX + size
    if size > _HEADER_LIMIT or start > len(data):
        raise FormatError(
            f"{path}: a header of {size} bytes does not fit a file of {len(data)}: "
            "it is cut short or broken"
        )
    if start % _ALIGNMENT:
        raise FormatError(f"{path}: the header ends at {start}, not a multiple of {_ALIGNMENT}")
    header = parse_json(data[_PREFIX:start].tobytes(), f"{path}: header")
    groups = [header.get(key) for key in ("sections", "tensors")]
    if len(header) != 2 or not all(isinstance(group, dict) for group in groups):
        raise FormatError(f"{path}: the header must have the objects sections and tensors alone")
    for name in header["sections"]:
        if name not in SECTIONS:
            raise FormatError(f"{path}: unknown section {name!r:.80}")
    return header, start


def _item(
    path: Path, group: str, name: str, value: Any, extra: frozenset[str] = frozenset()
) -> _Item:
    what = f"{group} {name!r:.80}"
    if not isinstance(value, dict) or value.keys() != {"offset", "length", "checksum"} | extra:
        keys = ", ".join(sorted({"offset", "length", "checksum"} | extra))
        raise FormatError(f"{path}: {what} must have {keys} and nothing else")
    offset, length, checksum = value["offset"], value["length"], value["checksum"]
    if not all(type(number) is int and 0 <= number < 2**63 for number in (offset, length)):
        raise FormatError(f"{path}: {what}: offset and length must be integers from 0 on")
    if (
        not isinstance(checksum, str)
        or len(checksum) != len(_NO_CHECKSUM)
        or not set(checksum) <= set("0123456789abcdef")
    ):
        raise FormatError(f"{path}: {what}: a checksum is eight hexadecimal digits")
    return _Item(what, offset, length, checksum)


def _tensor(path: Path, name: str, value: Any) -> tuple[TensorEntry, _Item]:
    item = _item(path, "tensor", name, value, frozenset({"kind", "shape"}))
    kind, shape = value["kind"], value["shape"]
    if not isinstance(kind, str) or not isinstance(shape, list):
        raise FormatError(f"{path}: {item.what}: kind must be a string, shape a list")
    if fault := _tensor_fault(name, kind, tuple(shape)):
        raise FormatError(f"{path}: {item.what} {fault}")
    expected = packed_bytes(kind, tuple(shape))
    if item.length != expected:
        raise FormatError(
            f"{path}: {item.what}: {kind} {shape} is {expected} bytes, not {item.length}"
        )
    entry_kind = kind if len(shape) == 2 else "F32"
    return TensorEntry(name, entry_kind, tuple(shape), item.offset, item.length), item


def _tensor_fault(name: str, kind: str, shape: tuple[Any, ...]) -> str:
    """What is wrong with a tensor's name, kind or shape; empty where nothing is."""
    if not 0 < len(name) <= _NAME_LIMIT:
        return f"has a name of {len(name)} characters, not 1 to {_NAME_LIMIT}"
    if kind not in BLOCK_BYTES:
        return f"has the unknown kind {kind!r:.80}: known are {', '.join(BLOCK_BYTES)}"
    if len(shape) not in (1, 2) or not all(
        type(size) is int and 1 <= size <= _DIM_LIMIT for size in shape
    ):
        return f"has the shape {list(shape)!r:.80}: it must be one or two sizes from 1 on"
    return f"is a vector of {kind}: vectors are f32" if len(shape) == 1 and kind != "f32" else ""


def _check_places(path: Path, items: Sequence[_Item], start: int, size: int) -> None:
    """Each item lies at the next aligned place, and the last one ends the file."""
    position = start
    for item in items:
        if item.offset % _ALIGNMENT:
            raise FormatError(f"{path}: {item.what} is not aligned to {_ALIGNMENT} bytes")
        expected = _aligned(position)
        if item.offset != expected:
            fault = "overlaps what is before it" if item.offset < expected else "follows a gap"
            raise FormatError(f"{path}: {item.what} {fault}")
        position = item.offset + item.length
        if position > size:
            raise FormatError(
                f"{path}: {item.what} ends at byte {position} of {size}: "
                "the file is cut short or broken"
            )
    if position != size:
        raise FormatError(f"{path}: {size - position} bytes after the last tensor")
