"""The safetensors format: a strict reader of files and of shard indexes, and a writer.

Layout: a little-endian u64, that many bytes of JSON ``{name: {dtype, shape, data_offsets}}``
padded with spaces, then the tensors, which cover the rest of the file without gap or overlap.
Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from smollm2.errors import FormatError, InputError
from smollm2.files import atomic_write, parse_json, read_json
from smollm2.formats.tensorfile import (
    DENSE_DTYPES,
    TensorEntry,
    TensorFile,
    check_written,
    kind_of_dtype,
    map_bytes,
)

HEADER_LIMIT = 100_000_000
"""Bytes of a header at most, as the reference implementation has it."""

_SIZE_LIMIT = 2**63 - 1
_MAX_DIMS = 32
_MAX_LISTED = 100
_ENTRY_KEYS = {"dtype", "shape", "data_offsets"}
_METADATA = "__metadata__"
_UNSAFE = re.compile(r"[\\:\x00-\x1f\x7f]")


def open_safetensors(path: Path) -> TensorFile:
    """Map a file and check all of its header; tensors are read when they are asked for.

    Entries come in the order of their bytes. Raises ``FormatError`` for anything that the
    format forbids.
    """
    data = map_bytes(path)
    size = int.from_bytes(data[:8].tobytes(), "little")
    if size > len(data) - 8:
        raise FormatError(f"{path}: the header does not fit a file of {len(data)} bytes")
    if size > HEADER_LIMIT:
        raise FormatError(f"{path}: a header of {size} bytes is over the limit {HEADER_LIMIT}")
    raw = data[8 : 8 + size].tobytes()
    if not raw.startswith(b"{"):
        raise FormatError(f"{path}: the header does not start with '{{': not a safetensors file")
    header = parse_json(raw, f"{path}: header")
    metadata = _metadata(path, header.pop(_METADATA, {}))
    entries = [_entry(path, name, value, 8 + size) for name, value in header.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
    _check_cover(path, entries, 8 + size, len(data))
    return TensorFile(
        path=path,
        format="safetensors",
        metadata=MappingProxyType(metadata),
        entries=MappingProxyType({entry.name: entry for entry in entries}),
        data=data,
    )


def open_index(path: Path) -> list[TensorFile]:
    """Open every shard of a ``model.safetensors.index.json``, in the order the index names them.

    Raises ``FormatError`` for a broken index or shard, a shard name that could lead out of the
    folder, shards that do not exist (all are listed), and for a shard whose tensors are not
    exactly those that the index gives it. Shards may be symbolic links, as in Hugging Face's
    cache.
    """
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(f"{path}: weight_map must be an object that names tensors")
    shards: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise FormatError(f"{path}: the shard of {name!r:.80} must be a string")
        shards.setdefault(shard, set()).add(name)
    for shard in shards:
        _check_shard_name(path, shard)
    missing = [shard for shard in shards if not os.path.isfile(path.parent / shard)]
    if missing:
        raise FormatError(f"{path}: {len(missing)} shards do not exist: {_listed(missing)}")
    return [_open_shard(path, shard, names) for shard, names in shards.items()]


def write_safetensors(
    path: Path, tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str] | None = None
) -> None:
    """Write named arrays, atomically and one at a time.

    Tensors are sorted by element size, largest first, then by name, so each is aligned. A
    mapping that makes its arrays when asked is asked twice for each and never holds two.

    Raises ``InputError`` for a dtype that the format lacks and for bad names or metadata.
    """
    specs = [_describe(name, tensors[name]) for name in tensors]
    stream_safetensors(path, specs, lambda spec: tensors[spec.name], metadata)


def stream_safetensors(
    path: Path,
    tensors: Iterable[TensorEntry],
    make: Callable[[TensorEntry], NDArray[Any]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors that are made one at a time, when each is to be written.

    Only what ``tensors`` say of names, kinds and shapes counts. The file is opened and compared
    before it gets its name. Raises as ``write_safetensors`` does.
    """
    specs = list(tensors)
    specs.sort(key=lambda spec: (-DENSE_DTYPES[spec.kind].itemsize, spec.name))
    header = _header(specs, metadata)
    with atomic_write(path) as file:
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        checksums = {spec.name: _write(file, _packed(make(spec), spec)) for spec in specs}
        file.flush()
        check_written(open_safetensors(Path(file.name)), checksums)


def _write(file: BinaryIO, raw: memoryview) -> int:
    """Write bytes; returns their checksum."""
    file.write(raw)
    return zlib.crc32(raw)


