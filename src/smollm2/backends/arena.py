"""Arena: matrices as the native engine reads them, where they lie in a file or packed in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

import smollm2._native as _native
from smollm2.errors import CheckpointError, InputError
from smollm2.packing import Packed
from smollm2.quantize import Weight, pack_weight

_ALIGNMENT = 64


class Matrix(NamedTuple):
    """A packed matrix for the engine: kind, rows, columns, bytes."""

    kind: str
    rows: int
    cols: int
    data: NDArray[np.uint8]


def matrices_of(
    weights: Mapping[str, Weight], kinds: Mapping[str, str], *, threads: int, mapped: bool
) -> list[Matrix]:
    """Return the matrix of each name in ``kinds``, in order.

    What is packed as asked for already stays where it lies if ``mapped``. The rest is packed side
    by side in one block of huge pages.

    Raises ``CheckpointError`` for a weight that cannot be packed.
    """
    stay = {name for name, kind in kinds.items() if mapped and _is_ready(weights[name], kind)}
    sizes = {
        name: _native.packed_bytes(kind, *weights[name].shape)
        for name, kind in kinds.items()
        if name not in stay
    }
    memory = _native.memory(sum(sizes.values()))
    matrices: list[Matrix] = []
    for name, kind in kinds.items():
        rows, cols = weights[name].shape
        try:
            packed = pack_weight(weights[name], kind, threads=threads)
        except InputError as error:
            raise CheckpointError(f"{name}: {error}") from None
        if name in stay:
            data = packed.data.reshape(-1)
        else:
            data, memory = memory[: sizes[name]], memory[sizes[name] :]
            data.reshape(packed.data.shape)[...] = packed.data
        matrices.append(Matrix(kind, rows, cols, data))
    return matrices


def _is_ready(weight: Weight, kind: str) -> bool:
    """Whether the engine can read a weight as it lies."""
    return (
        isinstance(weight, Packed)
        and weight.kind == kind
        and weight.data.flags.c_contiguous
        and weight.data.ctypes.data % _ALIGNMENT == 0
    )
