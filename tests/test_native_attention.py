"""Native attention over pages of cached keys and values, held to float64 in NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

native: Any = pytest.importorskip("smollm2._native")

PAGE = 64
KINDS = ("f32", "int16", "int8")
SIZES = (16, 32, 64)
ISAS = tuple(native.kernels.isa_names())
AT_ONCE = 4
"""Pages with one softmax."""
TOGETHER = 32
"""Places whose probabilities share a scale."""

LOG2E = np.float32(np.log2(np.e))

Floats = NDArray[np.float32]
Arrays = tuple[Floats, Floats, Floats]


@dataclass(frozen=True)
class Case:
    """Queries [R, D], keys and values [P · 64, D], places that each query sees [R]."""

    queries: Floats
    keys: Floats
    values: Floats
    visible: NDArray[np.int32]


@st.composite
def cases(draw: st.DrawFn, sizes: tuple[int, ...] = SIZES) -> Case:
    """Rows around the groups of three, pages around the four that share a softmax."""
    size = draw(st.sampled_from(sizes))
    rows, pages = draw(st.integers(1, 14)), draw(st.integers(1, 9))
    visible = draw(st.lists(st.integers(0, pages * PAGE), min_size=rows, max_size=rows))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from([0.01, 0.5, 4.0]))
    return Case(
        queries=(rng.standard_normal((rows, size)) * spread).astype(np.float32),
        keys=rng.standard_normal((pages * PAGE, size), dtype=np.float32),
        values=rng.standard_normal((pages * PAGE, size), dtype=np.float32),
        visible=np.array(visible, dtype=np.int32),
    )


def blocks_of(isa: str, kind: str, keys: Floats, values: Floats) -> NDArray[np.uint8]:
    """Keys and values written place by place."""
    shape = (len(keys) // PAGE, native.attention.kv_block_bytes(kind, keys.shape[1]))
    blocks = np.zeros(shape, dtype=np.uint8)
    for place, (key, value) in enumerate(zip(keys, values, strict=True)):
        block, at = divmod(place, PAGE)
        native.attention.kv_write(isa, kind, blocks, block, at, key, value)
    return blocks


def attend(isa: str, kind: str, case: Case, blocks: NDArray[np.uint8]) -> Arrays:
    """One call over all blocks; the kernels' softmax has base 2."""
    return natural(native.attention.attend(isa, kind, case.queries * LOG2E, blocks, case.visible))


def natural(result: Arrays) -> Arrays:
    """Maxima of scores with base e."""
    return result[0] / LOG2E, result[1], result[2]


def top(kind: str, size: int, *, keys: bool) -> np.float32:
    """The greatest whole number of a key or a value [D]."""
    if not keys or kind == "int8":
        return np.float32(127)
    return np.float32(min(32767, int(np.sqrt((2**31 - 1) / size) - 0.5)))


def stored(kind: str, rows: Floats, *, keys: bool) -> NDArray[np.float64]:
    """Rows as a cache of this kind keeps them."""
    if kind == "f32":
        return rows.astype(np.float64)
    greatest = np.abs(rows).max(axis=1, keepdims=True)
    most = top(kind, rows.shape[1], keys=keys)
    factor = most / np.where(greatest == 0, np.float32(1), greatest)
    rounded: NDArray[np.float64] = np.rint(rows * factor).astype(np.float64)
    scaled: NDArray[np.float64] = rounded * (greatest / most)
    return scaled


def softmax(case: Case, kind: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Scores' maxima [R] and probabilities [R, S] in float64; rows that see nothing are zeros."""
    scores = case.queries.astype(np.float64) @ stored(kind, case.keys, keys=True).T
    hidden = np.arange(len(case.keys)) >= case.visible[:, None]
    scores[hidden] = -np.inf
    maxima = scores.max(axis=1)
    with np.errstate(invalid="ignore"):
        weights = np.where(hidden, 0.0, np.exp(scores - maxima[:, None]))
    total = weights.sum(axis=1, keepdims=True)
    return maxima, np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)


