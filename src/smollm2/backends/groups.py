"""Groups: which queries of a batch attend together, and over which keys, as arrays of equal shape.

A framework computes attention over rectangles. A group is N sequences of Q queries and S keys
each; a batch is split into as few as its lengths allow. With ``fit``, sizes are rounded up, so
that few shapes occur and a compiler sees the same ones again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from smollm2.batch import Batch, Ints

NEVER = 2**31 - 1
"""The position of a key that is not there: no query sees it."""

_SEES_ALL = NEVER - 1

Fit = Callable[[int], int]


@dataclass(frozen=True, slots=True)
class Group:
    """N sequences that attend side by side. A query sees the keys of its sequence up to its place.

    - ``queries`` [N, Q]: tokens of the batch; in padded places token 0, whose result is not read
    - ``keys`` [N, S]: slots of the cache or, without one, tokens of the batch; padded with the
      first, since what a mask hides may be NaN in another sequence, and is multiplied all the same
    - ``query_positions`` [N, Q], ``key_positions`` [N, S]: key s is visible to query q where
      ``key_positions[n, s] <= query_positions[n, q]``; a padded key is at ``NEVER``
    - ``causal``: the keys are the queries, in rising order, none padded: plain causal attention
    - ``full``: every query sees every key, none is padded
    - ``pages`` [N]: the page whose first S slots are the keys, where they all lie in one
    """

    queries: Ints
    keys: Ints
    query_positions: Ints
    key_positions: Ints
    causal: bool
    full: bool
    pages: Ints | None


@dataclass(frozen=True, slots=True)
class Groups:
    """All groups of a batch.

    ``places`` [T] finds each token's result among those of all groups, flattened one after the
    other; None where they lie there in the batch's order already.
    """

    parts: tuple[Group, ...]
    places: Ints | None


@dataclass(frozen=True, slots=True)
class _Sequence:
    """Tokens of a batch that see one another, and the keys that they see."""

    tokens: NDArray[np.intp]
    positions: Ints
    keys: Ints
    key_positions: Ints
    page: int | None


def groups_of(
    batch: Batch, *, cached: bool, fit: Fit | None = None, fit_keys: Fit | None = None
) -> Groups:
    """Split a batch into groups: its rows if it is ``cached``, else its segments.

    Without ``fit``, sequences of equally many queries form a group, so that no query is padded;
    with it, those of one query form one group and all others another, and N, Q and S become
    ``fit`` of what they are, which must not be less. ``fit_keys`` does so for S alone.
    """
    pad, pad_keys = fit or _exactly, fit_keys or fit or _exactly
    clusters: dict[int, list[_Sequence]] = {}
    for sequence in _sequences(batch, cached):
        count = len(sequence.tokens)
        clusters.setdefault(count if fit is None else min(count, 2), []).append(sequence)
    parts = tuple(_group(part, pad, pad_keys, batch, cached) for part in clusters.values())
    return Groups(parts, _places(clusters.values(), parts, len(batch)))


def _sequences(batch: Batch, cached: bool) -> Iterator[_Sequence]:
    owners = batch.rows if cached else batch.segments
    for owner in dict.fromkeys(owners.tolist()):
        tokens = np.flatnonzero(owners == owner)
        positions = batch.positions[tokens]
        if not cached:
            yield _Sequence(tokens, positions, tokens.astype(np.int32), positions, None)
            continue
        size = batch.page_size
        places = np.arange(batch.lengths[owner], dtype=np.int32)
        pages = batch.page_table[owner]
        in_one = len(places) <= size
        keys = pages[0] * size + places if in_one else pages[places // size] * size + places % size
        yield _Sequence(tokens, positions, keys, places, int(pages[0]) if in_one else None)


def _exactly(n: int) -> int:
    return n


def _group(
    sequences: Sequence[_Sequence], fit: Fit, fit_keys: Fit, batch: Batch, cached: bool
) -> Group:
    most_queries = max(len(sequence.tokens) for sequence in sequences)
    most_keys = max(len(sequence.keys) for sequence in sequences)
    count, queries, keys = fit(len(sequences)), fit(most_queries), fit_keys(most_keys)
    group = Group(
        queries=np.zeros((count, queries), np.int32),
        keys=np.zeros((count, keys), np.int32),
        query_positions=np.full((count, queries), _SEES_ALL, np.int32),
        key_positions=np.full((count, keys), NEVER, np.int32),
        causal=_is_causal(sequences, cached)
        and (count, queries, keys) == (len(sequences), most_queries, most_keys),
        full=_is_full(sequences) and keys == most_keys and count == len(sequences),
        pages=_pages(sequences, count) if keys <= batch.page_size else None,
    )
    for row, sequence in enumerate(sequences):
        group.queries[row, : len(sequence.tokens)] = sequence.tokens
        group.query_positions[row, : len(sequence.tokens)] = sequence.positions
        group.keys[row] = sequence.keys[0]
        group.keys[row, : len(sequence.keys)] = sequence.keys
        group.key_positions[row, : len(sequence.keys)] = sequence.key_positions
    return group


def _is_causal(sequences: Sequence[_Sequence], cached: bool) -> bool:
    """Whether each token sees those before it, of equally long sequences, and nothing else."""
    if len({len(sequence.tokens) for sequence in sequences}) > 1:
        return False
    return all(
        len(sequence.keys) == len(sequence.tokens)
        and (cached or bool((np.diff(sequence.positions) > 0).all()))
        for sequence in sequences
    )


def _is_full(sequences: Sequence[_Sequence]) -> bool:
    """Whether these are equally long sequences of one query each, at their ends."""
    return len({len(sequence.keys) for sequence in sequences}) == 1 and all(
        len(sequence.tokens) == 1 for sequence in sequences
    )


def _pages(sequences: Sequence[_Sequence], count: int) -> Ints | None:
    pages = np.zeros(count, np.int32)
    for row, sequence in enumerate(sequences):
        if sequence.page is None:
            return None
        pages[row] = sequence.page
    return pages


def _places(
    clusters: Iterable[Sequence[_Sequence]], parts: Sequence[Group], count: int
) -> Ints | None:
    places = np.empty(count, np.int32)
    start = 0
    for sequences, part in zip(clusters, parts, strict=True):
        width = part.queries.shape[1]
        for row, sequence in enumerate(sequences):
            first = start + row * width
            places[sequence.tokens] = np.arange(first, first + len(sequence.tokens))
        start += part.queries.size
    whole = start == count and bool((places == np.arange(count)).all())
    return None if whole else places
