"""TensorFile: the named tensors of one memory-mapped file, whatever its format."""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smollm2.errors import FormatError

_NUMPY_DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        "F64": np.dtype("<f8"),
        "F32": np.dtype("<f4"),
        "F16": np.dtype("<f2"),
        "I64": np.dtype("<i8"),
        "I32": np.dtype("<i4"),
        "I16": np.dtype("<i2"),
        "I8": np.dtype("i1"),
        "U8": np.dtype("u1"),
        "BOOL": np.dtype("?"),
    }
)
_KINDS = {dtype: kind for kind, dtype in _NUMPY_DTYPES.items()}


class _DenseDtypes(Mapping[str, np.dtype[Any]]):
    """NumPy's dtypes and bfloat16, whose package is imported when it is first asked for."""

    def __getitem__(self, kind: str) -> np.dtype[Any]:
        if kind != "BF16":
            return _NUMPY_DTYPES[kind]
        import ml_dtypes

        bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bfloat16

    def __iter__(self) -> Iterator[str]:
        yield from (*_NUMPY_DTYPES, "BF16")

    def __len__(self) -> int:
        return len(_NUMPY_DTYPES) + 1


DENSE_DTYPES: Mapping[str, np.dtype[Any]] = _DenseDtypes()
"""Kinds that NumPy holds as they are; every other kind is quantized."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies.

    ``kind`` is ``"BF16"``, ``"Q4_1"``, …; ``shape`` has the row length last; ``offset`` and
    ``nbytes`` are counted in the file.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def is_dense(self) -> bool:
        """Whether NumPy holds this kind without decoding."""
        return self.kind in DENSE_DTYPES


@dataclass(frozen=True)
class TensorFile:
    """An opened file whose structure has been checked: every entry lies inside ``data``.

    Arrays are views of the mapping, which lives as long as any of them.
    """

    path: Path
    format: str
    metadata: Mapping[str, Any]
    entries: Mapping[str, TensorEntry]
    data: NDArray[np.uint8] = field(repr=False)

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor, [nbytes], read-only, not copied."""
        entry = self.entries[name]
        return self.data[entry.offset : entry.offset + entry.nbytes]

    def array(self, name: str) -> NDArray[Any]:
        """A dense tensor in its shape and dtype, read-only and not copied where it is aligned."""
        entry = self.entries[name]
        if not entry.is_dense:
            raise FormatError(f"{self.path}: tensor {name!r} is {entry.kind}, not a dense array")
        array = self.raw(name).view(DENSE_DTYPES[entry.kind]).reshape(entry.shape)
        return array if array.flags.aligned else array.copy()


def check_written(file: TensorFile, checksums: Mapping[str, int]) -> None:
    """Compare the CRC-32 of each tensor with that of the bytes that were to be written.

    Raises ``FormatError`` where they differ.
    """
    for name in file.entries.keys() | checksums.keys():
        if name not in file.entries or zlib.crc32(file.raw(name).data) != checksums.get(name):
            raise FormatError(
                f"{file.path}: tensor {name!r:.80} reads otherwise than it was written: is the "
                "disk broken?"
            )


def kind_of_dtype(dtype: np.dtype[Any]) -> str | None:
    """The dense kind of an array's dtype in either byte order, None where there is none."""
    return "BF16" if dtype.name == "bfloat16" else _KINDS.get(dtype.newbyteorder("="))


def map_bytes(path: Path) -> NDArray[np.uint8]:
    """Map a file read-only as bytes, in huge pages where the system has them for files.

    Raises ``FormatError`` for what cannot be mapped.
    """
    # Opening a pipe would wait for a writer, and mapping a device reads without an end.
    if not os.path.isfile(path):
        raise FormatError(f"{path}: no such file")
    try:
        with path.open("rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise FormatError(f"{path}: the file is empty") from None
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # an old kernel, or one without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, dtype=np.uint8)
