"""The GGUF format, version 3: a writer that holds one piece of one tensor at a time.

``formats/gguf.py`` describes the layout. Metadata have the types that llama.cpp's converter gives
them: whole numbers are u32, other numbers f32, lists are arrays of strings, NumPy arrays keep their
dtype. Tensors follow each other, each at the next multiple of 32 bytes.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from smollm2.errors import FormatError, InputError
from smollm2.files import atomic_write
from smollm2.formats.gguf import (
    ARRAY,
    GGML_TYPES,
    GROUPS,
    MAX_DIMS,
    NAME_LIMIT,
    SCALARS,
    STRING,
    open_gguf,
)
from smollm2.formats.tensorfile import DENSE_DTYPES, check_written

_VERSION = 3
_ALIGNMENT = 32
_TYPE_IDS = {name: number for number, name in GGML_TYPES.items()}
_SCALAR_IDS = {dtype: number for number, dtype in SCALARS.items()}
_U32, _F32, _BOOL = (_SCALAR_IDS[np.dtype(name)] for name in ("<u4", "<f4", "?"))


class GgufTensor(NamedTuple):
    """A tensor that is to be written; ``shape`` has the row length last."""

    name: str
    kind: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in the file, without padding."""
        values, nbytes = GROUPS.get(self.kind) or (1, DENSE_DTYPES[self.kind].itemsize)
        return math.prod(self.shape) // values * nbytes


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Sequence[GgufTensor],
    pieces: Callable[[GgufTensor], Iterable[NDArray[np.uint8]]],
) -> None:
    """Write a file, atomically; it is opened and compared before it gets its name.

    ``pieces`` is asked for the bytes of each tensor, in order, when they are to be written.

    Raises ``InputError`` for metadata, names, kinds and shapes that the format does not hold and
    for a tensor of other bytes than its kind and shape need, ``FormatError`` where the disk gives
    back something else than was written, and ``OSError``.
    """
    header = _header(metadata, tensors)
    with atomic_write(path) as file:
        file.write(header)
        checksums = {tensor.name: _write(file, tensor, pieces(tensor)) for tensor in tensors}
        file.flush()
        _compare(Path(file.name), header, checksums)


def _header(metadata: Mapping[str, Any], tensors: Sequence[GgufTensor]) -> bytes:
    """All bytes before the first tensor."""
    parts = [b"GGUF", struct.pack("<IQQ", _VERSION, len(tensors), len(metadata))]
    for key, value in metadata.items():
        parts += _string(key), _value(key, value)
    position = 0
    names: set[str] = set()
    for tensor in tensors:
        if fault := _fault(tensor) or ("is given twice" if tensor.name in names else ""):
            raise InputError(f"tensor {tensor.name!r:.80} {fault}")
        names.add(tensor.name)
        dims = tensor.shape[::-1]
        parts += (
            _string(tensor.name),
            struct.pack(f"<I{len(dims)}Q", len(dims), *dims),
            struct.pack("<IQ", _TYPE_IDS[tensor.kind], position),
        )
        position += _aligned(tensor.nbytes)
    header = b"".join(parts)
    return header + bytes(_aligned(len(header)) - len(header))


def _fault(tensor: GgufTensor) -> str:
    """What is wrong with a tensor's name, kind or shape; empty where nothing is."""
    kind, shape = tensor.kind, tensor.shape
    if not 0 < len(tensor.name.encode()) < NAME_LIMIT:
        return f"has a name that is not of 1 to {NAME_LIMIT - 1} bytes"
    if kind not in _TYPE_IDS or (kind not in GROUPS and kind not in DENSE_DTYPES):
        return f"has the unknown kind {kind!r:.80}"
    if not 1 <= len(shape) <= MAX_DIMS or min(shape) < 1:
        return f"has the shape {list(shape)}: it must have 1 to {MAX_DIMS} sizes from 1 on"
    values, _ = GROUPS.get(kind) or (1, 1)
    if shape[-1] % values:
        return f"has rows of {shape[-1]}, but {kind} needs a multiple of {values}"
    return ""


def _string(text: str) -> bytes:
    try:
        raw = text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{text!r:.80} is not text: {error.reason}") from None
    return struct.pack("<Q", len(raw)) + raw


def _value(key: str, value: Any) -> bytes:
    """A metadata value with its type in front."""
    match value:
        case str():
            return struct.pack("<I", STRING) + _string(value)
        case bool():
            return struct.pack("<I?", _BOOL, value)
        case int() if 0 <= value < 2**32:
            return struct.pack("<II", _U32, value)
        case float():
            return struct.pack("<If", _F32, value)
        case list() if all(isinstance(text, str) for text in value):
            texts = b"".join(map(_string, value))
            return struct.pack("<IIQ", ARRAY, STRING, len(value)) + texts
        case np.ndarray() if value.dtype.newbyteorder("<") in _SCALAR_IDS and value.ndim == 1:
            dtype = value.dtype.newbyteorder("<")
            raw = value.astype(dtype).tobytes()
            return struct.pack("<IIQ", ARRAY, _SCALAR_IDS[dtype], len(value)) + raw
    raise InputError(f"metadata {key!r:.80} cannot be {value!r:.80}")


def _write(file: BinaryIO, tensor: GgufTensor, pieces: Iterable[NDArray[np.uint8]]) -> int:
    """Write one tensor and what is between it and the next; returns the checksum of its bytes."""
    checksum = size = 0
    for piece in pieces:
        raw = np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data
        checksum = zlib.crc32(raw, checksum)
        size += len(raw)
        file.write(raw)
    if size != tensor.nbytes:
        raise InputError(f"tensor {tensor.name!r} needs {tensor.nbytes} bytes: got {size}")
    file.write(bytes(_aligned(size) - size))
    return checksum


def _compare(path: Path, header: bytes, checksums: Mapping[str, int]) -> None:
    """Open what was written. Raises ``FormatError`` where it is not what was to be written."""
    file = open_gguf(path)
    check_written(file, checksums)
    if file.data[: len(header)].tobytes() != header:
        raise FormatError(f"{path}: the header reads otherwise than it was written")


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
