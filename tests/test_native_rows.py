"""Kernels over single rows: rounding to 8 bits, norm, rotation, gate, sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from smollm2 import _native
from tests.packing import INTEGER_KINDS, ISAS, Floats, dequantized, linear, pack, random_weights

KERNELS = _native.kernels
lengths = st.integers(1, 200) | st.sampled_from([576, 960, 1536, 2048])
seeds = st.integers(0, 2**32 - 1)


def assert_same_bits_on_all(run: Callable[[str], NDArray[Any]]) -> None:
    want = run("scalar")
    for isa in ISAS[1:]:
        np.testing.assert_array_equal(run(isa), want, err_msg=isa)


def rounded(x: Floats) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """What quantize() has to give, in NumPy's float32: (q, scale, sum)."""
    m, cols = x.shape
    groups = np.zeros((m, -(-cols // 64) * 2, 32), dtype=np.float32)
    groups.reshape(m, -1)[:, :cols] = x
    magnitude = np.abs(groups).max(axis=2)
    zero = magnitude < 1e-30
    scale = np.where(zero, np.float32(0), magnitude / np.float32(127))
    with np.errstate(divide="ignore", over="ignore"):
        factor = np.where(zero, np.float32(0), np.float32(127) / magnitude)
    q = np.rint(groups * factor[:, :, None]).astype(np.int8)
    return q.reshape(m, -1), scale, q.sum(axis=2, dtype=np.int32)


finite_rows = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 3), st.integers(1, 140)),
    elements=st.floats(-(2.0**100), 2.0**100, width=32)
    | st.sampled_from([0.0, 1e-31, 1.5, -2.5, 1e-38]),
)


@settings(max_examples=60, deadline=None)
@given(x=finite_rows)
def test_a_row_is_rounded_as_the_formula_says(x: Floats) -> None:
    """Scale max/127 of each group, half to even, sums; zeros beyond the row's end."""
    for isa in ISAS:
        for got, want in zip(KERNELS.quantize(isa, x), rounded(x), strict=True):
            np.testing.assert_array_equal(got, want, err_msg=isa)


def test_halves_are_rounded_to_even() -> None:
    x = np.zeros((1, 64), dtype=np.float32)
    x[0, :6] = [127, 0.5, 1.5, 2.5, -0.5, -1.5]
    for isa in ISAS:
        q, scale, total = KERNELS.quantize(isa, x)
        assert q[0, :6].tolist() == [127, 0, 2, 2, 0, -2]
        assert scale.tolist() == [[1.0, 0.0]]
        assert total.tolist() == [[129, 0]]


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("twice", [False, True])
def test_a_group_that_is_not_finite_has_no_scale(bad: float, twice: bool) -> None:
    x = np.ones((1, 96), dtype=np.float32)
    for place in (32, 47, 63):
        x[0, 32:64] = 1
        x[0, place] = bad
        for isa in ISAS:
            q, scale, total = KERNELS.quantize(isa, x, twice)
            for row in range(len(q)):
                assert np.isnan(scale[row]).tolist() == [False, True, False, False]
                assert (q[row, 32:64] == 0).all()
                assert total[row, 1] == 0


@settings(max_examples=40, deadline=None)
@given(m=st.integers(1, 3), cols=lengths, seed=seeds)
def test_two_terms_are_within_a_508th_of_a_step(m: int, cols: int, seed: int) -> None:
    x = np.random.default_rng(seed).standard_normal((m, cols), dtype=np.float32)
    first = KERNELS.quantize("scalar", x)
    for isa in ISAS:
        rows = KERNELS.quantize(isa, x, twice=True)
        values = dequantized(rows, cols)
        step = np.repeat(rows[1][::2], 32, axis=1)[:, :cols]
        assert (np.abs(values[::2] + values[1::2] - x) <= step / 508 * 1.001 + 1e-9).all()
        for part, want in zip(rows, first, strict=True):
            np.testing.assert_array_equal(part[::2], want)
    for part in range(3):
        assert_same_bits_on_all(lambda isa, part=part: KERNELS.quantize(isa, x, twice=True)[part])