def _metadata(path: Path, value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise FormatError(f"{path}: {_METADATA} must be an object of strings")
    return value


def _entry(path: Path, name: str, value: Any, data_start: int) -> TensorEntry:
    where = f"{path}: tensor {name!r:.80}"
    if not isinstance(value, dict) or value.keys() != _ENTRY_KEYS:
        raise FormatError(f"{where} must have dtype, shape and data_offsets and nothing else")
    kind, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(kind, str):
        raise FormatError(f"{where} must have a string as its dtype")
    if kind not in DENSE_DTYPES:
        known = ", ".join(DENSE_DTYPES)
        raise FormatError(f"{where} has the unknown dtype {kind!r:.80}: known are {known}")
    if not _is_sizes(shape) or len(shape) > _MAX_DIMS:
        raise FormatError(f"{where}: a shape is at most {_MAX_DIMS} integers from 0 to 2^63 - 1")
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise FormatError(f"{where}: data_offsets must be two integers, 0 ≤ start ≤ end < 2^63")
    start, end = offsets
    itemsize = DENSE_DTYPES[kind].itemsize
    # NumPy refuses a shape whose non-zero dimensions overflow, even where a zero empties it.
    if math.prod(max(1, dim) for dim in shape) * itemsize > _SIZE_LIMIT:
        raise FormatError(f"{where}: the shape is too large")
    nbytes = math.prod(shape) * itemsize
    if nbytes != end - start:
        raise FormatError(f"{where}: {kind} {shape} is {nbytes} bytes, not {end - start}")
    return TensorEntry(name, kind, tuple(shape), data_start + start, nbytes)


def _is_sizes(value: Any) -> bool:
    """Whether this is a list of possible sizes; JSON's true and false are not integers."""
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item <= _SIZE_LIMIT for item in value
    )


def _check_cover(path: Path, entries: list[TensorEntry], start: int, end: int) -> None:
    """Entries, sorted by offset, must cover the bytes from start to end exactly once."""
    position = start
    for entry in entries:
        if entry.offset != position:
            fault = "a gap before" if entry.offset > position else "an overlap at"
            raise FormatError(f"{path}: {fault} tensor {entry.name!r:.80}")
        position += entry.nbytes
    if position > end:
        raise FormatError(f"{path}: the file is cut short: {end} bytes of {position}")
    if position < end:
        raise FormatError(f"{path}: {end - position} bytes after the last tensor")


def _check_shard_name(path: Path, shard: str) -> None:
    if _UNSAFE.search(shard) or any(part in ("", ".", "..") for part in shard.split("/")):
        raise FormatError(f"{path}: {shard!r:.80} is not the name of a file inside the folder")


def _open_shard(path: Path, shard: str, names: set[str]) -> TensorFile:
    file = open_safetensors(path.parent / shard)
    missing, unexpected = names - file.entries.keys(), file.entries.keys() - names
    if missing or unexpected:
        raise FormatError(
            f"{file.path}: not the tensors that {path.name} names: "
            f"missing: {_listed(sorted(missing))}; unexpected: {_listed(sorted(unexpected))}"
        )
    return file


def _listed(names: list[str]) -> str:
    more = f", and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more or "none"


def _describe(name: str, array: NDArray[Any]) -> TensorEntry:
    kind = kind_of_dtype(array.dtype)
    if kind is None:
        raise InputError(f"tensor {name!r}: safetensors has no dtype for {array.dtype}")
    return TensorEntry(name, kind, array.shape, 0, array.size * array.dtype.itemsize)


def _packed(array: NDArray[Any], spec: TensorEntry) -> memoryview:
    """The bytes of an array as the file has them: row-major and little-endian."""
    if _describe(spec.name, array) != spec:
        raise InputError(f"tensor {spec.name!r} changed while it was written")
    packed = np.ascontiguousarray(array, dtype=DENSE_DTYPES[spec.kind])
    return packed.reshape(-1).view(np.uint8).data


def _header(specs: list[TensorEntry], metadata: Mapping[str, str] | None) -> bytes:
    header: dict[str, Any] = {}
    if metadata is not None:
        if not all(isinstance(text, str) for item in metadata.items() for text in item):
            raise InputError("safetensors metadata must map strings to strings")
        header[_METADATA] = dict(metadata)
    position = 0
    for spec in specs:
        if spec.name == _METADATA:
            raise InputError(f"a tensor cannot be named {_METADATA}")
        header[spec.name] = {
            "dtype": spec.kind,
            "shape": list(spec.shape),
            "data_offsets": [position, position + spec.nbytes],
        }
        position += spec.nbytes
    try:
        raw = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise InputError(f"a tensor's name or metadata is not text: {error.reason}") from None
    raw += b" " * (-len(raw) % 8)
    if len(raw) > HEADER_LIMIT:
        raise InputError(f"a header of {len(raw)} bytes is over the limit {HEADER_LIMIT}")
    return raw
