"""Storage: how keys and values lie on a device, written and read while a forward is traced.

Keys lie as columns, [pages, K, D, room], values as rows, [pages, K, room, D]: so both products of
attention read them in order, and a step of decode over 4,096 tokens does so eight times as fast as
with keys in rows on a CPU.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Sharding
from jax.typing import DTypeLike

from smollm2.backends.jax.inputs import Inputs, Rows


class Stored(NamedTuple):
    """Keys [pages, K, D, room] (after RoPE) and values [pages, K, room, D] of one layer."""

    keys: jax.Array
    values: jax.Array

    @property
    def room(self) -> int:
        """Places of each page."""
        return self.values.shape[2]


def empty(
    pages: int, heads: int, size: int, room: int, dtype: DTypeLike, sharding: Sharding
) -> Stored:
    """Storage of one layer, zeros."""
    return Stored(
        jnp.zeros((pages, heads, size, room), dtype, device=sharding),
        jnp.zeros((pages, heads, room, size), dtype, device=sharding),
    )


@partial(jax.jit, static_argnames="room")
def lengthened(stored: Stored, room: int) -> Stored:
    """A copy with more places a page."""
    more = (0, room - stored.room)
    still = (0, 0)
    return Stored(
        jnp.pad(stored.keys, (still, still, still, more)),
        jnp.pad(stored.values, (still, still, more, still)),
    )


def write(stored: Stored, key: jax.Array, value: jax.Array, inputs: Inputs) -> Stored:
    """Storage with keys and values [T, K, D] at their pages and offsets; padding goes nowhere.

    ``inputs`` has places for two tokens at least: XLA makes of a scatter of one index a slice that
    it merges with what reads it, and copies the whole storage for that.
    """
    if len(key) < len(inputs.pages):
        key, value = (jnp.repeat(x, len(inputs.pages), axis=0) for x in (key, value))
    keys = stored.keys.at[inputs.pages, :, :, inputs.offsets]
    values = stored.values.at[inputs.pages, :, inputs.offsets]
    return Stored(
        keys.set(key.astype(stored.keys.dtype), mode="drop"),
        values.set(value.astype(stored.values.dtype), mode="drop"),
    )


def read(stored: Stored, rows: Rows) -> tuple[jax.Array, jax.Array]:
    """Keys [N, K, D, S] and values [N, K, S, D] of rows, whole pages at a time."""
    keys, values = stored.keys[..., : rows.span], stored.values[:, :, : rows.span]
    if rows.table is None:
        return keys, values
    if rows.table.shape[1] == 1:
        return keys[rows.table[:, 0]], values[rows.table[:, 0]]
    keys = keys[rows.table].transpose(0, 2, 3, 1, 4)
    values = values[rows.table].transpose(0, 2, 1, 3, 4)
    return keys.reshape(*keys.shape[:3], -1), values.reshape(*values.shape[:2], -1, values.shape[4])
