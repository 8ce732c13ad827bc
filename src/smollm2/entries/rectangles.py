"""Rectangles: which tokens of an entry attend over which keys, in shapes that values do not change.

For graphs, which have no batch: as builders do, this takes any library of arrays as ``xp``, and
sizes alone decide what is computed. What a batch leaves out is masked here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from smollm2.entries.builders import Array, Tokens
from smollm2.entries.table import CACHES, Entry, Shape

_TOKENS = ("token", "tokens", "step_tokens")


class Rectangle(NamedTuple):
    """N sequences that attend side by side, of Q queries and S keys each.

    - ``queries``: tokens of the pass, N·Q, one sequence after the other
    - ``stored``: whether keys are slots of the cache, which holds the tokens of the pass already,
      or those of tokens of the pass
    - ``keys``: N·S of these where they lie one sequence after the other, else their indices [N, S]
    - ``visible`` [N, Q, S]: the keys that a query sees. It is one at least, for padding too, so
      that every softmax is finite
    """

    queries: slice
    stored: bool
    keys: slice | Array
    visible: Array


def rectangles(
    xp: Any, page_size: int, entry: Entry, tokens: Tokens, sizes: Mapping[str, int]
) -> tuple[Rectangle, ...]:
    """Rectangles of the tokens that ``entry.build(xp, page_size, …)`` made, all in their order.

    ``sizes`` binds the symbols of the entry. With a fixed cache ``page_size`` is the capacity of
    its rows. An entry whose sequences are not the rows of its cache in their order, one after the
    other, takes whole prompts: their keys are tokens of the pass.
    """
    made: list[Rectangle] = []
    start = 0
    for dims in (item.dims for item in entry.inputs if item.name in _TOKENS):
        shape = _shape(dims, sizes)
        queries = slice(start, start + shape[0] * shape[1])
        if tokens.table is not None:
            made.append(_over_pages(xp, page_size, tokens, tokens.table, queries, shape))
        elif entry.cache == "fixed" and dims[0] == CACHES["fixed"][0]:
            made.append(_over_rows(xp, page_size, tokens, queries, shape))
        else:
            made.append(_over_tokens(xp, tokens, queries, shape))
        start = queries.stop
    return tuple(made)


def _shape(dims: Shape, sizes: Mapping[str, int]) -> tuple[int, int]:
    """N sequences of Q tokens; those that lie packed attend as one."""
    count, *rest = (int(dim) if dim.isdigit() else sizes[dim] for dim in dims)
    return (count, rest[0]) if rest else (1, count)


def _over_tokens(xp: Any, tokens: Tokens, queries: slice, shape: tuple[int, int]) -> Rectangle:
    """Tokens that see those of their segment: padding, whose segment is -1, sees padding."""
    positions = xp.reshape(tokens.positions[queries], shape)
    segments = xp.reshape(tokens.segments[queries], shape)
    same = segments[:, :, None] == segments[:, None, :]
    visible = same & (positions[:, None, :] <= positions[:, :, None])
    return Rectangle(queries, False, queries, visible)


def _over_rows(
    xp: Any, capacity: int, tokens: Tokens, queries: slice, shape: tuple[int, int]
) -> Rectangle:
    """Sequences that are the rows of a fixed cache: padding, at position 0, sees the first place.

    That place was written or is zero.
    """
    positions = xp.reshape(tokens.positions[queries], shape)
    visible = xp.arange(capacity) <= positions[:, :, None]
    return Rectangle(queries, True, slice(0, shape[0] * capacity), visible)


def _over_pages(
    xp: Any, page_size: int, tokens: Tokens, table: Array, queries: slice, shape: tuple[int, int]
) -> Rectangle:
    """Rows over their own pages or, where tokens lie packed, over the pages of all rows at once."""
    rows, pages = table.shape
    room = pages * page_size
    slots = xp.reshape(table[:, :, None] * page_size + xp.arange(page_size), (rows, room))
    positions = xp.reshape(tokens.positions[queries], shape)
    if shape == (rows, 1):
        return Rectangle(queries, True, slots, xp.arange(room) <= positions[:, :, None])
    places = xp.arange(rows * room)
    owners = xp.reshape(tokens.rows[queries], shape)
    visible = (places // room == owners[:, :, None]) & (places % room <= positions[:, :, None])
    return Rectangle(queries, True, xp.reshape(slots, (1, rows * room)), visible)
