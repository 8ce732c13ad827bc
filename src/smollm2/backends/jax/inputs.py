"""Inputs: a batch as arrays of few shapes, so that a compiled forward is found again.

Numbers of tokens, rows and stored places are rounded up to a ladder. What pads has no place in the
cache: its slot is one that does not exist, and no token that is there sees it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import register_dataclass
from numpy.typing import NDArray

from smollm2.backends.groups import NEVER, Group, groups_of
from smollm2.backends.jax.attention import QUERY_CHUNK
from smollm2.batch import Batch

X = TypeVar("X")

SMALLEST_ROOM = 64
"""Places of a row that are read and allocated at least."""

_FINE_TOKENS, _FINE_ROOM = 64, 256
"""From here on there are two steps to an octave of tokens, of places."""


@partial(register_dataclass, data_fields=("queries", "positions", "table"), meta_fields=("span",))
@dataclass(frozen=True)
class Rows:
    """N rows of a cache with Q queries each, and the keys that these may see.

    - ``queries`` [N, Q]: tokens; None where they are all tokens, in order
    - ``positions`` [N, Q]: of the queries, which see the keys up to there; 0 where they pad
    - ``table`` [N, P]: pages in order of their places; None where row n is page n of all there are
    - ``span``: places of a page that may hold something
    """

    queries: Any
    positions: Any
    table: Any
    span: int


@partial(
    register_dataclass,
    data_fields=("ids", "positions", "wanted", "segments", "pages", "offsets", "rows", "places"),
    meta_fields=("reach",),
)
@dataclass(frozen=True)
class Inputs:
    """What a traced forward gets of a batch: int32 arrays, T tokens and W wanted ones with padding.

    - ``ids``, ``positions`` [T], ``wanted`` [W]: as in ``Batch``; all are wanted where it is None
    - ``segments`` [T], ``reach``: without a cache, who sees whom, and how many tokens before its
      own a token may see (T: it may see any)
    - ``pages``, ``offsets`` [T, but at least 2]: with a cache, where keys and values are written
    - ``rows``, ``places`` [T]: with a cache, who attends together, and where among the results of
      all of them a token's is (None: in order)
    """

    ids: Any
    positions: Any
    wanted: Any
    segments: Any = None
    reach: int = 0
    pages: Any = None
    offsets: Any = None
    rows: tuple[Rows, ...] = ()
    places: Any = None


def fit(count: int, fine: int | None = None) -> int:
    """The least rung from ``count`` on: powers of two and, above ``fine``, what lies midway."""
    upper = 1 << max(count - 1, 0).bit_length()
    between = upper // 4 * 3
    return between if fine is not None and upper > fine and count <= between else upper


def fit_tokens(count: int) -> int:
    """Tokens, rows or queries of so many, with padding."""
    return fit(count, _FINE_TOKENS)


def fit_reach(reach: int, tokens: int) -> int:
    """The least power of two from ``reach`` on, or all tokens where that leaves out hardly any."""
    fitted = fit(reach)
    return fitted if fitted + QUERY_CHUNK < tokens else tokens


def room_of(length: int) -> int:
    """Places to read where a row has so many tokens, and to allocate where that is one page.

    It may be more than the page was asked to hold, so that caches of any capacity have few shapes.
    """
    return max(fit(length, _FINE_ROOM), SMALLEST_ROOM)


def inputs_of(batch: Batch, *, num_pages: int | None) -> Inputs:
    """Arrays of a batch for a cache of so many pages, or without one."""
    tokens = fit_tokens(len(batch))
    inputs = Inputs(
        ids=_padded(batch.ids, tokens),
        positions=_padded(batch.positions, tokens),
        wanted=_padded(batch.wanted, fit(max(len(batch.wanted), 1))),
    )
    if num_pages is None:
        segments = _padded(batch.segments, tokens, fill=-1)
        return replace(inputs, segments=segments, reach=_reach(batch, tokens))
    pages, offsets = np.divmod(batch.slots, batch.page_size)
    groups = groups_of(batch, cached=True, fit=fit_tokens, fit_keys=room_of)
    ordered = len(groups.parts) == 1 and _is_ordered(groups.parts[0].queries, len(batch), tokens)
    places = np.arange(len(batch), dtype=np.int32) if groups.places is None else groups.places
    return replace(
        inputs,
        pages=_padded(pages, max(tokens, 2), fill=num_pages),
        offsets=_padded(offsets, max(tokens, 2)),
        rows=tuple(_rows(group, batch, num_pages, ordered) for group in groups.parts),
        places=None if ordered else _padded(places, tokens),
    )


def _padded(values: NDArray[np.integer], size: int, fill: int = 0) -> NDArray[np.int32]:
    result = np.full(size, fill, dtype=np.int32)
    result[: len(values)] = values
    return result


def _reach(batch: Batch, tokens: int) -> int:
    """How far back a token may see; all tokens where a segment is in parts or out of order."""
    index = np.arange(len(batch))
    changes = np.flatnonzero(np.diff(batch.segments)) + 1
    starts = np.concatenate([[0], changes])
    whole = len(np.unique(batch.segments)) == len(starts)
    falls = np.flatnonzero(np.diff(batch.positions) <= 0) + 1
    if not (whole and np.isin(falls, changes).all()):
        return tokens
    first = starts[np.searchsorted(starts, index, side="right") - 1]
    return fit_reach(int((index - first).max()) + 1, tokens)


def _is_ordered(queries: NDArray[np.int32], count: int, tokens: int) -> bool:
    """Whether a step of decode, [N, 1], has its tokens in order, as many as there are with padding.

    Nothing else is called so, though it may be, so that fewer forms occur.
    """
    return queries.shape == (tokens, 1) and np.array_equal(queries[:count, 0], np.arange(count))


def _rows(group: Group, batch: Batch, num_pages: int, ordered: bool) -> Rows:
    table = group.keys[:, :: batch.page_size] // batch.page_size
    if batch.page_table.shape[1] == 1:  # however many places padding adds to those of the page
        table = table[:, :1]
    span = group.keys.shape[1] if table.shape[1] == 1 else batch.page_size
    every = len(table) == num_pages and bool((table[:, 0] == np.arange(num_pages)).all())
    return Rows(
        queries=None if ordered else group.queries,
        positions=np.where(group.query_positions < NEVER - 1, group.query_positions, 0),
        table=None if every and table.shape[1] == 1 else table,
        span=span,
    )


@dataclass(frozen=True)
class Form:
    """The shapes of arrays that lie in one, and the tree that they make up."""

    tree: Any
    shapes: tuple[tuple[int, ...], ...]


def joined(tree: Any) -> tuple[NDArray[np.int32], Form]:
    """The int32 arrays of a tree as one: it takes one transfer, not one for each."""
    leaves, structure = jax.tree.flatten(tree)
    form = Form(structure, tuple(leaf.shape for leaf in leaves))
    return np.concatenate([leaf.reshape(-1) for leaf in leaves]), form


def parted(array: jax.Array, form: Form) -> Any:
    """The tree that was ``joined``."""
    leaves, start = [], 0
    for shape in form.shapes:
        size = int(np.prod(shape))
        leaves.append(jnp.reshape(array[start : start + size], shape))
        start += size
    return jax.tree.unflatten(form.tree, leaves)
