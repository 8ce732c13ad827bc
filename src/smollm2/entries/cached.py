"""Entries over a cache: prompts, parts of them, steps of decode, and both in one pass.

All return logits as float32, [rows, V] in the order of what they were given. With a fixed cache
(``new_cache``) row i of an input is row i of the cache; with a paged one (``new_paged_cache``) it
is row i of the page table. What is padding is not computed, touches nothing, and gives zeros.
Everything is checked before anything is computed: ``InputError`` for inputs of a wrong shape or
value, ``CacheError`` for a cache that does not fit them.
"""

from __future__ import annotations

import numpy as np

from smollm2.batch import Ints
from smollm2.cache import Cache
from smollm2.causal_lm import CausalLM
from smollm2.entries import builders
from smollm2.entries.builders import Tokens
from smollm2.entries.guards import (
    check_decode,
    check_lengths,
    check_paged_decode,
    check_paged_rows,
    check_prefill,
    check_rows,
    check_segments,
)
from smollm2.entries.inputs import IntsLike, checked, mask_of, places_of
from smollm2.entries.passes import Floats, run
from smollm2.errors import InputError


def prefill(
    lm: CausalLM,
    cache: Cache,
    tokens: IntsLike,
    pos: IntsLike = 0,
    *,
    attention_mask: IntsLike | None = None,
    position_ids: IntsLike | None = None,
) -> Floats:
    """Feed ``tokens`` [Batch, S] from position ``pos`` on; the logits after each row, [Batch, V].

    ``pos`` is what each row holds already (one number, or one of each row): 0 is an empty cache.

    ``attention_mask`` [Batch, S] or, with what is stored, [Batch, pos + S] (1: a token, 0: padding)
    may pad rows left, right or anywhere: what is padded is dropped, so that each row is as long as
    its own tokens are many, and the next ``pos`` is the row's own. ``position_ids`` [S] or
    [Batch, S] must say of each token what its row makes of it anyway: places of a row cannot be
    left out or written twice. A row without a token stays as it is, and its logits are 0.
    """
    ids, start = checked("prefill", cache, tokens, pos)
    return _continue(lm, cache, ids, start, attention_mask, position_ids, decodes=False)


def decode(
    lm: CausalLM,
    cache: Cache,
    token: IntsLike,
    pos: IntsLike,
    *,
    attention_mask: IntsLike | None = None,
    position_ids: IntsLike | None = None,
) -> Floats:
    """Feed one token of each row, [Batch, 1], at position ``pos``; the logits after it, [Batch, V].

    As ``prefill`` of one token, of rows that hold some.
    """
    ids, start = checked("decode", cache, token, pos)
    return _continue(lm, cache, ids, start, attention_mask, position_ids, decodes=True)


def prefill_slots(
    lm: CausalLM, cache: Cache, tokens: IntsLike, slots: IntsLike, lengths: IntsLike
) -> Floats:
    """Feed prompts [M, S] into the empty rows ``slots`` [M]; the logits after each, [M, V].

    Prompt m has ``lengths[m]`` tokens; what lies beyond is padding. Row ``slots[m]`` goes on at
    position ``lengths[m]``.
    """
    ids, rows, counts = checked("prefill_slots", cache, tokens, slots, lengths)
    check_lengths(counts, ids.shape[1])
    check_rows(cache, rows)
    if len(np.unique(rows)) < len(rows):
        raise InputError(f"slots {rows.tolist()} name a row twice: each prompt needs its own")
    return _logits(lm, builders.prefill_slots(np, cache.page_size, ids, rows, counts), cache)


def prefill_packed(
    lm: CausalLM,
    cache: Cache,
    tokens: IntsLike,
    rows: IntsLike,
    positions: IntsLike,
    segments: IntsLike,
    last: IntsLike,
) -> Floats:
    """Feed whole prompts that lie one after the other, [P] each; logits [Batch, V].

    Token p is at ``positions[p]`` of the empty row ``rows[p]`` and sees the tokens before it of its
    segment, which is one prompt in one row. Row m of the result is that of token ``last[m]``; -1:
    there is none. Padding is a segment of -1, or one that is all at the last position of a row.
    """
    arrays = checked("prefill_packed", cache, tokens, rows, positions, segments, last)
    arrays = _checked_prompts(cache, arrays)
    return _logits(lm, builders.prefill_packed(np, cache.page_size, *arrays), cache)


def decode_rows(lm: CausalLM, cache: Cache, tokens: IntsLike, positions: IntsLike) -> Floats:
    """Feed one token of each row, [Batch, 1], at its own position [Batch]; logits [Batch, V].

    A row at position -1 is idle.
    """
    ids, places = checked("decode_rows", cache, tokens, positions)
    check_decode(cache, places, places >= 0)
    return _logits(lm, builders.decode_rows(np, cache.page_size, ids, places), cache)


