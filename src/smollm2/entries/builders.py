"""Builders: the inputs of an entry → the tokens of one pass, over any library of arrays.

Each takes ``xp`` (NumPy, ``jax.numpy``, ``torch`` or whatever else has the few functions that are
used here), the size of a page, and an entry's inputs in the order of its table; shapes alone decide
what is computed, so a builder can be traced. With a fixed cache the size of a page is the capacity
of a row. Padding stays where it is and is marked, so that shapes do not depend on values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Array = Any
"""An array of integers of the library in use."""


class Tokens(NamedTuple):
    """The tokens of one pass, padding included: what a ``Batch`` is made of, and a graph reads.

    With a cache a token sees places 0 … position of its row, without one the tokens of its segment
    up to its own position.

    - ``ids``, ``positions``, ``rows`` [T]: as in a ``Batch``; all 0 for padding
    - ``slots`` [T]: where the token's key and value are written. Padding has slot 0 of a paged
      cache, which is scratch, and -1 of a fixed one: the last place of a storage that has one more.
      Of no meaning without a cache
    - ``segments`` [T]: -1 for padding; with a cache the token's row
    - ``wanted`` [W]: tokens whose logits are the result; below 0 where there is none, and zeros are
    - ``table`` [Rows, Pages]: the page table of a paged cache, else None
    """

    ids: Array
    positions: Array
    rows: Array
    slots: Array
    segments: Array
    wanted: Array
    table: Array | None = None


def forward(
    xp: Any,
    page_size: int,
    tokens: Array,
    attention_mask: Array | None = None,
    position_ids: Array | None = None,
) -> Tokens:
    """All of B sequences [B, S], each a segment; all logits wanted."""
    start = xp.arange(1) * 0
    parts = _side_by_side(xp, page_size, tokens, start, attention_mask, position_ids)
    count = parts.ids.shape[0]
    return parts._replace(wanted=xp.where(parts.segments < 0, -1, xp.arange(count)))


def next_token(
    xp: Any,
    page_size: int,
    tokens: Array,
    attention_mask: Array | None = None,
    position_ids: Array | None = None,
) -> Tokens:
    """All of B sequences [B, S], each a segment; the logits after each."""
    start = xp.arange(1) * 0
    return _side_by_side(xp, page_size, tokens, start, attention_mask, position_ids)


def prefill(
    xp: Any,
    page_size: int,
    tokens: Array,
    pos: Array,
    attention_mask: Array | None = None,
    position_ids: Array | None = None,
) -> Tokens:
    """Tokens [Batch, S] that continue each row at ``pos`` (one for all, or [Batch])."""
    return _side_by_side(xp, page_size, tokens, pos, attention_mask, position_ids)


def prefill_slots(xp: Any, page_size: int, tokens: Array, slots: Array, lengths: Array) -> Tokens:
    """Prompts [M, S] of these lengths [M] into rows ``slots`` [M]."""
    count, size = tokens.shape
    places = _each_row(xp, xp.arange(size), count, size)
    lengths = xp.reshape(lengths, (-1, 1))
    padding = _flat(xp, places >= lengths)
    ends = xp.reshape(lengths, (-1,)) + xp.arange(count) * size - 1
    return _tokens(
        xp,
        page_size,
        ids=_flat(xp, tokens),
        positions=_flat(xp, places),
        rows=_flat(xp, _each_column(xp, slots, count, size)),
        padding=padding,
        wanted=xp.where(xp.reshape(lengths, (-1,)) > 0, ends, -1),
    )


def prefill_packed(
    xp: Any,
    page_size: int,
    tokens: Array,
    rows: Array,
    positions: Array,
    segments: Array,
    last: Array,
) -> Tokens:
    """Prompts one after the other [P]; ``last`` [Batch] are their last tokens."""
    return _tokens(
        xp,
        page_size,
        ids=tokens,
        positions=positions,
        rows=rows,
        padding=segments < 0,
        wanted=last,
    )


def decode_rows(xp: Any, page_size: int, tokens: Array, positions: Array) -> Tokens:
    """One token of each row [Batch, 1] at its own position [Batch]; -1 where a row is idle."""
    rows = xp.arange(tokens.shape[0])
    return _tokens(
        xp,
        page_size,
        ids=_flat(xp, tokens),
        positions=positions,
        rows=rows,
        padding=positions < 0,
        wanted=xp.where(positions < 0, -1, rows),
    )


def step_packed(
    xp: Any,
    page_size: int,
    tokens: Array,
    rows: Array,
    positions: Array,
    segments: Array,
    last: Array,
    step_tokens: Array,
    step_positions: Array,
) -> Tokens:
    """The tokens of ``prefill_packed``, then those of ``decode_rows``."""
    prompts = prefill_packed(xp, page_size, tokens, rows, positions, segments, last)
    return _joined(xp, prompts, decode_rows(xp, page_size, step_tokens, step_positions))


def prefill_paged(
    xp: Any,
    page_size: int,
    tokens: Array,
    positions: Array,
    rows: Array,
    slots: Array,
    last: Array,
    table: Array,
) -> Tokens:
    """Parts of prompts [P] over a page table [Rows, Pages]; slots of page 0 are padding."""
    padding = slots < page_size
    return _tokens(
        xp,
        page_size,
        ids=tokens,
        positions=positions,
        rows=rows,
        padding=padding,
        wanted=last,
        slots=xp.where(padding, 0, slots),
        table=table,
    )


def decode_paged(xp: Any, page_size: int, tokens: Array, positions: Array, table: Array) -> Tokens:
    """One token of each row [Rows, 1]; idle where its position is -1 or its first page is 0."""
    rows = xp.arange(tokens.shape[0])
    padding = (positions < 0) | (table[:, 0] == 0)
    places = xp.where(padding, 0, positions)
    slots = table[rows, places // page_size] * page_size + places % page_size
    return _tokens(
        xp,
        page_size,
        ids=_flat(xp, tokens),
        positions=positions,
        rows=rows,
        padding=padding,
        wanted=xp.where(padding, -1, rows),
        slots=xp.where(padding, 0, slots),
        table=table,
    )


def step_paged(
    xp: Any,
    page_size: int,
    tokens: Array,
    positions: Array,
    rows: Array,
    slots: Array,
    last: Array,
    step_tokens: Array,
    step_positions: Array,
    table: Array,
) -> Tokens:
    """The tokens of ``prefill_paged``, then those of ``decode_paged``."""
    prompts = prefill_paged(xp, page_size, tokens, positions, rows, slots, last, table)
    return _joined(xp, prompts, decode_paged(xp, page_size, step_tokens, step_positions, table))


def packed(xp: Any, page_size: int, tokens: Array, positions: Array, segments: Array) -> Tokens:
    """Sequences one after the other [P] without a cache; all of them wanted."""
    return _tokens(
        xp,
        page_size,
        ids=tokens,
        positions=positions,
        rows=segments,
        padding=segments < 0,
        wanted=xp.where(segments < 0, -1, xp.arange(tokens.shape[0])),
    )


def _side_by_side(
    xp: Any,
    page_size: int,
    tokens: Array,
    start: Array,
    attention_mask: Array | None,
    position_ids: Array | None,
) -> Tokens:
    """Rows [B, S] from position ``start`` ([], [1] or [B]) on; the last token of each wanted."""
    count, size = tokens.shape
    rows = _each_column(xp, xp.arange(count), count, size)
    index = rows * size + xp.arange(size)
    if attention_mask is None:
        real = rows >= 0  # all are
        places = _each_row(xp, xp.arange(size), count, size)
        last = index[:, -1]
    else:
        real, places = attention_mask > 0, xp.cumsum(attention_mask, 1) - 1
        last = xp.amax(xp.where(real, index, -1), 1)
    if position_ids is None:
        positions = places + xp.reshape(start, (-1, 1))
    else:
        positions = _each_row(xp, position_ids, count, size)
    return _tokens(
        xp,
        page_size,
        ids=_flat(xp, tokens),
        positions=_flat(xp, positions),
        rows=_flat(xp, rows),
        padding=_flat(xp, ~real),
        wanted=last,
    )


def _tokens(
    xp: Any,
    page_size: int,
    *,
    ids: Array,
    positions: Array,
    rows: Array,
    padding: Array,
    wanted: Array,
    slots: Array | None = None,
    table: Array | None = None,
) -> Tokens:
    """Tokens with 0 in the place of whatever padding holds; slots those of a fixed cache."""
    positions, rows = xp.where(padding, 0, positions), xp.where(padding, 0, rows)
    if slots is None:
        slots = xp.where(padding, -1, rows * page_size + positions)
    ids, segments = xp.where(padding, 0, ids), xp.where(padding, -1, rows)
    return Tokens(ids, positions, rows, slots, segments, wanted, table)


def _joined(xp: Any, first: Tokens, second: Tokens) -> Tokens:
    """Tokens of two passes as one; the wanted ones of the first come first."""
    shift = first.ids.shape[0]
    moved = xp.where(second.wanted < 0, -1, second.wanted + shift)
    return Tokens(
        ids=xp.concatenate((first.ids, second.ids)),
        positions=xp.concatenate((first.positions, second.positions)),
        rows=xp.concatenate((first.rows, second.rows)),
        slots=xp.concatenate((first.slots, second.slots)),
        segments=xp.concatenate((first.segments, second.segments)),
        wanted=xp.concatenate((first.wanted, moved)),
        table=first.table,
    )


def _flat(xp: Any, array: Array) -> Array:
    return xp.reshape(array, (-1,))


def _each_row(xp: Any, values: Array, count: int, size: int) -> Array:
    """Values [S] or [B, S] as [B, S]."""
    return xp.broadcast_to(values, (count, size))


def _each_column(xp: Any, values: Array, count: int, size: int) -> Array:
    """Values [B] as [B, S]."""
    return xp.broadcast_to(xp.reshape(values, (-1, 1)), (count, size))
