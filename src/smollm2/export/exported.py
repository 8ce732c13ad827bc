"""What exports have in common: what they tell of tensors, what they wrote, what they replace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Protocol

from smollm2.errors import InputError

_SUFFIXES = (".smol", ".gguf", ".safetensors", ".onnx", ".mlir", ".mlirbc")


class Tensor(Protocol):
    """A tensor of a file that is being written, under the names of the file's format."""

    @property
    def name(self) -> str:
        """The tensor's name."""

    @property
    def kind(self) -> str:
        """How its values are stored."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes, the row length last."""

    @property
    def nbytes(self) -> int:
        """Its bytes in the file."""


Progress = Callable[[Tensor, int, int], object]
"""Told of each tensor before it is made: which, its number from 1 on, of how many."""


class Making:
    """Tensors that are made one after the other: each is told of, and named where it fails."""

    def __init__(self, source: Path, count: int, progress: Progress | None) -> None:
        self._source, self._count, self._progress = source, count, progress
        self._done = 0

    @contextmanager
    def of(self, tensor: Tensor) -> Iterator[None]:
        """Within it, a tensor of ``source`` is made; an ``InputError`` says which."""
        self._done += 1
        if self._progress is not None:
            self._progress(tensor, self._done, self._count)
        with naming_tensor(self._source, tensor.name):
            yield


@contextmanager
def naming_tensor(source: Path, name: str) -> Iterator[None]:
    """Have an ``InputError`` say which tensor of which checkpoint it is about."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{source}: {name}: {error}") from None


@dataclass(frozen=True, slots=True)
class KindSize:
    """What the tensors of one kind take: how many, their values, and bytes with all padding."""

    kind: str
    tensors: int
    weights: int
    nbytes: int

    @property
    def bits_per_weight(self) -> float:
        """Bits stored for each value, scales and padding included."""
        return 8 * self.nbytes / self.weights


@dataclass(frozen=True, slots=True)
class Exported:
    """A file or folder that was written: bytes, seconds it took, and what its tensors take.

    ``remarks`` say what is not as in the checkpoint though nobody asked for it.
    """

    path: Path
    nbytes: int
    seconds: float
    kinds: tuple[KindSize, ...]
    remarks: tuple[str, ...] = ()


def kind_sizes(tensors: Iterable[Tensor]) -> tuple[KindSize, ...]:
    """What each kind takes, in the order in which kinds appear."""
    by_kind: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault(tensor.kind, []).append(tensor)
    return tuple(
        KindSize(
            kind,
            len(found),
            sum(prod(tensor.shape) for tensor in found),
            sum(tensor.nbytes for tensor in found),
        )
        for kind, found in by_kind.items()
    )


def check_free(path: Path, suffix: str, *, force: bool) -> None:
    """Raise ``InputError`` where a file would be replaced that nobody said to replace.

    ``suffix`` is what names of the format end in; those of other formats are refused.
    """
    if path.is_dir():
        raise InputError(f"{path}: is a folder: give the name of a file")
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise InputError(f"{path}: is no regular file: give another name")
    if path.suffix != suffix and path.suffix in _SUFFIXES:
        raise InputError(f"{path}: is the name of another format: give one that ends in {suffix}")
    if not path.parent.is_dir():
        raise InputError(f"{path}: there is no folder {path.parent}: make it first")
    if path.exists() and not force:
        raise InputError(f"{path}: exists: give another name, or --force to replace it")
