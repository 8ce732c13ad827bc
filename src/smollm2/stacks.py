"""Stacked matrices: projections of the same input as one packed matrix, cut at whole tiles.

Queries, keys and values lie below each other; gate and up take turns, tile by tile. A part of a
stack is a strided view of its tiles, so nothing is copied to take it apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from smollm2.errors import CheckpointError
from smollm2.formats.smol import TILE_ROWS
from smollm2.formats.tensorfile import TensorEntry

_QKV, _GATE_UP = "self_attn.qkv", "mlp.gate_up"
_PARTS: Mapping[str, tuple[str, ...]] = {
    _QKV: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    _GATE_UP: ("mlp.gate_proj", "mlp.up_proj"),
}
_NAME = re.compile(rf"(model\.layers\.\d+)\.({'|'.join(map(re.escape, _PARTS))})")


class Part(NamedTuple):
    """A matrix of a stack: its canonical name and shape, and which tiles of the stack it is."""

    name: str
    shape: tuple[int, ...]
    tiles: slice


class Stack(NamedTuple):
    """A stack and its parts, in order."""

    name: str
    parts: tuple[Part, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows of all parts, and their columns."""
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]


def stacks(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Stack]:
    """Go through the stacks that a model of these shapes can have: those of whole tiles."""
    layers = sum(name.endswith(".self_attn.q_proj.weight") for name in shapes)
    for layer in range(layers):
        for kind in _PARTS:
            if stack := _stack(f"model.layers.{layer}", kind, shapes):
                yield stack


def unstack(entry: TensorEntry, shapes: Mapping[str, tuple[int, ...]]) -> Sequence[Part] | None:
    """Return the parts of a file's tensor, None where it is no stack.

    Raises ``CheckpointError`` for a stack that is not of the shape that its parts have.
    """
    match = _NAME.fullmatch(entry.name)
    stack = match and _stack(match[1], match[2], shapes)
    if not stack:
        return None
    if entry.shape != stack.shape:
        raise CheckpointError(
            f"{entry.name} has the shape {list(entry.shape)}, but its parts have "
            f"{list(stack.shape)}"
        )
    return stack.parts


def _stack(layer: str, kind: str, shapes: Mapping[str, tuple[int, ...]]) -> Stack | None:
    names = [f"{layer}.{part}.weight" for part in _PARTS[kind]]
    if not all(name in shapes for name in names):
        return None
    rows = [shapes[name][0] for name in names]
    if any(count % TILE_ROWS for count in rows):
        return None
    parts: list[Part] = []
    start = 0
    for number, (name, count) in enumerate(zip(names, rows, strict=True)):
        if kind == _GATE_UP:
            tiles = slice(number, None, len(names))
        else:
            tiles = slice(start, start + count // TILE_ROWS)
            start = tiles.stop
        parts.append(Part(name, shapes[name], tiles))
    return Stack(f"{layer}.{kind}", tuple(parts))