@pytest.mark.parametrize("kind", INTEGER_KINDS)
def test_two_terms_make_a_product_a_hundred_times_closer(kind: str) -> None:
    weights = pack(random_weights(64, 576), kind)
    x = random_weights(1, 576, seed=5)
    want = x.astype("f8") @ weights.values.astype("f8").T

    def error(got: Floats) -> float:
        return float(np.sqrt(np.mean((got - want) ** 2)))

    for isa in ISAS:
        once = linear(isa, weights, KERNELS.quantize(isa, x), 1)
        both = linear(isa, weights, KERNELS.quantize(isa, x, twice=True), 1, twice=True)
        assert error(both) < error(once) / 100


@settings(max_examples=40, deadline=None)
@given(cols=lengths, seed=seeds, exponent=st.integers(-10, 10))
def test_norm_is_within_a_few_roundings(cols: int, seed: int, exponent: int) -> None:
    """Of small and of large rows. cases: N2"""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(cols, dtype=np.float32) * np.float32(2.0**exponent)
    weight = rng.standard_normal(cols, dtype=np.float32)
    wide = x.astype("f8")
    want = wide / np.sqrt(np.mean(wide**2) + 1e-5) * weight
    got = KERNELS.rms_norm("scalar", x, weight, 1e-5)[0]
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-30)
    assert_same_bits_on_all(lambda isa: KERNELS.rms_norm(isa, x, weight, 1e-5))


@settings(max_examples=30, deadline=None)
@given(half=st.integers(1, 70), seed=seeds)
def test_rotation_has_the_bits_of_numpy(half: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    head = rng.standard_normal(2 * half, dtype=np.float32)
    angle = rng.uniform(-4, 4, half).astype(np.float32)
    cos, sin = np.cos(angle), np.sin(angle)
    a, b = head[:half], head[half:]
    want = np.concatenate([a * cos - b * sin, b * cos + a * sin])
    for isa in ISAS:
        np.testing.assert_array_equal(KERNELS.rope(isa, head, cos, sin)[0], want)


def test_gate_is_within_a_few_roundings_from_end_to_end() -> None:
    """Every size of gate; beyond 87 either way it is 0 or the gate itself."""
    gate = np.concatenate([np.linspace(-120, 120, 100_001), [0.0, -0.0, 1e-30, 3e38]])
    gate = gate.astype(np.float32)
    up = np.random.default_rng(0).standard_normal(len(gate), dtype=np.float32)
    wide = gate.astype("f8")
    want = wide / (1 + np.exp(-wide)) * up
    got = KERNELS.silu_mul("scalar", gate, up)[0]
    np.testing.assert_allclose(got, want, rtol=6e-7, atol=4e-35)
    assert_same_bits_on_all(lambda isa: KERNELS.silu_mul(isa, gate, up))


def test_gate_of_what_is_no_number_is_none() -> None:
    gate, up = np.array([np.nan, 1, np.inf], np.float32), np.array([1, np.nan, 2], np.float32)
    for isa in ISAS:
        got = KERNELS.silu_mul(isa, gate, up)[0]
        assert np.isnan(got).tolist() == [True, True, False]
        assert got[2] == np.inf


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a, b: KERNELS.rms_norm("scalar", a, b, 1e-5), "x and weight must have one length"),
        (lambda a, b: KERNELS.rope("scalar", a, b, b), "twice as many values"),
        (lambda a, b: KERNELS.silu_mul("scalar", a, b), "gate and up must have one length"),
        (lambda a, b: KERNELS.silu_mul("scalar", a, a.astype("f8")), "up must be a C-contiguous"),
        (lambda a, b: KERNELS.quantize("scalar", a), "x must be a C-contiguous float32 array of 2"),
        (lambda a, b: KERNELS.quantize("none", a[None]), "no kernels 'none' here"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(
    call: Callable[[Floats, Floats], object], message: str
) -> None:
    a, b = np.zeros(8, dtype=np.float32), np.zeros(5, dtype=np.float32)
    with pytest.raises(ValueError, match=message):
        call(a, b)