def tolerances(kind: str, case: Case, weights: NDArray[np.float64]) -> Any:
    """What may be off: scores (absolute), and mixed values [R, D], given float64's weights."""
    # Of a query's elements: what a sum of floats loses, or half of a whole number.
    size = case.queries.shape[1]
    step = {"f32": 2.0**-21, "int16": 0.5 / top("int16", size, keys=True), "int8": 2.0**-16}[kind]
    scores = 2 * step * np.abs(case.queries).max() * np.abs(case.keys).max() * np.sqrt(size)
    relative = scores + 1e-6
    mixed = relative * (weights @ np.abs(case.values))
    if kind != "f32":
        # Each probability times its value's scale is off by half of 1/255 of the greatest of 32.
        scales = np.abs(case.values).max(axis=1)
        edges = np.arange(0, weights.shape[1], TOGETHER)
        greatest = np.maximum.reduceat(weights * scales, edges, axis=1).sum(axis=1, keepdims=True)
        mixed = mixed + 3 * np.sqrt(TOGETHER) * greatest / 510
    return scores, mixed


def check(kind: str, case: Case, result: Arrays) -> None:
    """Maxima, sums and mixed values are those of float64, within what the kind rounds."""
    maxima, sums, mixed = result
    expected, weights = softmax(case, kind)
    sees = case.visible > 0
    assert (maxima[~sees] == -np.inf).all()
    assert not sums[~sees].any()
    assert not mixed[~sees].any()
    scores, bounds = tolerances(kind, case, weights)
    assert np.allclose(maxima[sees], expected[sees], atol=scores, rtol=1e-6)
    got = mixed[sees] / sums[sees, None]
    assert (
        np.abs(got - weights[sees] @ stored(kind, case.values, keys=False)) <= bounds[sees]
    ).all()


COMBINATIONS = list(product(ISAS, KINDS))


@pytest.mark.parametrize(("isa", "kind"), COMBINATIONS)
@settings(max_examples=25, deadline=None)
@given(case=cases())
def test_attend_agrees_with_float64(isa: str, kind: str, case: Case) -> None:
    check(kind, case, attend(isa, kind, case, blocks_of(isa, kind, case.keys, case.values)))


@pytest.mark.parametrize(("isa", "kind"), COMBINATIONS)
@settings(max_examples=10, deadline=None)
@given(case=cases(sizes=(2, 10, 24, 80, 128, 256)))
def test_any_even_head_size(isa: str, kind: str, case: Case) -> None:
    check(kind, case, attend(isa, kind, case, blocks_of(isa, kind, case.keys, case.values)))


@pytest.mark.parametrize(("isa", "kind"), COMBINATIONS)
@settings(max_examples=10, deadline=None)
@given(case=cases(), data=st.data())
def test_bits_of_a_row_do_not_depend_on_others(
    isa: str, kind: str, case: Case, data: st.DataObject
) -> None:
    blocks = blocks_of(isa, kind, case.keys, case.values)
    whole = attend(isa, kind, case, blocks)
    rows = data.draw(st.permutations(range(len(case.queries))))
    some = np.array(rows[: data.draw(st.integers(1, len(rows)))])
    part = Case(case.queries[some], case.keys, case.values, case.visible[some])
    for all_rows, these in zip(whole, attend(isa, kind, part, blocks), strict=True):
        assert all_rows[some].tobytes() == these.tobytes()


