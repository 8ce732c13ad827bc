"""What the weights of a framework's model are where nobody says so: one rule for torch and JAX."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from smollm2.backends import get_backend
from smollm2.backends.dtypes import DTYPES, own_dtype
from smollm2.errors import InputError
from smollm2.quantize import Quantized
from smollm2.weights import EMBEDDING, Weights
from tests.tiny import BFLOAT16, random_weights, tiny_config

CONFIG = tiny_config()
WEIGHTS = random_weights(CONFIG)


def cast(matrices: Any, embedding: Any, vectors: Any = np.float32) -> Weights[Any]:
    """The weights in a dtype each; matrices may be ``"Q8_0"``."""

    def convert(name: str, weight: Any) -> Any:
        kind = vectors if weight.ndim == 1 else embedding if name == EMBEDDING else matrices
        if kind != "Q8_0":
            return weight.astype(kind)
        blocks = np.zeros((weight.size // 32, 34), np.uint8)
        blocks[:, :2] = np.float16([1 / 512]).view(np.uint8)
        blocks[:, 2:] = np.random.default_rng(len(name)).integers(0, 256, (len(blocks), 32))
        return Quantized("Q8_0", weight.shape, blocks.reshape(weight.shape[0], -1))

    return WEIGHTS.map(convert)


CASES = {
    "float16": (cast(np.float16, np.float16), "float16"),
    "bfloat16 with its norms": (cast(BFLOAT16, BFLOAT16, BFLOAT16), "bfloat16"),
    "float32 with norms of 16 bits": (cast(np.float32, np.float32, np.float16), "float32"),
    "quantized": (cast("Q8_0", "Q8_0"), "float32"),
    "quantized but for the embedding": (cast("Q8_0", np.float16), "float32"),
    "quantized embedding": (cast(np.float16, "Q8_0"), "float32"),
    "embedding of fewer bits": (cast(np.float32, BFLOAT16), "float32"),
    "both of 16 bits": (cast(np.float16, BFLOAT16), "float32"),
    "float64": (cast(np.float64, np.float64), "float32"),
}


def test_names_are_those_of_numpy() -> None:
    assert [np.dtype(ml_dtypes.bfloat16).name, *DTYPES[::2]] == ["bfloat16", "float32", "float16"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_nothing_of_a_checkpoint_is_rounded(backend: str, case: str) -> None:
    """``strict=False`` lets mixed dtypes through, and ggml keeps some matrices dense."""
    pytest.importorskip(backend)
    weights, expected = CASES[case]
    assert own_dtype(weights) == expected
    for options in ({}, {"dtype": None}):
        model: Any = get_backend(backend).load(CONFIG, weights, **options)
        assert str(model.dtype).removeprefix("torch.") == expected


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_float16_that_has_no_room_for_a_weight(backend: str) -> None:
    """It would be an infinity, and logits NaN; one that is stored stays."""
    pytest.importorskip(backend)
    weights = random_weights(CONFIG)
    weights.blocks[1].mlp.down[3, 4] = -1e5
    with pytest.raises(InputError, match=r"^model\.layers\.1\.mlp\.down_proj.* too large for F16"):
        get_backend(backend).load(CONFIG, weights, dtype="float16")
    get_backend(backend).load(CONFIG, weights, dtype="bfloat16")
    weights.blocks[1].mlp.down[3, 4] = np.inf
    get_backend(backend).load(CONFIG, weights, dtype="float16")
