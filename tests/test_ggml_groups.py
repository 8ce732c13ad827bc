"""ggml's groups: the bytes of the gguf package's quantizers, and packed weights taken back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from smollm2.errors import InputError
from smollm2.formats.gguf import GROUPS
from smollm2.ggml_groups import GGML_ROUNDED, ggml_groups, ggml_kind, repacked
from smollm2.packing import Packed, pack_reference
from smollm2.quantize import Quantized, pack_weight

KINDS = ("Q8_0", "Q4_0", "Q4_1")
SCALES = st.sampled_from([1e-12, 1e-6, 1e-3, 1.0, 300.0])


def theirs(values: NDArray[np.float32], kind: str) -> NDArray[np.uint8]:
    """What the gguf package makes of rows."""
    with np.errstate(all="ignore"):
        rounded: NDArray[np.uint8] = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    return rounded


def test_all_kinds_are_tried() -> None:
    assert GGML_ROUNDED == KINDS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spread", [1e-6, 1e-3, 1.0, 1e3])
def test_random_rows(kind: str, spread: float) -> None:
    values = np.random.default_rng(3).standard_normal((200, 96), dtype=np.float32)
    values *= np.float32(spread)
    rounded = ggml_groups(values, kind)
    assert rounded.shape == (200, 3 * GROUPS[kind][1])
    assert np.array_equal(rounded, theirs(values, kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "row",
    [
        np.zeros(32),
        np.full(32, -0.0),
        np.full(32, 0.7),
        np.full(32, -3),
        np.arange(-16, 16),
        np.arange(32) * 0.5,  # halves are rounded away from zero
        np.r_[127, np.arange(31) - 15.5],
        np.r_[-8, 8, np.zeros(30)],  # the first of two of the same magnitude
        np.r_[8, -8, np.zeros(30)],
        np.r_[1e-45, np.zeros(31)],  # the scale has no inverse and is stored as 0
        np.full(32, 65504),
        np.r_[65504, -65504, np.zeros(30)],
    ],
    ids=str,
)
def test_rows_at_the_edge(kind: str, row: NDArray[Any]) -> None:
    values = row.astype(np.float32)[None]
    if kind == "Q4_1" and values.max() - values.min() > 2 * 65504:
        pytest.skip("the scale is finite, the point is the others")
    rounded, other = ggml_groups(values, kind), theirs(values, kind)
    if np.abs(values).max() < 1e-40 and np.abs(values).max() > 0:
        # ggml divides by it: what it makes of infinity is the platform's. Values are the same.
        rounded, other = rounded[:, :2], other[:, :2]
    assert np.array_equal(rounded, other)


@settings(deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    scale=SCALES,
    values=arrays.arrays(
        np.float32,
        st.tuples(st.integers(1, 4), st.sampled_from([32, 64])),
        elements=st.floats(-1, 1, width=16),
    ),
)
def test_any_rows(kind: str, scale: float, values: NDArray[np.float32]) -> None:
    scaled = (values * np.float32(scale)).astype(np.float32)
    assert np.array_equal(ggml_groups(scaled, kind), theirs(scaled, kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite(kind: str, wrong: float) -> None:
    values = np.ones((2, 32), dtype=np.float32)
    values[1, 7] = wrong
    with pytest.raises(InputError, match=f"NaN or infinity cannot be rounded to {kind}"):
        ggml_groups(values, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_values_that_are_too_large(kind: str) -> None:
    values = np.zeros((1, 32), dtype=np.float32)
    values[0, :2] = -1e7, 1e7
    with pytest.raises(InputError, match=rf"up to 1e\+07 are too large for {kind}"):
        ggml_groups(values, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_not_whole_groups(kind: str) -> None:
    with pytest.raises(InputError, match="a multiple of 32 values: got 48"):
        ggml_groups(np.zeros((1, 48), dtype=np.float32), kind)


@pytest.mark.parametrize(("packed", "kind"), [("q8", "Q8_0"), ("q4", "Q4_0"), ("q4m", "Q4_1")])
@pytest.mark.parametrize("shape", [(16, 64), (5, 32), (33, 96), (48, 160)])
def test_what_was_packed_comes_back(packed: str, kind: str, shape: tuple[int, int]) -> None:
    """Every byte, for shapes that fill tiles and for those that do not."""
    values = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    stored = Quantized(kind, shape, theirs(values, kind))
    weight = pack_weight(stored, packed)
    assert ggml_kind(weight) == kind
    again = repacked(weight, kind)
    assert again.shape == shape
    assert np.array_equal(again.data, stored.data)


@pytest.mark.parametrize(("packed", "kind"), [("q8", "Q8_0"), ("q4", "Q4_0"), ("q4m", "Q4_1")])
def test_what_the_kernels_rounded_keeps_its_values(packed: str, kind: str) -> None:
    """Not rounded a second time: the values are those of the packed weight, bit for bit."""
    values = np.random.default_rng(1).standard_normal((40, 128), dtype=np.float32)
    weight = pack_weight(values, packed)
    assert np.array_equal(repacked(weight, kind).dequantize(), weight.dequantize())


@pytest.mark.parametrize("packed", ["f32", "bf16", "q16"])
def test_other_kinds_have_no_groups(packed: str) -> None:
    assert ggml_kind(pack_weight(np.zeros((16, 64), dtype=np.float32), packed)) is None


def test_half_groups_have_no_place() -> None:
    values = np.zeros((16, 48), dtype=np.float32)
    data = pack_reference(values.view(np.uint8).reshape(16, -1), "F32", 48, "q8")
    assert ggml_kind(Packed.of_bytes("q8", (16, 48), data)) is None


def test_a_large_matrix_is_taken_back_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    from smollm2 import ggml_groups as module

    values = np.random.default_rng(2).standard_normal((100, 64), dtype=np.float32)
    stored = Quantized("Q8_0", (100, 64), theirs(values, "Q8_0"))
    monkeypatch.setattr(module, "_CHUNK", 2048)
    assert np.array_equal(repacked(pack_weight(stored, "q8"), "Q8_0").data, stored.data)


def test_the_real_file_comes_back(real_gguf: Path) -> None:
    """The first block's matrices of the real weights, which are Q4_1."""
    from smollm2.checkpoint import load_checkpoint

    block = load_checkpoint(real_gguf).weights.blocks[0]
    for stored in (block.attention.query, block.mlp.down):
        assert isinstance(stored, Quantized)
        assert np.array_equal(repacked(pack_weight(stored, "q4m"), "Q4_1").data, stored.data)
