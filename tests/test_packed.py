"""Arrays of training code as batches: padding, positions that start again, labels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from smollm2.backends.numpy import backend
from smollm2.backends.packed import next_labels, packed, sequences_of
from smollm2.batch import Batch, Span
from smollm2.causal_lm import NO_TARGET
from smollm2.errors import InputError
from tests.tiny import random_weights, tiny_config

CONFIG = tiny_config(num_hidden_layers=1)
MODEL = backend.load(CONFIG, random_weights(CONFIG, seed=3))
IDS = np.random.default_rng(7).integers(0, CONFIG.vocab_size, 24)


def array(*values: Any) -> Any:
    return np.array(values, np.int64)


def everything(count: int) -> Any:
    return np.ones(count, bool)


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    padding=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_any_order_of_tokens_equals_sequences_alone(
    lengths: list[int], padding: int, seed: int
) -> None:
    """Feature rows 58 and 118: packed sequences see only themselves, padding nothing."""
    ids = [IDS[6 * n : 6 * n + length] for n, length in enumerate(lengths)]
    tokens = np.concatenate([*ids, np.full(padding, 10**6)])
    positions = np.concatenate([*map(np.arange, lengths), np.full(padding, 10**6)])
    segments = np.repeat([*range(5, 5 + len(lengths)), -1], [*lengths, padding])
    order = np.random.default_rng(seed).permutation(len(tokens))
    got = packed(tokens[order], positions[order], segments[order], everything(len(order)))
    alone = [MODEL.hidden(Batch.build([Span(0, 0, part.tolist(), "all")])) for part in ids]
    assert (order[got.places] < sum(lengths)).all()
    np.testing.assert_allclose(
        MODEL.hidden(got.batch), np.concatenate(alone)[order[got.places]], rtol=1e-4, atol=1e-5
    )


def test_only_wanted_tokens_come_back() -> None:
    tokens, positions = IDS[:6], array(0, 1, 2, 0, 0, 1)
    segments = array(0, 0, 0, -1, 1, 1)
    got = packed(tokens, positions, segments, array(0, 1, 0, 1, 0, 1) > 0)
    assert got.places.tolist() == [1, 5]
    assert got.batch.wanted.tolist() == [1, 4]
    assert got.batch.lengths.tolist() == [3, 2]
    assert len(set(got.batch.slots.tolist())) == len(got.batch)
    large = packed(tokens + 2**32, positions - 2**32, segments, everything(6)).batch
    assert large.ids.min() == 2**31 - 1  # no model has it: no small id comes of it
    assert large.positions.max() < 0
    with pytest.raises(InputError, match="no tokens"):
        packed(tokens, positions, segments * 0 - 1, everything(6))


@pytest.mark.parametrize(
    ("mask", "positions", "segments"),
    [
        (None, [0, 1, 2, 3, 0, 1, 2, 3], [0, 0, 0, 0, 1, 1, 1, 1]),
        ([[1, 1, 0, 0], [1, 1, 1, 0]], [0, 1, 0, 0, 0, 1, 2, 0], [0, 0, -1, -1, 1, 1, 1, -1]),
        ([[0, 0, 1, 1], [0, 1, 1, 1]], [0, 0, 0, 1, 0, 0, 1, 2], [-1, -1, 0, 0, -1, 1, 1, 1]),
        ([[0, 0, 0, 0], [0, 1, 1, 0]], [0, 0, 0, 0, 0, 0, 1, 0], [-1, -1, -1, -1, -1, 0, 0, -1]),
    ],
)
def test_padding_on_either_side(mask: Any, positions: list[int], segments: list[int]) -> None:
    """Feature row 152."""
    got = sequences_of((2, 4), None if mask is None else np.array(mask), None)
    assert got[0].tolist() == positions
    assert got[1].tolist() == segments


def test_positions_that_start_again_are_new_sequences() -> None:
    positions, segments = sequences_of((2, 4), None, array([0, 1, 0, 1], [3, 4, 5, 0]))
    assert positions.tolist() == [0, 1, 0, 1, 3, 4, 5, 0]
    assert segments.tolist() == [0, 0, 1, 1, 2, 2, 2, 3]
    one_for_all = sequences_of((2, 2), array([0, 1], [1, 1]), array([0, 1]))
    assert [part.tolist() for part in one_for_all] == [[0, 1, 0, 1], [-1, 0, 1, 1]]


@pytest.mark.parametrize(
    ("mask", "position_ids", "message"),
    [
        (array([1, 0, 1]), None, "beside them"),
        (array([1, 2, 2]), None, "position_ids that start at 0"),
        (array([1, 1]), None, r"attention_mask has shape \[1, 2\], input_ids \[1, 3\]"),
        (None, array([0, 1]), r"position_ids have shape \[1, 2\], input_ids \[1, 3\]"),
    ],
)
def test_what_cannot_be_is_an_error(mask: Any, position_ids: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        sequences_of((1, 3), mask, position_ids)


def test_labels_stay_in_their_sequence() -> None:
    labels = array([1, 2, 3, 4], [5, NO_TARGET, 7, 8])
    segments = array(0, 0, 1, 1, 2, 2, 2, -1)
    i = NO_TARGET
    assert next_labels(labels, segments).tolist() == [2, i, 4, i, i, 7, i, i]
