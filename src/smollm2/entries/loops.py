"""Entries that decode step by step: ids come back, and logits stay where they are computed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence, Set
from dataclasses import replace

import numpy as np

from smollm2.batch import Ints
from smollm2.cache import Cache
from smollm2.causal_lm import CausalLM, whole_number
from smollm2.entries import builders
from smollm2.entries.guards import Bools, check_decode, check_room
from smollm2.entries.inputs import IntsLike, checked, integers, per_row
from smollm2.entries.passes import pass_of
from smollm2.errors import InputError
from smollm2.sampling import Choice, Sampler, SamplingParams

_SEEDS = 2**63
_GREEDY = SamplingParams(seed=0)


def generate(lm: CausalLM, cache: Cache, token: IntsLike, pos: IntsLike, steps: int) -> Ints:
    """Feed ``token`` [Batch, 1] at position ``pos``, then what is likeliest; ids [Batch, steps].

    Column i follows the token at ``pos + i``; the last one is not fed. ``pos`` is what the rows
    hold (one number, or one of each row). Raises ``CacheError`` as ``decode`` does, and where the
    steps do not fit: before anything is computed.
    """
    return _all_steps(lm, cache, ("generate", token, pos), steps, [_GREEDY])


def sample(
    lm: CausalLM,
    cache: Cache,
    token: IntsLike,
    pos: IntsLike,
    key: int,
    temperature: float,
    steps: int,
) -> Ints:
    """As ``generate``, but drawn from ``softmax(logits / temperature)``; 0 is greedy.

    Row b draws with the seed ``key + b`` (modulo 2**63), each token by its position (see
    ``smollm2.sampling.draw``): so a row gives what it gives alone, on every backend. Raises
    ``InputError`` for a key that is no seed and a temperature below 0.
    """
    checked("sample", cache, token, pos)
    seed = whole_number("key", key)
    first = SamplingParams(seed=seed, temperature=temperature)
    rows = [replace(first, seed=(seed + row) % _SEEDS) for row in range(cache.rows)]
    return _all_steps(lm, cache, ("sample", token, pos), steps, rows)


def generate_until(
    lm: CausalLM,
    cache: Cache,
    token: IntsLike,
    pos: IntsLike,
    eos: int | Collection[int],
    max_new: int,
) -> tuple[Ints, Ints]:
    """As ``generate``, until each row has given ``eos`` (one id, or any of several).

    Returns ids [Batch, N] and how many are each row's own [Batch], its ``eos`` included; zeros come
    after those. N is the largest count, ``max_new`` at most. A row that has ended is fed no more.
    """
    stops = integers("eos", [*eos] if isinstance(eos, Set) else eos)
    steps = list(_steps(lm, cache, ("generate_until", token, pos), max_new, [_GREEDY], stops))
    ids = np.zeros((cache.rows, len(steps)), np.int32)
    counts = np.zeros(cache.rows, np.int32)
    for column, (chosen, going) in enumerate(steps):
        ids[:, column] = chosen
        counts += going
    return ids, counts


def _all_steps(
    lm: CausalLM,
    cache: Cache,
    call: tuple[str, IntsLike, IntsLike],
    steps: int,
    params: Sequence[SamplingParams],
) -> Ints:
    chosen = [ids for ids, _ in _steps(lm, cache, call, steps, params)]
    return np.stack(chosen, axis=1) if chosen else np.zeros((cache.rows, 0), np.int32)


def _steps(
    lm: CausalLM,
    cache: Cache,
    call: tuple[str, IntsLike, IntsLike],
    count: int,
    params: Sequence[SamplingParams],
    stops: Ints | None = None,
) -> Iterator[tuple[Ints, Bools]]:
    """Of each step, the ids chosen [Batch] and which rows went on until then.

    ``params`` are one for all rows or one of each. Rows whose id is one of ``stops`` are idle from
    then on and give 0; where all are, it ends.
    """
    ids, pos = checked(call[0], cache, *call[1:])
    starts = per_row(pos, cache.rows)
    count = whole_number("the number of steps", count)
    if not 0 <= count < 2**31:
        raise InputError(f"{call[0]} cannot take {count!s:.80} steps")
    going = np.ones(cache.rows, bool)
    check_decode(cache, starts, going)
    check_room(cache, starts, count)
    samplers = [Sampler(one) for one in params]
    for step in range(count):
        places = np.where(going, starts + step, -1)
        made = pass_of(builders.decode_rows(np, cache.page_size, ids, places), cache)
        if made is None:
            return
        rows: list[int] = made.results.tolist()
        choices = [Choice(samplers[row % len(samplers)], int(places[row]) + 1) for row in rows]
        chosen = np.zeros(cache.rows, np.int32)
        chosen[rows] = lm.choose(made.batch, choices, cache)
        yield chosen, going.copy()
        if stops is not None:
            going &= ~np.isin(chosen, stops)
        ids = chosen[:, None]
