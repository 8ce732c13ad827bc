"""Single kernels of every instruction set against NumPy in float64, and against each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from smollm2 import _native
from tests.packing import (
    FLOAT_KINDS,
    INTEGER_KINDS,
    ISAS,
    KINDS,
    Floats,
    Packed,
    dequantized,
    linear,
    pack,
    padded,
    random_weights,
)

KERNELS = _native.kernels
UNIT = 2.0**-24
"""Half the relative distance of two float32 numbers: the error of one rounding."""

shapes = st.tuples(st.integers(1, 70), st.integers(1, 700) | st.sampled_from([1536, 2048]))
seeds = st.integers(0, 2**32 - 1)


def activations_for(kind: str, x: Floats) -> Any:
    """Rows in the form that kernels of a kind take."""
    return KERNELS.quantize("scalar", x) if kind in INTEGER_KINDS else x


def reference(weights: Packed, x: Any) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The product in float64, and the sum of its terms' magnitudes."""
    values = dequantized(x, weights.cols) if weights.kind in INTEGER_KINDS else x.astype("f8")
    w = weights.values.astype("f8").T
    return values @ w, np.abs(values) @ np.abs(w)


def same_bits(a: NDArray[np.float32], b: NDArray[np.float32]) -> bool:
    return a.shape == b.shape and bool((a.view("u4") == b.view("u4")).all())


def test_scalar_is_always_there_and_the_best_is_chosen() -> None:
    assert ISAS[0] == "scalar"
    assert KERNELS.chosen() in ISAS


@settings(max_examples=60, deadline=None)
@given(kind=st.sampled_from(KINDS), shape=shapes, m=st.integers(1, 13), seed=seeds)
def test_linear_is_the_product_and_has_the_same_bits_everywhere(
    kind: str, shape: tuple[int, int], m: int, seed: int
) -> None:
    """Within a few roundings of each partial sum; every instruction set gives the same bits.

    cases: Q4, Q9
    """
    rows, cols = shape
    weights = pack(random_weights(rows, cols, seed), kind)
    x = np.random.default_rng(seed).standard_normal((m, cols), dtype=np.float32)
    given_x = activations_for(kind, x)
    want, magnitude = reference(weights, given_x)
    roundings = np.sqrt(cols if kind in FLOAT_KINDS else cols / 32) * 4 + 8
    results = [linear(isa, weights, given_x, m) for isa in ISAS]
    assert np.abs(results[0] - want).max() <= (roundings * UNIT * magnitude).max()
    assert (np.abs(results[0] - want) <= 8 * roundings * UNIT * magnitude + 1e-30).all()
    for result in results[1:]:
        assert same_bits(result, results[0])


@settings(max_examples=40, deadline=None)
@given(kind=st.sampled_from(INTEGER_KINDS), shape=shapes, m=st.integers(1, 13), seed=seeds)
def test_rows_in_two_terms_are_multiplied_as_one_number(
    kind: str, shape: tuple[int, int], m: int, seed: int
) -> None:
    """The product of what both terms stand for, the same bits everywhere."""
    rows, cols = shape
    weights = pack(random_weights(rows, cols, seed), kind)
    x = np.random.default_rng(seed).standard_normal((m, cols), dtype=np.float32)
    terms = KERNELS.quantize("scalar", x, twice=True)
    values = dequantized(terms, cols)
    w = weights.values.astype("f8").T
    both = values[::2] + values[1::2]
    roundings = np.sqrt(cols / 32) * 4 + 8
    results = [linear(isa, weights, terms, m, twice=True) for isa in ISAS]
    limit = 8 * roundings * UNIT * (np.abs(both) @ np.abs(w)) + 1e-30
    assert (np.abs(results[0] - both @ w) <= limit).all()
    for result in results[1:]:
        assert same_bits(result, results[0])
    last = tuple(part[-2:] for part in terms)
    assert same_bits(linear(ISAS[-1], weights, last, 1, twice=True), results[0][-1:])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_added_to_what_is_there(kind: str, isa: str) -> None:
    """In one rounding, also in the last columns."""
    weights = pack(random_weights(75, 128), kind)
    for m in (1, 3, 20):
        x = activations_for(kind, random_weights(m, 128, seed=3))
        there = random_weights(m, 75, seed=4)
        want = there + linear(isa, weights, x, m)
        assert same_bits(linear(isa, weights, x, m, out=there, add=True), want)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_in_any_batch(kind: str, isa: str) -> None:
    """However many rows there are, and wherever a row lies. cases: N3"""
    weights = pack(random_weights(75, 320), kind)
    x = np.random.default_rng(1).standard_normal((21, 320), dtype=np.float32)
    whole = linear(isa, weights, activations_for(kind, x), 21)
    for m in range(1, 21):
        part = linear(isa, weights, activations_for(kind, x[20 - m : 20]), m)
        assert same_bits(part, whole[20 - m : 20]), f"{m} rows"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", INTEGER_KINDS)