@pytest.mark.parametrize(("isa", "kind"), COMBINATIONS)
@settings(max_examples=10, deadline=None)
@given(case=cases(), data=st.data())
def test_chunks_merge_into_the_whole(isa: str, kind: str, case: Case, data: st.DataObject) -> None:
    blocks = blocks_of(isa, kind, case.keys, case.values)
    cut = data.draw(st.integers(0, len(blocks)))

    def chunked() -> Arrays:
        queries = case.queries * LOG2E
        first = native.attention.attend(isa, kind, queries, blocks[:cut], case.visible)
        left = case.visible - np.int32(PAGE * cut)
        second = native.attention.attend(isa, kind, queries, blocks[cut:], left)
        return natural(native.attention.merge(isa, first, second))

    merged = chunked()
    check(kind, case, merged)
    if cut % AT_ONCE == 0 and len(blocks) - cut <= AT_ONCE:  # the bits of one call
        for once, again in zip(merged, attend(isa, kind, case, blocks), strict=True):
            assert once.tobytes() == again.tobytes()


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10, deadline=None)
@given(case=cases())
def test_every_instruction_set_gives_the_same_bits(kind: str, case: Case) -> None:
    """Single FMAs in one order, or whole numbers: nothing is left to the instruction set."""
    blocks = blocks_of("scalar", kind, case.keys, case.values)
    expected = attend("scalar", kind, case, blocks)
    for isa in ISAS:
        assert blocks_of(isa, kind, case.keys, case.values).tobytes() == blocks.tobytes()
        for ours, theirs in zip(attend(isa, kind, case, blocks), expected, strict=True):
            assert ours.tobytes() == theirs.tobytes()


