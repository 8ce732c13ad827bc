"""Which packed kind a matrix gets: nothing is lost that can be kept, and 4 bit spares the ends."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from smollm2.formats.gguf import GROUPS
from smollm2.kinds import default_quant, packed_kinds, rounded_to
from smollm2.quantize import Quantized, Weight, as_float32, pack_weight

EMBEDDING, HEAD, OTHER = "model.embed_tokens.weight", "lm_head.weight", "model.layers.0.x.weight"


def dense(dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((16, 256), dtype=np.float32).astype(dtype)


def quantized(kind: str) -> Quantized:
    values, nbytes = GROUPS[kind]
    return Quantized(kind, (16, 256), np.ones((16, 256 // values * nbytes), dtype=np.uint8))


NARROW = dense(ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    ("weight", "kind"),
    [
        (dense(), "f32"),
        (dense(np.float16), "f32"),
        (NARROW, "bf16"),
        (NARROW.astype(np.float32), "bf16"),
        (dense(np.float64), "q8"),
        (quantized("Q8_0"), "q8"),
        (quantized("Q4_0"), "q4"),
        (quantized("Q4_1"), "q4m"),
        (quantized("Q5_0"), "q8"),
        (quantized("Q6_K"), "q8"),
        (pack_weight(dense(), "q16"), "q16"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_without_a_quant_what_can_be_held_is_held(weight: Weight, kind: str) -> None:
    """cases: Q2; what is not held without loss becomes 8 bit"""
    assert packed_kinds({OTHER: weight, "norm": np.ones(4)}, None) == {OTHER: kind}
    if kind != "q8" or getattr(weight, "kind", "") == "Q8_0":
        assert np.array_equal(as_float32(pack_weight(weight, kind)), as_float32(weight))


@pytest.mark.parametrize(
    ("quant", "ends"), [("q4", "q8"), ("q4m", "q8"), ("q8", "q8"), ("bf16", "bf16"), ("f32", "f32")]
)
def test_4_bit_spares_the_embedding_and_the_head(quant: str, ends: str) -> None:
    """cases: Q5"""
    weights: dict[str, Weight] = {EMBEDDING: dense(), OTHER: quantized("Q4_1"), HEAD: dense()}
    kinds = packed_kinds(weights, quant)
    assert kinds == {EMBEDDING: ends, OTHER: quant, HEAD: ends}
    assert list(kinds) == list(weights)


def test_by_default_what_is_quantized_stays_so_and_dense_weights_are_rounded() -> None:
    assert default_quant([dense(), dense(np.float16), np.ones(3)]) == "q8"
    assert default_quant([dense(), quantized("Q5_0")]) is None
    assert default_quant([np.ones(3), pack_weight(dense(), "q4")]) is None


@pytest.mark.parametrize(
    ("weight", "quant", "kind"),
    [
        (dense(), "q8", "q8"),
        (dense(), "q4m", "q4m"),
        (dense(), "q16", None),
        (dense(), None, None),
        (dense(np.float64), None, "q8"),
        (quantized("Q5_0"), None, "q8"),
        (quantized("Q6_K"), None, "q8"),
        (quantized("Q6_K"), "q4", "q4"),
        (quantized("Q8_0"), None, None),
        (quantized("Q8_0"), "q8", None),
        (quantized("Q4_1"), "q8", "q8"),
        (pack_weight(dense(), "q16"), None, None),
        (pack_weight(dense(), "q16"), "q8", None),
    ],
)
def test_what_the_blocks_are_rounded_to(
    weight: Weight, quant: str | None, kind: str | None
) -> None:
    """All of them or none: a block in which one is held as it is cannot be smoothed."""
    block: dict[str, Weight] = {OTHER: weight, "norm": np.ones(4, np.float32)}
    assert rounded_to(block, quant) == kind
    assert rounded_to({EMBEDDING: quantized("Q8_0"), **block}, quant) == kind
    kept = {"q8": "Q8_0", "q4": "Q4_0", "q4m": "Q4_1"}.get(kind or "", "Q8_0")
    assert rounded_to({**block, "model.layers.1.x.weight": quantized(kept)}, quant) is None
    assert rounded_to({EMBEDDING: weight}, quant) is None