def test_rows_are_taken_from_the_first_one_on(kind: str, isa: str) -> None:
    weights = pack(random_weights(40, 96), kind)
    x = activations_for(kind, random_weights(9, 96, seed=2))
    whole = linear(isa, weights, x, 9)
    for first in range(9):
        assert same_bits(linear(isa, weights, x, 9 - first, first_row=first), whole[first:])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
def test_any_cut_of_tiles_gives_the_same_bits_and_touches_nothing_else(kind: str, isa: str) -> None:
    weights = pack(random_weights(75, 128), kind)  # five tiles, the last one of 11 rows
    for m in (1, 3, 20):
        x = activations_for(kind, random_weights(m, 128, seed=3))
        whole = linear(isa, weights, x, m)
        for first in range(6):
            for last in range(first, 6):
                part = linear(isa, weights, x, m, first=first, last=last)
                columns = slice(16 * first, 16 * last)
                assert same_bits(part[:, columns].copy(), whole[:, columns].copy())
                part[:, columns] = 7.5
                assert (part == 7.5).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_last_tile_writes_no_more_columns_than_there_are(kind: str, isa: str) -> None:
    weights = pack(random_weights(17, 64), kind)
    buffer = np.full((4, 17), 7.5, dtype=np.float32)
    x = activations_for(kind, random_weights(3, 64))
    linear(isa, weights, x, 3, out=buffer[:3])
    assert (buffer[3] == 7.5).all()
    assert same_bits(buffer[:3], linear("scalar", weights, x, 3))


@pytest.mark.parametrize("isa", ISAS)
def test_the_greatest_8_bit_products_do_not_saturate(isa: str) -> None:
    """Weights of -128 and 127 against activations of 127: over 16 bits in a pair of products."""
    groups = np.zeros((32, 2, 34), dtype=np.uint8)
    groups[:, :, 0:2] = np.array([1.0], dtype="<f2").view("u1")
    quants = np.where(np.arange(32)[:, None, None] % 2 == 0, -128, 127) * np.ones((1, 2, 32))
    groups[:, :, 2:] = quants.astype(np.int8).view(np.uint8)
    data = _native.pack(groups.reshape(32, -1), "Q8_0", 64, "q8")
    weights = Packed("q8", 32, 64, data, quants.reshape(32, 64).astype(np.float32))
    x = np.ones((5, 64), dtype=np.float32) * [[127], [-127], [127], [1], [127]]
    x[2, ::2] = -127
    rows = KERNELS.quantize(isa, x.astype(np.float32))
    np.testing.assert_array_equal(linear(isa, weights, rows, 5), x @ weights.values.T)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("name", "kind"), [("Q4_0", "q4"), ("Q4_1", "q4m")])
def test_the_greatest_4_bit_products_do_not_saturate(isa: str, name: str, kind: str) -> None:
    """Nibbles of 15 (and 0) against 127, a whole group long."""
    head = np.array([1.0] if name == "Q4_0" else [1.0, -8.0], dtype="<f2").view("u1")
    nibbles = np.full(16, 0xFF, dtype=np.uint8)
    row = np.tile(np.concatenate([head, nibbles]), 2)
    data = _native.pack(np.stack([row, row & 0xFF]), name, 64, kind)
    weights = Packed(kind, 2, 64, data, np.full((2, 64), 7, dtype=np.float32))
    x = np.full((3, 64), 127, dtype=np.float32)
    x[1] = -127
    rows = KERNELS.quantize(isa, x)
    np.testing.assert_array_equal(linear(isa, weights, rows, 3), x @ weights.values.T)