def read_back(kind: str, blocks: NDArray[np.uint8], size: int) -> tuple[Floats, Floats]:
    """Keys and values [S, D] out of their blocks, by the layouts of kernels.h."""
    width, of_keys = {"f32": (1, "f4"), "int16": (2, "i2"), "int8": (4, "u1")}[kind]
    places, of_values = (1, "f4") if kind == "f32" else (4, "i1")
    columns, steps = -(-size // 16) * 16, -(-size // width)
    edge = PAGE * steps * 4
    keys = blocks[:, :edge].copy().view(of_keys).reshape(-1, steps, PAGE, width)
    keys = keys.transpose(0, 2, 1, 3).reshape(-1, steps * width)[:, :size]
    end = edge + PAGE * columns * 4 // places
    values = blocks[:, edge:end].copy().view(of_values).reshape(-1, PAGE // places, columns, places)
    values = values.transpose(0, 1, 3, 2).reshape(-1, columns)[:, :size]
    if kind == "f32":
        return keys, values
    scales = blocks[:, end:].copy().view(np.float32).reshape(-1, 2, PAGE)
    keys = keys.astype(np.float32) - (128 if kind == "int8" else 0)
    return keys * scales[:, 0].reshape(-1, 1), values * scales[:, 1].reshape(-1, 1)


@pytest.mark.parametrize(("isa", "kind"), COMBINATIONS)
@pytest.mark.parametrize("size", [2, 10, 16, 24, 64])
def test_written_places_read_back(isa: str, kind: str, size: int) -> None:
    rng = np.random.default_rng(size)
    keys, values = rng.standard_normal((2, 2 * PAGE, size), dtype=np.float32)
    keys[5], values[6] = 0, 0
    blocks = np.zeros((2, native.attention.kv_block_bytes(kind, size)), dtype=np.uint8)
    for place in rng.permutation(2 * PAGE).tolist():  # in any order, and over what was there
        for key, value in ((values[place], keys[place]), (keys[place], values[place])):
            native.attention.kv_write(isa, kind, blocks, place // PAGE, place % PAGE, key, value)
    got_keys, got_values = read_back(kind, blocks, size)
    assert np.allclose(got_keys, stored(kind, keys, keys=True), rtol=1e-6, atol=0)
    assert np.allclose(got_values, stored(kind, values, keys=False), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("isa", "kind"), COMBINATIONS)
def test_places_that_nobody_sees_do_not_count(isa: str, kind: str) -> None:
    """Another sequence's huge numbers in the rest of a page change no bit."""
    rng = np.random.default_rng(1)
    keys, values = rng.standard_normal((2, 2 * PAGE, 32), dtype=np.float32)
    visible = np.array([70, 71, 1, 64, 0], dtype=np.int32)
    case = Case(rng.standard_normal((5, 32), dtype=np.float32), keys, values, visible)
    clean = attend(isa, kind, case, blocks_of(isa, kind, keys, values))
    keys[71:], values[71:] = 1e30, -1e30
    dirty = attend(isa, kind, case, blocks_of(isa, kind, keys, values))
    for before, after in zip(clean, dirty, strict=True):
        assert before.tobytes() == after.tobytes()


@pytest.mark.parametrize(("isa", "kind"), COMBINATIONS)
def test_extreme_scores(isa: str, kind: str) -> None:
    """Scores far apart, all alike, and beyond float's range: weights stay 0 … 1."""
    keys = np.zeros((2 * PAGE, 16), dtype=np.float32)
    values = np.ones((2 * PAGE, 16), dtype=np.float32)
    keys[3], values[3] = 100.0, 2.0
    queries = np.array([[100.0], [-100.0], [0.0], [-1e37]], dtype=np.float32).repeat(16, axis=1)
    case = Case(queries, keys, values, np.full(4, 2 * PAGE, dtype=np.int32))
    _, sums, mixed = attend(isa, kind, case, blocks_of(isa, kind, keys, values))
    got = mixed[:, 0] / sums
    assert np.allclose(got[:3], [2.0, 1.0, 129 / 128], rtol=1e-2)
    assert abs(got[3] - 1.0) < 1e-4  # one score is -inf
    only = Case(queries[3:], keys, values, np.ones(1, dtype=np.int32))
    blocks = blocks_of(isa, kind, np.roll(keys, -3, axis=0), values)
    maxima, sums, mixed = attend(isa, kind, only, blocks)
    assert maxima.tolist() == [-np.inf]  # all that it sees is -inf: as if it saw nothing
    assert not sums.any()
    assert not mixed.any()


@pytest.mark.parametrize("isa", ISAS)
def test_many_queries_of_a_prefill(isa: str) -> None:
    """More rows than are prepared at a time, each a causal step further."""
    rng = np.random.default_rng(2)
    keys, values = rng.standard_normal((2, 5 * PAGE, 64), dtype=np.float32)
    queries = rng.standard_normal((300, 64), dtype=np.float32) / np.float32(8)
    case = Case(queries, keys, values, np.arange(1, 301, dtype=np.int32))
    check("int16", case, attend(isa, "int16", case, blocks_of(isa, "int16", keys, values)))


@pytest.mark.parametrize("isa", ISAS)
def test_merging_with_nothing(isa: str) -> None:
    """An empty part changes nothing, an empty total becomes the part; no NaN from -inf - -inf."""
    rng = np.random.default_rng(3)
    some = (np.array([-5.0, 3.0], np.float32), np.array([2.0, 1.0], np.float32))
    full: Arrays = (*some, rng.standard_normal((2, 24), dtype=np.float32))
    empty: Arrays = (np.full(2, -np.inf, np.float32), np.zeros(2, np.float32), full[2] * 0)
    for total, part, expected in ((full, empty, full), (empty, full, full), (empty, empty, empty)):
        for got, want in zip(native.attention.merge(isa, total, part), expected, strict=True):
            assert (got == want).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_numbers_that_are_not_finite_stay_visible(isa: str, bad: float) -> None:
    """A broken model shows as NaN, in every kind, and not as some plausible text."""
    for kind, which in product(KINDS, ("queries", "keys", "values")):
        arrays = {name: np.ones((PAGE, 16), np.float32) for name in ("queries", "keys", "values")}
        arrays[which][:, 3] = bad
        case = Case(
            arrays["queries"][:1], arrays["keys"], arrays["values"], np.array([9], np.int32)
        )
        _, sums, mixed = attend(isa, kind, case, blocks_of(isa, kind, case.keys, case.values))
        assert not np.isfinite(mixed / sums).all()


@pytest.mark.parametrize("size", [0, -2, 7, 258])
def test_head_sizes_that_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"head size of {size} is not an even number in 2"):
        native.attention.kv_block_bytes("f32", size)


@pytest.mark.parametrize(("kind", "size"), list(product(KINDS, SIZES)))
def test_blocks_are_whole_lines(kind: str, size: int) -> None:
    place = {"f32": 8 * size, "int16": 3 * size + 8, "int8": 2 * size + 8}[kind]
    assert native.attention.kv_block_bytes(kind, size) == PAGE * place
    assert native.attention.kv_block_bytes(kind, size) % 64 == 0