def step_packed(
    lm: CausalLM,
    cache: Cache,
    tokens: IntsLike,
    rows: IntsLike,
    positions: IntsLike,
    segments: IntsLike,
    last: IntsLike,
    step_tokens: IntsLike,
    step_positions: IntsLike,
) -> Floats:
    """Do ``prefill_packed`` and ``decode_rows`` in one pass; logits [2·Batch, V].

    The first Batch rows are those of prompts, the next ones those of steps. Weights are read once.
    """
    inputs = (tokens, rows, positions, segments, last, step_tokens, step_positions)
    *prompts, ids, places = checked("step_packed", cache, *inputs)
    arrays = [*_checked_prompts(cache, prompts), ids, places]
    check_decode(cache, places, places >= 0)
    return _logits(lm, builders.step_packed(np, cache.page_size, *arrays), cache)


def prefill_paged(
    lm: CausalLM,
    cache: Cache,
    tokens: IntsLike,
    positions: IntsLike,
    rows: IntsLike,
    slots: IntsLike,
    last: IntsLike,
    table: IntsLike,
) -> Floats:
    """Feed prompts or parts of them, [P] each, over pages; logits [Rows, V].

    Token p is at ``positions[p]`` of row ``rows[p]`` of the page ``table`` [Rows, Pages] and sees
    what is stored there up to itself. It is written at ``slots[p]``, which is
    ``table[row, position // 64] * 64 + position % 64``. Row m of the result is that of token
    ``last[m]``; -1: there is none. Padding has a slot in page 0 (below 64).
    """
    arrays = checked("prefill_paged", cache, tokens, positions, rows, slots, last, table)
    check_paged_rows(cache.page_size, arrays[2], arrays[3], arrays[5])
    return _logits(lm, builders.prefill_paged(np, cache.page_size, *arrays), cache)


def decode_paged(
    lm: CausalLM, cache: Cache, tokens: IntsLike, positions: IntsLike, table: IntsLike
) -> Floats:
    """Feed one token of each row, [Rows, 1], at its own position [Rows]; logits [Rows, V].

    A row at position -1, or whose first page in ``table`` [Rows, Pages] is page 0, is idle.
    """
    ids, places, pages = checked("decode_paged", cache, tokens, positions, table)
    check_paged_decode(cache.page_size, places, pages)
    return _logits(lm, builders.decode_paged(np, cache.page_size, ids, places, pages), cache)


def step_paged(
    lm: CausalLM,
    cache: Cache,
    tokens: IntsLike,
    positions: IntsLike,
    rows: IntsLike,
    slots: IntsLike,
    last: IntsLike,
    step_tokens: IntsLike,
    step_positions: IntsLike,
    table: IntsLike,
) -> Floats:
    """Do ``prefill_paged`` and ``decode_paged`` in one pass; logits [2·Rows, V].

    The first Rows rows are those of prompts, the next ones those of steps. Weights are read once.
    """
    inputs = (tokens, positions, rows, slots, last, step_tokens, step_positions, table)
    arrays = checked("step_paged", cache, *inputs)
    check_paged_rows(cache.page_size, arrays[2], arrays[3], arrays[7])
    check_paged_decode(cache.page_size, arrays[6], arrays[7])
    return _logits(lm, builders.step_paged(np, cache.page_size, *arrays), cache)


def _continue(
    lm: CausalLM,
    cache: Cache,
    ids: Ints,
    pos: Ints,
    attention_mask: IntsLike | None,
    position_ids: IntsLike | None,
    *,
    decodes: bool,
) -> Floats:
    mask, starts = mask_of(attention_mask, ids, pos)
    places = places_of(position_ids, ids)
    used = np.ones(len(ids), bool) if mask is None else mask.max(axis=1) > 0
    (check_decode if decodes else check_prefill)(cache, starts, used)
    return _logits(lm, builders.prefill(np, cache.page_size, ids, starts, mask, places), cache)


def _checked_prompts(cache: Cache, arrays: list[Ints]) -> list[Ints]:
    """The inputs of ``prefill_packed``, all padding marked by a segment of -1."""
    tokens, rows, positions, segments, last = arrays
    if cache.capacity > 1:
        inside = np.unique(segments[positions != cache.capacity - 1])
        segments = np.where(np.isin(segments, inside), segments, -1).astype(np.int32)
    check_segments(rows, segments)
    check_rows(cache, rows[segments >= 0])
    return [tokens, rows, positions, segments, last]


def _logits(lm: CausalLM, tokens: Tokens, cache: Cache) -> Floats:
    return run(lm.forward, lm.config.vocab_size, tokens, cache)