def test_what_is_no_number_spreads_over_its_row_alone() -> None:
    """Not finite activations give NaN, not some number; other rows are untouched. cases: N1"""
    for kind in INTEGER_KINDS:
        weights = pack(random_weights(20, 96), kind)
        x = random_weights(4, 96, seed=1)
        clean = linear("scalar", weights, KERNELS.quantize("scalar", x), 4)
        for bad in (np.nan, np.inf, -np.inf):
            x[2, 70] = bad
            for isa in ISAS:
                got = linear(isa, weights, KERNELS.quantize(isa, x), 4)
                assert np.isnan(got[2]).all()
                keep = [0, 1, 3]
                assert same_bits(got[keep], clean[keep])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_unpacks_to_the_values_of_the_matrix(kind: str, isa: str) -> None:
    """Also where columns end within a group, and rows within a tile."""
    for rows, cols in ((1, 1), (17, 33), (40, 100), (16, 64)):
        weights = pack(random_weights(rows, cols), kind)
        for row in range(rows):
            got = KERNELS.unpack_row(isa, weights.data, kind, rows, cols, row)
            assert same_bits(got.reshape(-1), weights.values[row])


BAD_CALLS: list[tuple[dict[str, Any], str]] = [
    ({"isa": "mmx"}, "no kernels 'mmx' here: choose from scalar"),
    ({"kind": "q5"}, "unknown kind of packed weight 'q5': choose from f32"),
    ({"kind": "f32"}, "a packed f32 matrix of 20 x 96"),
    ({"cols": 200}, "a packed bf16 matrix of 20 x 200 has 16384 bytes: got 8192"),
    ({"cols": 0}, "needs rows and columns"),
    ({"x": np.zeros((4, 96), dtype=np.float32)}, r"activations must be \[4, 128\]: got \[4, 96\]"),
    ({"x": np.zeros((4, 128))}, "x must be a C-contiguous float32 array of 2 dimensions"),
    ({"x": np.zeros((8, 128), dtype=np.float32)[::2]}, "x must be a C-contiguous"),
    ({"out": np.zeros((4, 20))}, "out must be a C-contiguous float32"),
    ({"out": np.zeros((20, 4), dtype=np.float32).T}, "out must be a C-contiguous"),
    ({"packed": np.zeros(8192, dtype=np.int8)}, "packed must be a C-contiguous uint8 array of 1"),
    ({"first": -1}, "tiles -1 to 2 of a matrix of 2"),
    ({"last": 3}, "tiles 0 to 3 of a matrix of 2"),
    ({"first": 2, "last": 1}, "tiles 2 to 1"),
]


@pytest.mark.parametrize(("change", "message"), BAD_CALLS)
def test_wrong_input_is_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    weights = pack(random_weights(20, 96), "bf16")
    call: dict[str, Any] = {
        "isa": "scalar",
        "packed": weights.data,
        "kind": "bf16",
        "cols": 96,
        "x": np.zeros((4, 128), dtype=np.float32),
        "out": np.zeros((4, 20), dtype=np.float32),
    }
    KERNELS.linear_float(**call)
    with pytest.raises(ValueError, match=message) as caught:
        KERNELS.linear_float(**{**call, **change})
    assert "\n" not in str(caught.value)


def test_a_kernel_refuses_the_other_kinds_and_rows_that_are_not_there() -> None:
    rows = KERNELS.quantize("scalar", np.zeros((4, 96), dtype=np.float32))
    floats = np.zeros((4, padded(96)), dtype=np.float32)
    out = np.zeros((4, 20), dtype=np.float32)
    dense, small = pack(random_weights(20, 96), "f32"), pack(random_weights(20, 96), "q4")
    with pytest.raises(ValueError, match="f32 takes activations as floats"):
        KERNELS.linear_integer("scalar", dense.data, "f32", 96, rows, out)
    with pytest.raises(ValueError, match="q4 takes quantized activations"):
        KERNELS.linear_float("scalar", small.data, "q4", 96, floats, out)
    with pytest.raises(ValueError, match="rows 1 to 5 of 4 quantized activations"):
        KERNELS.linear_integer("scalar", small.data, "q4", 96, rows, out, first_row=1)
    narrow = KERNELS.quantize("scalar", np.zeros((4, 64), dtype=np.float32))
    with pytest.raises(ValueError, match="do not fit 96 columns"):
        KERNELS.linear_integer("scalar", small.data, "q4", 96, narrow, out)
