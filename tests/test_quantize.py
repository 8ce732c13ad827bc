"""Quantized weights: bit for bit what the ``gguf`` package decodes."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import quants
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from smollm2.errors import InputError
from smollm2.formats.gguf import GROUPS, open_gguf
from smollm2.quantize import Quantized, as_float32, kind_of

KINDS = list(GROUPS)
SPECIAL = np.array(
    [0.0, -0.0, 1.0, -1.0, 65504.0, -65504.0, 6e-8, -6e-8, 6.1e-5, np.inf, -np.inf, np.nan], "<f2"
)
"""Zeros, the largest, the smallest normal and subnormal, and what is no number."""
HALVES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
}
"""Where in a group the float16 scales lie, as ggml's structs say."""


def made(kind: str, shape: tuple[int, ...], seed: int = 0) -> Quantized:
    """A weight of random bytes, scales included."""
    values, nbytes = GROUPS[kind]
    rows = (int(np.prod(shape[:-1])), shape[-1] // values * nbytes)
    data = np.random.default_rng(seed).integers(0, 256, rows, dtype=np.uint8)
    return Quantized(kind, shape, data)


def reference(weight: Quantized) -> NDArray[np.float32]:
    with np.errstate(all="ignore"):
        values = quants.dequantize(weight.data, gguf.GGMLQuantizationType[weight.kind])
    return np.asarray(values, dtype=np.float32).reshape(weight.shape)


def assert_bit_equal(got: NDArray[Any], want: NDArray[Any]) -> None:
    """Equal bits; of what is no number, that it is none: its bits are the processor's choice."""
    assert got.dtype == want.dtype == np.float32
    assert got.shape == want.shape
    numbers = ~np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), ~numbers)
    np.testing.assert_array_equal(got[numbers].view("u4"), want[numbers].view("u4"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 256), (7, 512), (512,), (2, 3, 256), (300, 1024)])
def test_random_bytes_decode_as_the_package_decodes_them(kind: str, shape: tuple[int, ...]) -> None:
    weight = made(kind, shape)
    got = weight.dequantize()
    assert_bit_equal(got, reference(weight))
    assert got.flags.c_contiguous
    assert got.flags.writeable


@pytest.mark.parametrize("kind", KINDS)
def test_special_scales_decode_without_a_warning(kind: str) -> None:
    """Warnings are errors here, so infinities and NaNs must pass in silence."""
    weight = made(kind, (len(SPECIAL) ** len(HALVES[kind]), GROUPS[kind][0]))
    for scales, data in zip(
        np.stack(np.meshgrid(*[SPECIAL] * len(HALVES[kind])), -1).reshape(len(weight.data), -1),
        weight.data,
        strict=True,
    ):
        for place, scale in zip(HALVES[kind], scales, strict=True):
            data[place : place + 2] = scale[None].view(np.uint8)
    assert_bit_equal(weight.dequantize(), reference(weight))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(KINDS), st.integers(0, 40), st.integers(1, 4), st.integers(0, 2**32))
def test_any_number_of_rows_and_groups(kind: str, rows: int, groups: int, seed: int) -> None:
    weight = made(kind, (rows, groups * GROUPS[kind][0]), seed)
    want = reference(weight) if rows else np.empty(weight.shape, np.float32)
    assert_bit_equal(weight.dequantize(), want)


def test_a_quantizer_and_our_decoder_meet_near_the_original() -> None:
    """The package packs; what we unpack is within half a step of each group's range."""
    dense = np.random.default_rng(0).standard_normal((64, 576)).astype(np.float32)
    for kind, steps in {"Q4_0": 7, "Q4_1": 15, "Q5_0": 15, "Q5_1": 31, "Q8_0": 127}.items():
        data = quants.quantize(dense, gguf.GGMLQuantizationType[kind])
        error = np.abs(Quantized(kind, dense.shape, data).dequantize() - dense)
        assert error.max() < 1.1 * np.abs(dense).max() / steps
        assert error.max() > 0


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_taken_without_decoding_the_rest(kind: str) -> None:
    weight = made(kind, (9, 512))
    index = np.array([[3, 8, 0], [3, 3, 1]])
    taken = weight.take_rows(index)
    assert (taken.kind, taken.shape, taken.data.shape[0]) == (kind, (2, 3, 512), 6)
    assert_bit_equal(taken.dequantize(), weight.dequantize()[index])
    assert weight.take_rows(np.array(4)).shape == (512,)
    assert weight.take_rows(np.zeros(0, np.int64)).dequantize().shape == (0, 512)


