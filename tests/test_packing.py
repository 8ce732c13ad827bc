"""Packing: tiles made and read in NumPy, held to a plain loop over the layout's description."""

from __future__ import annotations

import struct
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import quants
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from smollm2 import packing
from smollm2.errors import InputError
from smollm2.formats.smol import BLOCK_BYTES, packed_bytes, tile_bytes
from smollm2.packing import (
    WITHOUT_LOSS,
    Packed,
    fits_bf16,
    pack_reference,
    row_bytes,
    unpack_reference,
)
from smollm2.quantize import (
    Quantized,
    as_float32,
    kind_of,
    kind_without_loss,
    pack_weight,
)

KINDS = tuple(BLOCK_BYTES)
Floats = NDArray[np.float32]
shapes = st.tuples(st.integers(1, 40), st.integers(1, 150))
seeds = st.integers(0, 2**32 - 1)


def random(shape: tuple[int, int], seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32) * np.float32(0.05)


def pack(values: NDArray[Any], kind: str, **options: Any) -> NDArray[np.uint8]:
    return pack_reference(row_bytes(values), kind_of(values), values.shape[1], kind, **options)


def value_at(data: bytes, kind: str, cols: int, row: int, k: int) -> float:
    """One value, found by the description in kernels.h, with no array arithmetic."""
    lane, place = row % 16, k % 64
    start = row // 16 * tile_bytes(kind, cols) + k // 64 * BLOCK_BYTES[kind]
    block = data[start : start + BLOCK_BYTES[kind]]

    def half(line: int) -> float:
        offset = line * 64 + 2 * (place // 32 * 16 + lane)
        return float(struct.unpack_from("<e", block, offset)[0])

    if kind == "f32":
        return float(struct.unpack_from("<f", block, place * 64 + lane * 4)[0])
    if kind == "bf16":
        offset = place // 2 * 64 + lane * 4 + place % 2 * 2
        return float(struct.unpack("<f", b"\0\0" + block[offset : offset + 2])[0])
    if kind == "q16":
        return half(32) * float(struct.unpack_from("<h", block, (place * 16 + lane) * 2)[0])
    if kind == "q8":
        return half(16) * (block[place // 4 * 64 + lane * 4 + place % 4] - 128)
    quad = place // 4
    both = block[quad // 2 * 64 + lane * 4 + place % 4]
    nibble = both >> 4 if quad % 2 else both & 15
    return half(8) * (nibble - 8) if kind == "q4" else half(8) * nibble + half(9)


@pytest.mark.parametrize("kind", KINDS)
def test_the_layout_is_the_one_described(kind: str) -> None:
    """cases: feature 7: a scale for each 32 values"""
    shape = (19, 101)
    raw = pack(random(shape), kind)
    assert raw.size == packed_bytes(kind, shape)
    values = unpack_reference(raw, kind, *shape)
    data = raw.tobytes()
    expected = [
        [value_at(data, kind, shape[1], row, k) for k in range(shape[1])] for row in range(shape[0])
    ]
    np.testing.assert_array_equal(values, np.array(expected, dtype=np.float32))


@settings(deadline=None, max_examples=60)
@given(shape=shapes, seed=seeds, kind=st.sampled_from(KINDS))
def test_what_is_packed_comes_back(shape: tuple[int, int], seed: int, kind: str) -> None:
    """Packing what was unpacked gives the same values again, and they are near the first ones."""
    values = random(shape, seed)
    once = unpack_reference(pack(values, kind), kind, *shape)
    limits = {"f32": 0, "bf16": 2**-8, "q16": 2**-13, "q8": 2**-6, "q4": 0.2, "q4m": 0.15}
    assert np.abs(once - values).max() <= limits[kind] * np.abs(values).max()
    if kind in ("f32", "bf16"):
        assert np.array_equal(once, values.astype({"f32": "f4"}.get(kind, ml_dtypes.bfloat16)))
        assert np.array_equal(unpack_reference(pack(once, kind), kind, *shape), once)


@pytest.mark.parametrize("name", WITHOUT_LOSS)
@pytest.mark.parametrize("shape", [(1, 32), (17, 96), (50, 576)])
def test_groups_of_gguf_are_held_without_loss(name: str, shape: tuple[int, int]) -> None:
    """Random bits, also infinite scales, have the values that the gguf package gives them."""
    raw = quants.quantize(random(shape), gguf.GGMLQuantizationType[name])
    rng = np.random.default_rng(0)
    for kind in (WITHOUT_LOSS[name], "f32"):
        packed = pack_reference(raw, name, shape[1], kind)
        want = quants.dequantize(raw, gguf.GGMLQuantizationType[name])
        assert np.array_equal(unpack_reference(packed, kind, *shape), want)
    noise = rng.integers(0, 256, raw.shape, dtype=np.uint8)
    got = unpack_reference(
        pack_reference(noise, name, shape[1], WITHOUT_LOSS[name]), WITHOUT_LOSS[name], *shape
    )
    assert np.array_equal(got, Quantized(name, shape, noise).dequantize(), equal_nan=True)


@settings(deadline=None, max_examples=30)
@given(shape=shapes, seed=seeds, kind=st.sampled_from(KINDS))
def test_rows_go_where_the_order_says(shape: tuple[int, int], seed: int, kind: str) -> None:
    values = random(shape, seed)
    order = np.random.default_rng(seed).integers(-1, shape[0], 35).astype(np.int32)
    got = unpack_reference(pack(values, kind, row_order=order), kind, 35, shape[1])
    whole = unpack_reference(pack(values, kind), kind, *shape)
    assert np.array_equal(got, np.where(order[:, None] < 0, 0, whole[order]))


@pytest.mark.skipif(not packing.has_extension(), reason="the extension cannot pack")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1e-6, 1e-2, 1.0, 1e4, 1e12])
def test_the_extension_gives_the_same_bits(kind: str, size: float) -> None:
    for shape in (1, 32), (17, 96), (3, 1537), (33, 33):
        values = random(shape) * np.float32(size)
        values[0, 3] *= 40
        order = np.random.default_rng(1).integers(-1, shape[0], 21).astype(np.int32)
        for rows in None, order:
            expected = pack(values, kind, row_order=rows)
            got = packing.pack(row_bytes(values), "F32", shape[1], kind, rows)
            assert np.array_equal(got, expected)
            count = shape[0] if rows is None else len(rows)
            assert np.array_equal(
                packing.unpack(got, kind, count, shape[1]),
                unpack_reference(got, kind, count, shape[1]),
            )


def test_eight_bits_are_to_nearest_by_the_stored_scale() -> None:
    """cases: feature 4, with half floats as scales: the error is at most half a step"""
    for size in (1e-5, 1e-3, 1.0, 3e4):
        values = random((32, 96)) * np.float32(size)
        got = unpack_reference(pack(values, "q8"), "q8", 32, 96)
        greatest = np.abs(values.reshape(32, 3, 32)).max(axis=2)
        step = np.repeat(greatest / 127 * (1 + 2**-10) + 2**-24, 32, axis=1)
        assert (np.abs(got - values) <= step * 0.5001).all()


@pytest.mark.parametrize(("name", "kind"), [("Q4_0", "q4"), ("Q4_1", "q4m")])
def test_four_bits_are_nearer_than_ggml_s(name: str, kind: str) -> None:
    values = random((64, 576))
    ggml = quants.dequantize(
        quants.quantize(values, gguf.GGMLQuantizationType[name]), gguf.GGMLQuantizationType[name]
    )
    ours = unpack_reference(pack(values, kind), kind, *values.shape)
    assert np.mean((ours - values) ** 2) < 0.97**2 * np.mean((ggml - values) ** 2)


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_are_zeros(kind: str) -> None:
    zeros = np.zeros((5, 70), dtype=np.float32)
    assert np.array_equal(unpack_reference(pack(zeros, kind), kind, 5, 70), zeros)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_what_is_not_a_number_is_kept_or_refused(wrong: float) -> None:
    """cases: feature 12"""
    values = random((3, 64))
    values[2, 5] = wrong
    for kind in KINDS:
        if kind in ("f32", "bf16"):
            got = unpack_reference(pack(values, kind), kind, 3, 64)
            assert np.array_equal(got[2, 5], np.float32(wrong), equal_nan=True)
        else:
            with pytest.raises(InputError, match=f"cannot be packed as {kind}: pack them as f32"):
                pack(values, kind)


@pytest.mark.parametrize(
    ("data", "row_kind", "cols", "kind", "message"),
    [
        (np.zeros((2, 256), "u1"), "F32", 64, "q5", "unknown kind 'q5'"),
        (np.zeros((2, 256), "u1"), "Q4_K", 64, "q8", "cannot pack rows of Q4_K"),
        (np.zeros((2, 34), "u1"), "Q8_0", 32, "q4", "not held without loss by q4"),
        (np.zeros((2, 34), "u1"), "Q8_0", 33, "q8", "rows of 33 values in Q8_0"),
        (np.zeros((2, 255), "u1"), "F32", 64, "q8", r"cannot have shape \(2, 255\)"),
        (np.zeros((0, 256), "u1"), "F32", 64, "q8", "0 rows cannot be packed"),
    ],
)
def test_what_does_not_fit_is_refused(
    data: Any, row_kind: str, cols: int, kind: str, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        pack_reference(data, row_kind, cols, kind)
    with pytest.raises(InputError):
        packing.pack(data, row_kind, cols, kind)


def test_a_packed_matrix_is_a_weight() -> None:
    values = random((33, 100))
    packed = pack_weight(values, "q8")
    assert (packed.kind, packed.shape, kind_of(packed)) == ("q8", (33, 100), "q8")
    assert packed.nbytes == 3 * 2 * 17 * 64
    assert packed.bits_per_weight == 8 * packed.nbytes / 3300
    assert np.array_equal(as_float32(packed), unpack_reference(pack(values, "q8"), "q8", 33, 100))
    assert pack_weight(packed, "q8") is packed
    again = pack_weight(packed, "f32")
    assert np.array_equal(as_float32(again), as_float32(packed))
    with pytest.raises(InputError, match="needs bytes of shape"):
        Packed("q8", (33, 101), packed.data[:2])
    with pytest.raises(InputError, match="has two dimensions"):
        Packed("q8", (33,), packed.data)


def test_the_kind_that_loses_nothing() -> None:
    values = random((4, 64))
    assert kind_without_loss(values) == "f32"
    assert kind_without_loss(values.astype(ml_dtypes.bfloat16)) == "bf16"
    assert kind_without_loss(values.astype(ml_dtypes.bfloat16).astype(np.float32)) == "bf16"
    assert kind_without_loss(values.astype(np.float16)) == "f32"
    assert kind_without_loss(values.astype(np.float64)) is None
    assert fits_bf16(np.zeros((2, 2), dtype=np.float32))
    for name, kind in WITHOUT_LOSS.items():
        raw = quants.quantize(values, gguf.GGMLQuantizationType[name])
        raw[:, 4:] &= 0x33  # no group reaches its ends, so rounding anew would move the scale
        weight = Quantized(name, values.shape, raw)
        assert kind_without_loss(weight) == kind
        assert np.array_equal(as_float32(pack_weight(weight, kind)), weight.dequantize())
    assert kind_without_loss(Quantized("Q5_0", (4, 64), np.zeros((4, 44), np.uint8))) is None


def test_without_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    values = random((20, 70))
    expected = pack(values, "q4m")
    monkeypatch.setattr(packing, "compiled", lambda _: None)
    weight = pack_weight(values, "q4m")
    assert np.array_equal(weight.data.reshape(-1), expected)
    assert np.array_equal(weight.dequantize(), unpack_reference(expected, "q4m", 20, 70))


@pytest.mark.parametrize("dtype", [">f4", ">f2", np.float64])
def test_sources_of_any_byte_order(dtype: Any) -> None:
    values = random((5, 40)).astype(dtype)
    assert np.array_equal(as_float32(pack_weight(values, "f32")), values.astype(np.float32))
