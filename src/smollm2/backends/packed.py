"""Packed sequences: arrays that training code has, as the batch of a forward without a cache.

Sequences lie one after the other in one dimension, or padded in two as transformers has them.
P places, B rows of S places each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smollm2.batch import Batch
from smollm2.causal_lm import NO_TARGET
from smollm2.errors import InputError

Indices = NDArray[np.int64]
Mask = NDArray[np.bool_]

_LIMITS = np.iinfo(np.int32)


@dataclass(frozen=True, slots=True)
class Packed:
    """A batch, and where each of its wanted tokens was among the P places that it was made of."""

    batch: Batch
    places: Indices


def packed(tokens: Indices, positions: Indices, segments: Indices, wanted: Mask) -> Packed:
    """Tokens [P] that see those of their own segment up to their own position, in any order.

    Places of negative segments are padding: nothing of them is read. Raises ``InputError`` where
    there is nothing else.
    """
    real = np.flatnonzero(segments >= 0)
    if len(real) == 0:
        raise InputError("there are no tokens: all segments are negative, which is padding")
    places = np.flatnonzero(wanted[real])
    ids, where = (np.clip(part[real], _LIMITS.min, _LIMITS.max) for part in (tokens, positions))
    names, rows = np.unique(segments[real], return_inverse=True)
    size = max(1, int(where.max()) + 1)
    lengths = np.zeros(len(names), np.int32)
    np.maximum.at(lengths, rows, (where + 1).astype(np.int32))
    batch = Batch(
        ids=ids.astype(np.int32),
        positions=where.astype(np.int32),
        rows=rows.astype(np.int32),
        slots=(rows * size + where).astype(np.int32),
        page_table=np.arange(len(names), dtype=np.int32)[:, None],
        segments=rows.astype(np.int32),
        lengths=lengths,
        wanted=places.astype(np.int32),
        page_size=size,
    )
    return Packed(batch, real[places])


def sequences_of(
    shape: tuple[int, int], mask: Any, position_ids: Any, xp: Any = np
) -> tuple[Any, Any]:
    """Positions and segments, each [B·S], of padded rows; a segment of -1 is padding.

    ``mask`` [B, S] is 1 for tokens and 0 for padding, to their left or right; None: all are tokens.
    ``position_ids`` [B, S] (or [1, S]) are taken as they are, and a sequence starts wherever they
    are 0; without them a row is one sequence, from position 0 on.

    ``xp`` is the library of the arrays: NumPy or, where JAX traces them, ``jax.numpy``.

    Raises ``InputError`` for another shape and, where numbers are known, which they are in NumPy,
    for a mask that is not one run of ones a row.
    """
    length = shape[1]
    real = xp.ones(shape, bool) if mask is None else _tokens_of(shape, mask, known=xp is np)
    starts = real & ~xp.pad(real, ((0, 0), (1, 0)))[:, :-1]
    if position_ids is None:
        positions = xp.arange(length) - starts.argmax(1)[:, None]
    else:
        if position_ids.shape not in (shape, (1, length)):
            raise InputError(
                f"position_ids have shape {list(position_ids.shape)}, input_ids {list(shape)}"
            )
        positions = xp.broadcast_to(position_ids, shape)
        starts |= real & (positions == 0)
    segments = xp.where(real, starts.cumsum().reshape(shape) - 1, -1)
    return xp.where(real, positions, 0).reshape(-1), segments.reshape(-1)


def _tokens_of(shape: tuple[int, int], mask: Any, *, known: bool) -> Any:
    if mask.shape != shape:
        raise InputError(
            f"attention_mask has shape {list(mask.shape)}, input_ids {list(shape)}: it must be "
            "the same"
        )
    real = mask != 0
    if not known:
        return real
    edges = np.diff(real.astype(np.int8), axis=1, prepend=0, append=0)
    if not np.isin(mask, (0, 1)).all() or ((edges > 0).sum(1) > 1).any():
        raise InputError(
            "attention_mask must be 1 for tokens and 0 for the padding beside them: give "
            "position_ids that start at 0 again where several sequences share a row"
        )
    return real


def next_labels(labels: Indices, segments: Indices) -> Indices:
    """What each token [B·S] is to say: the label of the next place [B, S] of its own sequence.

    ``NO_TARGET`` where there is none, or it is not learned.
    """
    rows, length = labels.shape
    following = np.full(labels.shape, NO_TARGET, np.int64)
    following[:, :-1] = labels[:, 1:]
    owners = segments.reshape(rows, length)
    same = np.zeros(labels.shape, bool)
    same[:, :-1] = (owners[:, 1:] == owners[:, :-1]) & (owners[:, 1:] >= 0)
    return np.where(same, following, NO_TARGET).reshape(-1)
