"""Passes: the tokens of an entry → a batch without padding → its result, in the entry's order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from smollm2.batch import Batch, Ints, Span
from smollm2.cache import Cache
from smollm2.entries.builders import Tokens
from smollm2.errors import InputError

Floats = NDArray[np.float32]
Indices = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Pass:
    """A batch, and where it lies in what the entry was given.

    ``order`` [n] are the tokens of the entry that are computed, in the order of the batch;
    ``results`` [W] the rows of its result that the batch's wanted tokens fill. All others are 0.
    """

    batch: Batch
    order: Indices
    results: Indices


def pass_of(tokens: Tokens, cache: Cache | None) -> Pass | None:
    """The batch of an entry's tokens; None where all of them are padding.

    Sequences may lie in any order among one another, and so may their tokens.

    Raises ``InputError`` for positions that do not rise by one within a sequence, slots that are
    not those of their pages and a result of a token that is not there, and as ``Batch.build`` does.
    """
    order = _order(tokens, cache)
    if len(order) == 0:
        return None
    spans = _spans(tokens, order, cache)
    if cache is None:
        batch = Batch.build(spans)
    else:
        table = cache.page_table if tokens.table is None else tokens.table
        batch = Batch.build(spans, page_table=table, page_size=cache.page_size)
        _check_slots(tokens, order, batch)
    place = np.full(len(tokens.ids), -1)
    place[order] = np.arange(len(order))
    if tokens.wanted.max(initial=-1) >= len(place):
        raise InputError(f"last has {tokens.wanted.max()}, but there are {len(place)} tokens")
    wanted = np.where(tokens.wanted < 0, -1, place[np.maximum(tokens.wanted, 0)])
    results = np.flatnonzero(wanted >= 0)
    return Pass(replace(batch, wanted=wanted[results].astype(np.int32)), order, results)


def run(
    compute: Callable[[Batch, Cache | None], Floats],
    width: int,
    tokens: Tokens,
    cache: Cache | None = None,
) -> Floats:
    """What ``compute`` gives of each wanted token, [W, width]; zeros where there is none."""
    result = np.zeros((len(tokens.wanted), width), np.float32)
    made = pass_of(tokens, cache)
    if made is not None:
        result[made.results] = compute(made.batch, cache)
    return result


def _order(tokens: Tokens, cache: Cache | None) -> Indices:
    """The tokens that are no padding, sequence by sequence, each by rising position."""
    real = np.flatnonzero(tokens.segments >= 0)
    owners = (tokens.segments if cache is None else tokens.rows)[real]
    return real[np.lexsort((tokens.positions[real], owners))]


def _spans(tokens: Tokens, order: Indices, cache: Cache | None) -> list[Span]:
    """The sequences of a pass."""
    owners: Ints = (tokens.segments if cache is None else tokens.rows)[order]
    positions = tokens.positions[order]
    borders = owners[1:] != owners[:-1]
    gaps = np.flatnonzero((positions[1:] != positions[:-1] + 1) & ~borders)
    if len(gaps) > 0:
        kind = "segment" if cache is None else "row"
        raise InputError(
            f"the positions of {kind} {owners[gaps[0]]} must rise by one from token to token, but "
            f"{positions[gaps[0] + 1]} comes after {positions[gaps[0]]}: mask what is padding, and "
            "leave no gaps"
        )
    bounds = [0, *(np.flatnonzero(borders) + 1).tolist(), len(order)]
    ids: list[int] = tokens.ids[order].tolist()
    return [
        Span(owners.item(start), positions.item(start), ids[start:end])
        for start, end in pairwise(bounds)
    ]


def _check_slots(tokens: Tokens, order: Indices, batch: Batch) -> None:
    wrong = np.flatnonzero(tokens.slots[order] != batch.slots)
    if len(wrong) > 0:
        token, expected = order[wrong[0]], batch.slots[wrong[0]]
        raise InputError(
            f"token {token} has slot {tokens.slots[token]}, but its row and position have "
            f"{expected}: table[row, position // {batch.page_size}] * {batch.page_size} "
            f"+ position % {batch.page_size}"
        )
