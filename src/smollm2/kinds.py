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

COARSE = ("q8", "q4", "q4m")
"""Kinds whose rounding can be seen in what a model says; activations are rounded with them."""

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


def rounded_to(weights: Mapping[str, Weight], quant: str | None) -> str | None:
    """Return the one of ``COARSE`` that all matrices of the blocks are rounded to, if there is one.

    It is None where another kind is asked for, or one of them is held as it is.
    """
    kind = quant or DENSE_DEFAULT
    blocks = [
        weight
        for name, weight in weights.items()
        if len(weight.shape) == 2 and name not in (EMBEDDING, HEAD)
    ]
    if kind not in COARSE or not blocks:
        return None
    return None if any(_is_kept(weight, quant) for weight in blocks) else kind


def _is_kept(weight: Weight, quant: str | None) -> bool:
    if quant is None:
        return kind_without_loss(weight) is not None
    return isinstance(weight, Packed) or (
        isinstance(weight, Quantized) and kind_without_loss(weight) == quant
    )