def test_rows_that_are_not_there_are_refused() -> None:
    weight = made("Q8_0", (9, 64))
    for index in (9, -1):
        with pytest.raises(InputError, match="of a matrix of 9"):
            weight.take_rows(np.array([0, index]))
    with pytest.raises(InputError, match=r"not of shape \(64,\)"):
        made("Q8_0", (64,)).take_rows(np.array([0]))


# cases: Q1
@pytest.mark.parametrize(("kind", "bits"), [("Q4_1", 5), ("Q8_0", 8.5), ("Q6_K", 6.5625)])
def test_size_and_bits_count_the_scales(kind: str, bits: float) -> None:
    weight = made(kind, (4, 512))
    assert weight.bits_per_weight == bits
    assert weight.nbytes == 4 * 512 * bits / 8 == weight.data.size
    assert repr(weight) == f"Quantized(kind='{kind}', shape=(4, 512))"


# cases: Q2
@pytest.mark.parametrize(
    ("kind", "shape", "data", "message"),
    [
        ("Q9_9", (32,), np.zeros((1, 20), "u1"), "unknown quantized kind 'Q9_9': known are Q4_0"),
        ("F32", (32,), np.zeros((1, 128), "u1"), "unknown quantized kind 'F32'"),
        ("Q4_K", (2, 576), np.zeros((2, 324), "u1"), "Q4_K needs rows of a multiple of 256"),
        ("Q4_1", (), np.zeros((1, 20), "u1"), "Q4_1 needs rows"),
        (
            "Q4_1",
            (2, 32),
            np.zeros((2, 18), "u1"),
            r"bytes of shape \(2, 20\): got uint8 \(2, 18\)",
        ),
        ("Q4_1", (2, 32), np.zeros(40, "u1"), r"got uint8 \(40,\)"),
        ("Q4_1", (2, 32), np.zeros((2, 20), "i1"), "got int8"),
    ],
)
def test_a_weight_whose_parts_do_not_fit_is_refused(
    kind: str, shape: tuple[int, ...], data: NDArray[Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        Quantized(kind, shape, data)


def test_the_kinds_of_weights() -> None:
    assert kind_of(made("Q4_1", (2, 32))) == "Q4_1"
    for dtype, kind in {"f4": "F32", ">f4": "F32", "f2": "F16", "f8": "F64", "i1": "I8"}.items():
        assert kind_of(np.zeros(2, dtype)) == kind
    assert kind_of(np.zeros(2, ml_dtypes.bfloat16)) == "BF16"
    with pytest.raises(InputError, match="cannot be an array of complex64"):
        kind_of(np.zeros(2, "c8"))


def test_dense_weights_become_contiguous_float32() -> None:
    dense = np.random.default_rng(0).standard_normal((6, 4))
    for dtype in ("f2", "f8", ">f4", ml_dtypes.bfloat16):
        weight = dense.astype(dtype)
        for view in (weight, weight.T, weight[::2], weight[0, 0, ...]):
            got = as_float32(view)
            assert got.dtype == np.float32
            assert got.flags.c_contiguous
            assert got.shape == view.shape
            np.testing.assert_array_equal(got, view.astype(np.float32))
    same = dense.astype(np.float32)
    assert as_float32(same) is same
    quantized = made("Q4_1", (2, 32))
    assert_bit_equal(as_float32(quantized), reference(quantized))
    for dtype in ("i4", "?", "u1"):
        with pytest.raises(InputError, match="must be floating-point"):
            as_float32(np.zeros(2, dtype))


def test_decoding_holds_little_more_than_its_result() -> None:
    for kind in KINDS:
        weight = made(kind, (4096, 1024))
        tracemalloc.start()
        out = weight.dequantize()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < out.nbytes + 2**22


@pytest.mark.weights
def test_the_real_tensors_decode_bit_for_bit_and_in_a_moment(real_gguf: Path) -> None:
    file = open_gguf(real_gguf)
    weights = [
        Quantized(entry.kind, entry.shape, file.raw(name).reshape(entry.shape[0], -1))
        for name, entry in file.entries.items()
        if not entry.is_dense
    ]
    assert len(weights) == 211
    start = time.perf_counter()
    decoded = [weight.dequantize() for weight in weights]
    assert time.perf_counter() - start < 5  # half a second here; a bound for a busy machine
    for weight, values in zip(weights, decoded, strict=True):
        assert_bit_equal(values, reference(weight))
