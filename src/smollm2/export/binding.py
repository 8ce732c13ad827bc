"""Binding: an entry and a number for each of its symbols, which make the shapes of a graph."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from smollm2.cache import PAGE_SIZE
from smollm2.causal_lm import whole_number
from smollm2.config import Config
from smollm2.entries.builders import Array, Tokens
from smollm2.entries.rectangles import Rectangle, rectangles
from smollm2.entries.table import ENTRIES, OF_CONFIG, Entry, Shape
from smollm2.errors import InputError

_SAME = {"B": ("Batch", "Rows"), "Batch": ("B", "Rows"), "Rows": ("Batch", "B")}
"""What stands for how many sequences: each name is taken for the one that an entry has."""

_CACHE = (
    "cache_keys.N and cache_values.N are those of layer N [slots, kv heads, head size]: all zeros "
    "before the first call, then what the last one gave as new_cache_keys.N and new_cache_values.N."
    " They must be finite everywhere, also where nothing was stored, which takes part with a "
    "weight of 0."
)
_NOTES = {
    None: "Padding has segment -1, and gives zeros.",
    "fixed": f"{_CACHE} Position p of row b is slot b * MaxSeq + p; the last slot is scratch, where"
    " padding is written. Padding has segment -1, an idle row position -1.",
    "paged": f"{_CACHE} Place p of page n is slot n * {PAGE_SIZE} + p; page 0 is scratch, where "
    f"padding is written. Padding has a slot below {PAGE_SIZE}, an idle row position -1.",
}
"""What names and shapes do not tell whoever calls a graph, by the kind of its cache."""

_LARGEST = 2**31 - 1
_BINDING = re.compile(r"(?P<symbol>[A-Za-z]+)=(?P<size>\d{1,10})")


@dataclass(frozen=True, slots=True)
class Bound:
    """An entry whose shapes are known, for a model of this config.

    A graph takes ``inputs`` in their order, then the cache; it gives ``result``, then the cache.
    """

    entry: Entry
    config: Config
    sizes: Mapping[str, int]

    @property
    def inputs(self) -> dict[str, tuple[int, ...]]:
        """The shape of each input."""
        return self.entry.shapes(self.sizes)

    @property
    def bindings(self) -> str:
        """The sizes in one line, those that nobody gave included."""
        return ", ".join(f"{symbol}={size}" for symbol, size in self.sizes.items())

    @property
    def result(self) -> tuple[int, ...]:
        """The shape of the result."""
        return self._shape(self.entry.result)

    @property
    def page_size(self) -> int:
        """Tokens a page of the cache; a row of a fixed one is a page. 0 where there is no cache."""
        return {None: 0, "paged": PAGE_SIZE, "fixed": self.sizes.get("MaxSeq", 0)}[self.entry.cache]

    @property
    def slots(self) -> int:
        """Places for tokens of the cache, scratch included, where padding is written.

        That is page 0 of a paged cache, and of a fixed one a place after its last row.
        """
        if self.entry.cache is None:
            return 0
        if self.entry.cache == "paged":
            return self.sizes["Pool"] * PAGE_SIZE
        return self.sizes["Batch"] * self.sizes["MaxSeq"] + 1

    @property
    def steps(self) -> int:
        """How many passes one call makes."""
        return self.result[1] if self.entry.output == "ids" else 1

    @property
    def cache_names(self) -> tuple[str, ...]:
        """Names of the cache as a graph takes it: keys and values of each layer."""
        layers = range(self.config.num_hidden_layers if self.entry.cache is not None else 0)
        return tuple(f"cache_{part}.{layer}" for layer in layers for part in ("keys", "values"))

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """The shape of each of these: slots, kv heads, head size."""
        return self.slots, self.config.num_key_value_heads, self.config.head_dim

    @property
    def result_names(self) -> tuple[str, ...]:
        """Names of what a graph gives."""
        counts = ["counts"] if self.entry.name == "generate_until" else []
        return (self.entry.output, *counts, *(f"new_{name}" for name in self.cache_names))

    def facts(self, dtype: str) -> dict[str, str]:
        """What a file says of the graph in it, with weights of this dtype."""
        return {
            "smollm2.entry": self.entry.name,
            "smollm2.signature": self.entry.signature,
            "smollm2.sizes": json.dumps(dict(self.sizes)),
            "smollm2.dtype": dtype,
            "smollm2.config": json.dumps(self.config.to_dict()),
            "smollm2.notes": self.notes,
        }

    @property
    def notes(self) -> str:
        """What to keep to when the graph is called."""
        drawn = " Row b draws with the seed key + b." if self.entry.name == "sample" else ""
        return (
            f"{_NOTES[self.entry.cache]}{drawn} Nothing is checked: positions continue what is "
            "stored, and ids are tokens."
        )

    def tokens(self, xp: Any, arrays: Iterable[Array]) -> Tokens:
        """The tokens of a pass; ``arrays`` are the first inputs, those of the builder."""
        return self.entry.build(xp, self.page_size, *arrays)

    def rectangles(self, xp: Any, tokens: Tokens) -> tuple[Rectangle, ...]:
        """Which of these tokens attend over which keys."""
        return rectangles(xp, self.page_size, self.entry, tokens, self.sizes)

    def _shape(self, dims: Shape) -> tuple[int, ...]:
        known = {**self.sizes, **{dim: getattr(self.config, of) for dim, of in OF_CONFIG.items()}}
        return tuple(
            prod(int(part) if part.isdigit() else known[part] for part in dim.split("*"))
            for dim in dims
        )


def bind(name: str, config: Config, sizes: Mapping[str, int]) -> Bound:
    """Entry ``name`` with these ``sizes``: ``Batch``, ``S`` and so on, see ``ENTRIES``.

    ``B``, ``Batch`` and ``Rows`` stand for one another; without ``MaxSeq`` it is the context length
    of the model.

    Raises ``InputError`` for an unknown entry, a symbol that is missing, unknown, given twice or no
    size, and for more tokens a row than the cache or the context length has.
    """
    entry = ENTRIES.get(name)
    if entry is None:
        near = difflib.get_close_matches(str(name), ENTRIES, n=1)
        hint = f"did you mean {near[0]}? There are " if near else "choose from "
        raise InputError(f"no entry named {name!r:.80}: {hint}{', '.join(ENTRIES)}")
    known: dict[str, int] = {}
    for symbol, size in sizes.items():
        own = _own_symbol(entry, symbol)
        if own in known:
            other = next(each for each in sizes if _own_symbol(entry, each) == own)
            raise InputError(
                f"{other} and {symbol} both are {own} of entry {name}: give one of them"
            )
        known[own] = whole_number(symbol, size)
    if "MaxSeq" in entry.symbols:
        known.setdefault("MaxSeq", config.max_position_embeddings)
    entry.shapes(known)
    bound = Bound(entry, config, known)
    _check_lengths(bound)
    return bound


def parse_bindings(texts: Iterable[str]) -> dict[str, int]:
    """Sizes by symbol of texts such as ``S=8``. Raises ``InputError`` for any other text."""
    sizes: dict[str, int] = {}
    for text in texts:
        match = _BINDING.fullmatch(text)
        if match is None:
            raise InputError(f"bind is {text!r:.80}: give a symbol and its size, such as S=8")
        symbol = match["symbol"]
        if symbol in sizes:
            raise InputError(f"{symbol} is bound twice: to {sizes[symbol]} and {match['size']}")
        sizes[symbol] = int(match["size"])
    return sizes


def _own_symbol(entry: Entry, symbol: str) -> str:
    """The name that the entry has for a symbol."""
    names: tuple[str, ...] = (symbol, *_SAME.get(symbol, ()))
    for name in names:
        if name in entry.symbols:
            return name
    raise InputError(
        f"entry {entry.name} has no symbol {symbol!r:.80}: it has {', '.join(entry.symbols)}"
    )


def _check_lengths(bound: Bound) -> None:
    """Raise ``InputError`` for sizes that no call could use."""
    context = bound.config.max_position_embeddings
    room = bound.sizes.get("MaxSeq", context)
    limits = {
        "MaxSeq": (context, "the context length"),
        "S": (room, "the tokens that a row can hold"),
        "Steps": (room, "the tokens that a row can hold"),
        "MaxNew": (room, "the tokens that a row can hold"),
        "Pages": (-(-context // PAGE_SIZE), "the pages of the context length"),
    }
    for symbol, size in bound.sizes.items():
        limit, what = limits.get(symbol, (_LARGEST, "what an index can hold"))
        if size > limit:
            raise InputError(
                f"{symbol} of entry {bound.entry.name} is {size}, but may be {limit} at most, "
                f"{what}"
            )
    if bound.sizes.get("Pool", 2) < 2:
        raise InputError("Pool is 1, but page 0 is scratch: give at least 2")
    if max(bound.slots, *map(prod, bound.inputs.values())) > _LARGEST:
        raise InputError(f"{bound.bindings} are too large together: indices have 32 bits")
