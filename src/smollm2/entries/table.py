"""The table of entries: what each takes and gives, in symbols that an export binds to numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from smollm2.entries import builders
from smollm2.entries.builders import Tokens
from smollm2.errors import InputError

CacheKind = Literal["fixed", "paged"]
Output = Literal["logits", "ids", "hidden", "log_probs", "loss"]

Shape = tuple[str, ...]

OF_CONFIG = {"Vocab": "vocab_size", "Hidden": "hidden_size"}
"""Symbols that the model's config binds."""

CACHES: Mapping[CacheKind, Shape] = {"fixed": ("Batch", "MaxSeq"), "paged": ("Pool",)}
"""Symbols of a cache: rows and their capacity, or the pages of a pool."""


@dataclass(frozen=True, slots=True)
class Input:
    """An input: integers, but where ``dtype`` says float32. A scalar has no dims."""

    name: str
    dims: Shape = ()
    dtype: Literal["int32", "float32"] = "int32"

    def __str__(self) -> str:
        return f"{self.name} [{', '.join(self.dims)}]" if self.dims else self.name


@dataclass(frozen=True, slots=True)
class Entry:
    """One way to call a model.

    ``build(xp, page_size, *arrays)`` makes the tokens of the pass of its ``tokens``, which are the
    first inputs, ``len(inputs) - extra`` of them; the others are for what follows the pass
    (targets, the number of steps). ``output`` says what becomes of the hidden states of the wanted
    tokens, in the order of which the result lies: logits, or hidden states as they are; of targets,
    log-probabilities or their weighed sum. Of ``ids``, a pass gives one column: the next one feeds
    it at the position after.
    """

    name: str
    inputs: tuple[Input, ...]
    result: Shape
    output: Output
    build: Callable[..., Tokens]
    cache: CacheKind | None = None
    extra: int = 0

    @property
    def symbols(self) -> Shape:
        """What has to be bound before the shapes are known, those of the cache included."""
        named = [dim for item in self.inputs for dim in item.dims]
        of_cache = () if self.cache is None else CACHES[self.cache]
        every = dict.fromkeys([*named, *(dim.rpartition("*")[2] for dim in self.result), *of_cache])
        return tuple(dim for dim in every if not (dim.isdigit() or dim in OF_CONFIG))

    @property
    def signature(self) -> str:
        """The entry in one line."""
        taken = ", ".join(map(str, self.inputs))
        given = f"{self.output} [{', '.join(self.result)}]" if self.result else self.output
        of_cache = f", {self.cache} cache [{', '.join(CACHES[self.cache])}]" if self.cache else ""
        return f"{self.name}({taken}) → {given}{of_cache}"

    def shapes(self, sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """The shape of each input, where ``sizes`` binds the symbols.

        Raises ``InputError`` for a symbol that is not bound, or to what is no size.
        """
        for symbol in self.symbols:
            if sizes.get(symbol, 0) < 1:
                said = f"is {sizes[symbol]}" if symbol in sizes else "is not bound"
                raise InputError(
                    f"{symbol} of entry {self.name} {said}: give a number of at least 1 for each "
                    f"of {', '.join(self.symbols)}"
                )
        return {
            item.name: tuple(int(dim) if dim.isdigit() else sizes[dim] for dim in item.dims)
            for item in self.inputs
        }


_ROWS = (Input("tokens", ("Batch", "S")), Input("pos"))
_TOKEN = (Input("token", ("Batch", "1")), Input("pos"))
_PACKED = (
    Input("tokens", ("P",)),
    Input("rows", ("P",)),
    Input("positions", ("P",)),
    Input("segments", ("P",)),
    Input("last", ("Batch",)),
)
_PAGED = (
    Input("tokens", ("P",)),
    Input("positions", ("P",)),
    Input("rows", ("P",)),
    Input("slots", ("P",)),
    Input("last", ("Rows",)),
)
_TABLE = Input("table", ("Rows", "Pages"))
_SEQUENCES = tuple(Input(name, ("P",)) for name in ("tokens", "positions", "segments"))


def _steps(rows: str) -> tuple[Input, ...]:
    return Input("step_tokens", (rows, "1")), Input("step_positions", (rows,))


_LOGITS = ("Batch", "Vocab")

ENTRIES: Mapping[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry(
            "forward",
            (Input("tokens", ("B", "S")),),
            ("B", "S", "Vocab"),
            "logits",
            builders.forward,
        ),
        Entry(
            "next_token",
            (Input("tokens", ("B", "S")),),
            ("B", "Vocab"),
            "logits",
            builders.next_token,
        ),
        Entry("decode", _TOKEN, _LOGITS, "logits", builders.prefill, "fixed"),
        Entry("prefill", _ROWS, _LOGITS, "logits", builders.prefill, "fixed"),
        Entry(
            "prefill_slots",
            (Input("tokens", ("M", "S")), Input("slots", ("M",)), Input("lengths", ("M",))),
            ("M", "Vocab"),
            "logits",
            builders.prefill_slots,
            "fixed",
        ),
        Entry("prefill_packed", _PACKED, _LOGITS, "logits", builders.prefill_packed, "fixed"),
        Entry(
            "decode_rows",
            (Input("tokens", ("Batch", "1")), Input("positions", ("Batch",))),
            _LOGITS,
            "logits",
            builders.decode_rows,
            "fixed",
        ),
        Entry(
            "step_packed",
            (*_PACKED, *_steps("Batch")),
            ("2*Batch", "Vocab"),
            "logits",
            builders.step_packed,
            "fixed",
        ),
        Entry(
            "prefill_paged",
            (*_PAGED, _TABLE),
            ("Rows", "Vocab"),
            "logits",
            builders.prefill_paged,
            "paged",
        ),
        Entry(
            "decode_paged",
            (Input("tokens", ("Rows", "1")), Input("positions", ("Rows",)), _TABLE),
            ("Rows", "Vocab"),
            "logits",
            builders.decode_paged,
            "paged",
        ),
        Entry(
            "step_paged",
            (*_PAGED, *_steps("Rows"), _TABLE),
            ("2*Rows", "Vocab"),
            "logits",
            builders.step_paged,
            "paged",
        ),
        Entry("generate", _TOKEN, ("Batch", "Steps"), "ids", builders.prefill, "fixed"),
        Entry(
            "sample",
            (*_TOKEN, Input("key"), Input("temperature", dtype="float32")),
            ("Batch", "Steps"),
            "ids",
            builders.prefill,
            "fixed",
            extra=2,
        ),
        Entry(
            "generate_until",
            (*_TOKEN, Input("eos")),
            ("Batch", "MaxNew"),
            "ids",
            builders.prefill,
            "fixed",
            extra=1,
        ),
        Entry(
            "loss_packed",
            (*_SEQUENCES, Input("targets", ("P",)), Input("weights", ("P",), "float32")),
            (),
            "loss",
            builders.packed,
            extra=2,
        ),
        Entry(
            "log_probs_packed",
            (*_SEQUENCES, Input("targets", ("P",))),
            ("P",),
            "log_probs",
            builders.packed,
            extra=1,
        ),
        Entry("hidden_packed", _SEQUENCES, ("P", "Hidden"), "hidden", builders.packed),
    )
}
"""Every entry by its name, in the order of use."""
