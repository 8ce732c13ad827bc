"""Logprobs: log-softmax against float64, ranks, alternatives, and logits that are no numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra.numpy import arrays

from smollm2.errors import NumericsError
from smollm2.sampling import TokenLogprob, log_softmax, logprob_of

LOGITS = arrays(np.float32, st.integers(1, 30), elements=st.floats(-50, 50, width=32))


def reference(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    peak = wide.max(axis=-1, keepdims=True)
    return wide - peak - np.log(np.exp(wide - peak).sum(axis=-1, keepdims=True))


@given(LOGITS)
def test_log_softmax_equals_float64(logits):
    np.testing.assert_allclose(log_softmax(logits), reference(logits), rtol=1e-6, atol=1e-6)


def test_log_softmax_of_rows_of_the_real_width():
    logits = np.random.default_rng(0).normal(5, 4, (3, 2, 49152)).astype(np.float32)
    logprobs = log_softmax(logits)
    assert logprobs.dtype == np.float32
    np.testing.assert_allclose(logprobs, reference(logits), rtol=3e-7, atol=1e-6)
    assert np.exp(logprobs.astype(np.float64)).sum(axis=-1) == pytest.approx(1, abs=1e-5)


def test_log_softmax_of_large_logits():
    assert log_softmax(np.array([3e38, -3e38], dtype=np.float32))[0] == 0
    np.testing.assert_allclose(
        log_softmax(np.array([1e30, 1e30], dtype=np.float32)), -np.log(2), rtol=1e-6
    )


def test_log_softmax_takes_minus_infinity():
    logprobs = log_softmax(np.array([-np.inf, 1, 1], dtype=np.float32))
    assert logprobs.tolist() == pytest.approx([-np.inf, -np.log(2), -np.log(2)])


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ([0.0, np.nan, 1.0], "NaN"),
        ([np.inf, np.nan, 1.0], "NaN"),
        ([0.0, np.inf, 1.0], r"\+inf"),
        ([-np.inf, -np.inf, -np.inf], "nothing but -inf"),
    ],
)
def test_log_softmax_refuses_what_is_no_number(values, what):
    # cases: N1
    row = np.array(values, dtype=np.float32)
    with pytest.raises(NumericsError, match=what):
        log_softmax(row)
    with pytest.raises(NumericsError, match=what):
        log_softmax(np.stack([np.zeros(3, dtype=np.float32), row]))
    with pytest.raises(NumericsError, match=what):
        logprob_of(row, 0, 1)


@given(logits=LOGITS, top=st.integers(0, 20), data=st.data())
def test_logprob_of_equals_sorting_the_whole(logits, top, data):
    # table: row 89
    token_id = data.draw(st.integers(0, len(logits) - 1))
    logprobs = log_softmax(logits)
    order = sorted(range(len(logits)), key=lambda index: (-logprobs[index], index))
    got = logprob_of(logits, token_id, top)
    assert got.token_id == token_id
    assert got.logprob == logprobs[token_id]
    assert got.rank == 1 + order.index(token_id)
    assert got.top == tuple((index, logprobs[index]) for index in order[:top])
    assert sum(np.exp(logprob) for _, logprob in got.top) <= 1 + 1e-5


def test_ties_are_ranked_by_id():
    logits = np.array([1, 3, 3, 0, 3], dtype=np.float32)
    assert [logprob_of(logits, index).rank for index in range(5)] == [4, 1, 2, 5, 3]
    assert [index for index, _ in logprob_of(logits, 0, 2).top] == [1, 2]


def test_no_alternatives_unless_asked_for():
    logits = np.array([0, 0], dtype=np.float32)
    assert logprob_of(logits, 1) == TokenLogprob(1, pytest.approx(-np.log(2)), 2, ())


def test_values_are_python_numbers():
    got = logprob_of(np.arange(5, dtype=np.float32), 3, 2)
    assert [type(value) for value in (got.token_id, got.logprob, got.rank)] == [int, float, int]
    assert {type(value) for pair in got.top for value in pair} == {int, float}


def test_logits_stay_as_they_are():
    logits = np.arange(5, dtype=np.float32)
    logprob_of(logits, 1, 2)
    assert logits.tolist() == [0, 1, 2, 3, 4]
