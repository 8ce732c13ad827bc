"""Guards: what an entry asks of a cache and of its rows, before anything is computed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from smollm2.batch import Ints
from smollm2.cache import Cache
from smollm2.errors import CacheError, InputError

Bools = NDArray[np.bool_]


def cache_length(cache: Cache) -> int:
    """Tokens stored in a fixed cache, those of its longest row."""
    return max(cache.lengths, default=0)


def check_rows(cache: Cache, rows: Ints) -> None:
    """Raise ``CacheError`` for rows that the cache does not have, or that hold tokens."""
    for row in np.unique(rows).tolist():
        if not 0 <= row < cache.rows:
            raise CacheError(f"row {row} is not in a cache of {cache.rows} rows")
        if (stored := cache.lengths[row]) > 0:
            raise CacheError(
                f"row {row} holds {stored} tokens, but a prompt needs an empty row: "
                f"truncate({row}, 0) forgets them, reset() those of all rows"
            )


def check_prefill(cache: Cache, starts: Ints, used: Bools) -> None:
    """Raise ``CacheError`` unless each row that is ``used`` holds just what comes before it."""
    for row, (start, stored) in enumerate(zip(starts.tolist(), cache.lengths, strict=True)):
        if used[row] and start != stored:
            raise CacheError(
                f"row {row} holds {stored} tokens, but prefill at position {start} needs {start}: "
                "reset() the cache to begin anew, or give as pos what its rows hold"
            )


def check_decode(cache: Cache, starts: Ints, used: Bools) -> None:
    """Raise ``CacheError`` unless each row that is ``used`` holds the tokens before ``starts``."""
    for row, (start, stored) in enumerate(zip(starts.tolist(), cache.lengths, strict=True)):
        if used[row] and stored == 0:
            raise CacheError(f"row {row} is empty: prefill it before it is decoded")
        if used[row] and start != stored:
            raise CacheError(
                f"row {row} holds {stored} tokens, but is decoded at position {start}: "
                f"give position {stored}, or truncate the row"
            )


def check_room(cache: Cache, starts: Ints, steps: int) -> None:
    """Raise ``CacheError`` unless ``steps`` more tokens of each row fit into the cache."""
    needed = int(starts.max()) + steps
    if needed > cache.capacity:
        raise CacheError(
            f"a KV cache of {cache.capacity} tokens a row is too small for {needed} tokens: "
            "take fewer steps, or make it larger"
        )


def check_paged_decode(page_size: int, positions: Ints, table: Ints) -> None:
    """Raise ``CacheError`` for rows that nothing was stored of, or beyond their pages."""
    room = table.shape[1] * page_size
    for row, (position, page) in enumerate(
        zip(positions.tolist(), table[:, 0].tolist(), strict=True)
    ):
        if page == 0 or position < 0:
            continue
        if position == 0:
            raise CacheError(f"row {row} is empty: prefill it before it is decoded")
        if position >= room:
            raise CacheError(
                f"row {row} is at position {position}, but its pages have room for {room} tokens: "
                "give it one more page"
            )


def check_paged_rows(page_size: int, rows: Ints, slots: Ints, table: Ints) -> None:
    """Raise ``InputError`` for rows of tokens that the page table does not have."""
    outside = rows[(slots >= page_size) & ((rows < 0) | (rows >= len(table)))]
    if len(outside) > 0:
        raise InputError(f"row {outside[0]} is not in a page table of {len(table)} rows")


def check_lengths(lengths: Ints, size: int) -> None:
    """Raise ``InputError`` for lengths of prompts that are not in 0 … ``size``."""
    for number, length in enumerate(lengths.tolist()):
        if not 0 <= length <= size:
            raise InputError(f"lengths[{number}] is {length}, but the prompts have {size} tokens")


def check_segments(rows: Ints, segments: Ints) -> None:
    """Raise ``InputError`` unless each segment has a row of its own; -1 is padding."""
    real = segments >= 0
    row_of: dict[int, int] = {}
    for segment, row in zip(segments[real].tolist(), rows[real].tolist(), strict=True):
        if row_of.setdefault(segment, row) != row:
            raise InputError(f"segment {segment} lies in rows {row_of[segment]} and {row}")
    if len(set(row_of.values())) < len(row_of):
        raise InputError("two segments have the same row: each prompt needs its own")
