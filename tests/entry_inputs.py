"""Random inputs of every entry, valid for what is stored, with padding among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smollm2.entries import ENTRIES
from smollm2.entries.table import Entry

Arrays = dict[str, NDArray[Any]]
PAGE = 64
SIZES = {
    "B": 2,
    "Batch": 3,
    "S": 5,
    "M": 2,
    "P": 12,
    "Rows": 3,
    "Pages": 2,
    "MaxSeq": 16,
    "Pool": 9,
    "Steps": 2,
    "MaxNew": 3,
}


def sizes_of(entry: Entry, sizes: Mapping[str, int] = SIZES) -> dict[str, int]:
    """The sizes of the symbols of an entry."""
    return {symbol: sizes[symbol] for symbol in entry.symbols}


def page_table(rng: np.random.Generator, sizes: Mapping[str, int] = SIZES) -> NDArray[np.int32]:
    """Pages of every row, in any order; none is page 0."""
    pages = rng.permutation(np.arange(1, sizes["Pool"]))[: sizes["Rows"] * sizes["Pages"]]
    return pages.reshape(sizes["Rows"], sizes["Pages"]).astype(np.int32)


def random_inputs(
    name: str,
    rng: np.random.Generator,
    stored: Sequence[int] = (),
    *,
    table: NDArray[np.int32] | None = None,
    sizes: Mapping[str, int] = SIZES,
    vocabulary: int = 96,
) -> Arrays:
    """Inputs of entry ``name``: empty rows get prompts, the others steps.

    ``prefill`` and ``prefill_paged`` continue what is ``stored`` of each row.
    """
    entry = ENTRIES[name]
    made: Arrays = {
        item.name: rng.integers(0, vocabulary, [_size(dim, sizes) for dim in item.dims])
        for item in entry.inputs
    }
    names = set(made)
    if table is not None:
        made["table"] = table
    if "pos" in names:
        made["pos"] = np.array(stored[0])
    if "slots" in names and "lengths" in names:
        made["slots"] = rng.permutation(np.flatnonzero(np.array(stored) == 0))[: sizes["M"]]
        made["lengths"] = rng.integers(0, sizes["S"] + 1, sizes["M"])
    elif "last" in names:
        begin = stored if name == "prefill_paged" else [0 if n == 0 else -1 for n in stored]
        made |= _packed(rng, begin, sizes, names)
        if table is not None:
            made["slots"] = _slots(made, table)
    elif "segments" in names:
        made |= _sequences(rng, sizes["P"])
    key = "step_positions" if "step_positions" in names else "positions"
    if key == "step_positions" or name.startswith("decode_"):
        made[key] = np.array([n if n > 0 else -1 for n in stored])
    if "weights" in names:
        made["weights"] = rng.random(sizes["P"])
    if "temperature" in names:
        made["temperature"] = np.array(0.8)
    return {item.name: np.asarray(made[item.name]).astype(item.dtype) for item in entry.inputs}


def _size(dim: str, sizes: Mapping[str, int]) -> int:
    return int(dim) if dim.isdigit() else sizes[dim]


def _packed(
    rng: np.random.Generator, begin: Sequence[int], sizes: Mapping[str, int], names: set[str]
) -> Arrays:
    """Tokens of rows from their ``begin`` on (-1: none), in any order of the rows; then padding."""
    count = sizes["P"]
    rows, positions = np.zeros(count, int), np.zeros(count, int)
    segments, last = np.full(count, -1), np.full(len(begin), -1)
    used = 0
    for number, row in enumerate(rng.permutation(len(begin)).tolist()):
        length = int(rng.integers(1, 6)) if begin[row] >= 0 else 0
        length = min(length, count - used)
        if length == 0:
            continue
        place = slice(used, used + length)
        rows[place], segments[place] = row, number
        positions[place] = begin[row] + np.arange(length)
        used += length
        last[row] = used - 1
    if "segments" not in names:
        rows[used:] = 0
    return {"rows": rows, "positions": positions, "segments": segments, "last": last}


def _slots(made: Arrays, table: NDArray[np.int32]) -> NDArray[Any]:
    places = table[made["rows"], made["positions"] // PAGE] * PAGE + made["positions"] % PAGE
    return np.where(made["segments"] < 0, made["positions"] % PAGE, places)


def _sequences(rng: np.random.Generator, count: int) -> Arrays:
    """Sequences one after the other, padding at the end of some of them."""
    positions, segments = np.zeros(count, int), np.full(count, -1)
    used = number = 0
    while used < count:
        length = min(int(rng.integers(1, 6)), count - used)
        positions[used : used + length] = np.arange(length)
        segments[used : used + length] = number
        used, number = used + length + int(rng.integers(0, 3)), number + 1
    return {"positions": positions, "segments": segments}
