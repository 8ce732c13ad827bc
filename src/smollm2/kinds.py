"""Kinds: which packed kind each matrix of a model gets, as it is loaded and as it is exported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from smollm2.formats.smol import BLOCK_BYTES
from smollm2.packing import Packed
from smollm2.quantize import Quantized, Weight, kind_without_loss
from smollm2.weights import EMBEDDING, HEAD

DENSE_DEFAULT = "q8"
"""What matrices become that no packed kind holds without loss, and dense ones by default."""

QUANTS = tuple(BLOCK_BYTES)
"""Kinds that weights can be converted to."""

COARSE = frozenset({"q8", "q4", "q4m"})
"""Kinds whose rounding can be seen in what a model says."""

_ENDS = {"q4": "q8", "q4m": "q8"}
"""What the embedding and the head are where 4 bit is asked for."""


def default_quant(weights: Iterable[Weight]) -> str | None:
    """Return what to load a model as that is used, not kept: None, without loss, or a kind.

    What is quantized stays as it is; dense matrices are rounded to 8 bit.
    """
    quantized = any(isinstance(weight, Quantized | Packed) for weight in weights)
    return None if quantized else DENSE_DEFAULT


def packed_kinds(weights: Mapping[str, Weight], quant: str | None) -> dict[str, str]:
    """Return the packed kind of each matrix, in order; vectors are left out.

    ``quant`` is a packed kind for all of them, but with the 4-bit ones the embedding and the head
    are q8. None holds each without loss where that is possible, else as q8.
    """
    return {
        name: _kind(name, weight, quant)
        for name, weight in weights.items()
        if len(weight.shape) == 2
    }


def _kind(name: str, weight: Weight, quant: str | None) -> str:
    if quant is None:
        return kind_without_loss(weight) or DENSE_DEFAULT
    return _ENDS.get(quant, quant) if name in (EMBEDDING, HEAD) else quant
