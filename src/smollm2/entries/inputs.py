"""Inputs of entries, checked by the table: integers, their shapes, the kind of the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smollm2.batch import Ints
from smollm2.cache import Cache
from smollm2.entries.table import ENTRIES, Entry, Input
from smollm2.errors import CacheError, InputError

IntsLike = NDArray[np.integer[Any]] | Sequence[Any] | int
"""Integers: an array, nested sequences, or one number for a scalar."""

FloatsLike = NDArray[np.floating[Any]] | Sequence[float]
"""Numbers: an array, or a sequence."""

_LIMITS = np.iinfo(np.int32)
_OTHER = {"fixed": "make it with new_cache()", "paged": "make it with new_paged_cache()"}


def checked(name: str, cache: Cache | None, *values: IntsLike) -> list[Ints]:
    """The first inputs of an entry as arrays whose shapes fit the table, and one another.

    Raises ``InputError`` for what is no integer or of another shape, and ``CacheError`` for a
    cache of another kind or another number of rows, or one that is closed.
    """
    entry = ENTRIES[name]
    sizes: dict[str, int] = {}
    if entry.cache is not None:
        given = _checked_kind(entry, cache)
        if not given.layout.paged:
            sizes["Batch"] = given.rows
    return [
        _fitting(entry, item, integers(item.name, value), sizes)
        for item, value in zip(entry.inputs, values, strict=False)
    ]


def integers(name: str, value: object) -> Ints:
    """``value`` as an array of int32. Raises ``InputError`` where it holds anything else."""
    try:
        array = np.asarray(value)
    except ValueError:
        raise InputError(f"{name} must be integers, in rows of one length") from None
    if array.dtype == object:  # None among them, or a number beyond 64 bits
        found = (type(each).__name__ for each in array.flat if not isinstance(each, int))
        raise InputError(f"{name} must be integers of 32 bits, not {next(found, 'larger ones')}")
    if array.dtype.kind not in "iub" and array.size > 0:
        raise InputError(f"{name} must be integers, not {array.dtype}")
    if array.size and not _LIMITS.min <= int(array.min()) <= int(array.max()) <= _LIMITS.max:
        raise InputError(f"{name} must be integers of 32 bits, not {int(abs(array).max())}")
    return array.astype(np.int32)


def floats(name: str, value: FloatsLike, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """``value`` as an array of float32. Raises ``InputError`` for another shape, and no numbers."""
    try:
        given = np.asarray(value)
    except ValueError:
        raise InputError(f"{name} must be numbers [{shape[0]}], in one row") from None
    if given.dtype.kind not in "iubf" and given.size > 0:
        raise InputError(f"{name} must be numbers [{shape[0]}], not {given.dtype}")
    with np.errstate(over="ignore"):
        array = given.astype(np.float32)
    if not np.isfinite(array).all():
        raise InputError(f"{name} must be finite numbers of 32 bits")
    if array.shape != shape:
        raise InputError(f"{name} has shape {list(array.shape)}, but must have {list(shape)}")
    return array


def _checked_kind(entry: Entry, cache: object) -> Cache:
    assert entry.cache is not None
    found = type(cache).__name__
    if isinstance(cache, Cache):
        found = "a paged one" if cache.layout.paged else "a fixed one"
        if cache.layout.paged == (entry.cache == "paged"):
            cache.check_open()
            return cache
    raise CacheError(
        f"{entry.name} needs a {entry.cache} cache, not {found}: {_OTHER[entry.cache]}"
    )


def _fitting(entry: Entry, item: Input, array: Ints, sizes: dict[str, int]) -> Ints:
    """``array``, if it has the dims of the input; binds what is not bound by another input."""
    dims = item.dims
    if not dims and array.ndim == 1:
        dims = ("Batch",)  # a scalar may be given row by row
    fits = array.ndim == len(dims) and all(
        size == (int(dim) if dim.isdigit() else sizes.setdefault(dim, size))
        for dim, size in zip(dims, array.shape, strict=True)
    )
    if not fits or 0 in array.shape:
        bound = {dim: sizes[dim] for dim in dims if dim in sizes}
        known = "".join(f", where {dim} is {size}" for dim, size in bound.items())
        raise InputError(
            f"{item.name} has shape {list(array.shape)}, but {entry.name} takes "
            f"[{', '.join(dims)}]{known}"
        )
    return array


def per_row(pos: Ints, rows: int) -> Ints:
    """A position of each row, [rows], where one may have been given for all."""
    return np.broadcast_to(pos, (rows,))


def mask_of(value: IntsLike | None, tokens: Ints, pos: Ints) -> tuple[Ints | None, Ints]:
    """The mask of the new tokens, as wide as they are, and what each row holds before them.

    ``value`` may speak of the ``pos`` tokens before as well, as the mask of transformers does:
    those of them that are padding were not stored. Raises ``InputError`` for another shape or
    value.
    """
    rows, size = tokens.shape
    starts = per_row(pos, rows)
    if value is None:
        return None, starts
    mask = integers("attention_mask", value)
    past = mask.shape[1] - size if mask.ndim == 2 and len(mask) == rows else -1
    if past < 0 or (past > 0 and (starts != past).any()):
        raise InputError(
            f"attention_mask has shape {list(mask.shape)}, but tokens {list(tokens.shape)} need "
            f"[{rows}, {size}], or [{rows}, pos + {size}] with what is stored"
        )
    if not np.isin(mask, (0, 1)).all():
        raise InputError("attention_mask must hold 1 for a token and 0 for padding")
    if past > 0:
        starts = mask[:, :past].sum(axis=1, dtype=np.int32)
    return mask[:, past:], starts


def places_of(value: IntsLike | None, tokens: Ints) -> Ints | None:
    """``position_ids`` of ``tokens`` [B, S]: [S] or [B, S]. Raises ``InputError`` otherwise."""
    if value is None:
        return None
    places = integers("position_ids", value)
    if places.shape not in ((tokens.shape[1],), tokens.shape):
        raise InputError(
            f"position_ids has shape {list(places.shape)}, but tokens {list(tokens.shape)} need "
            f"[{tokens.shape[1]}] or {list(tokens.shape)}"
        )
    return places
