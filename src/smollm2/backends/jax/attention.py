"""Attention in float32 softmax, of few queries at a time so that scores stay small."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import sqrt

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

QUERY_CHUNK = 256
"""Queries that attend at a time: bounds the scores to QUERY_CHUNK × H × S numbers."""

_HIDDEN = float(np.finfo(np.float32).min)
"""The score of a key that is not seen: of -inf a query that sees none, as one that pads a chunk,
would make NaN, which its derivative gives to all keys."""

Precision = lax.Precision


def attention(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    visible: jax.Array,
    precision: Precision,
) -> jax.Array:
    """Queries [N, Q, H, D] over keys [N, K, D, S] and values [N, K, S, D]: [N, Q, H, D].

    ``visible`` [N, Q, S]. Query heads share kv heads in consecutive groups of H/K, and no key is
    repeated for them.
    """
    rows, count, heads, size = query.shape
    shared = keys.shape[1]
    # Head by head, so that both products are of matrices that lie in order.
    by_head = query.reshape(rows, count, shared, heads // shared, size).transpose(0, 2, 3, 1, 4)
    product = partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    scores = product("nkgqd,nkds->nkgqs", by_head, keys) * (1 / sqrt(size))
    scores = jnp.where(visible[:, None, None], scores, _HIDDEN)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    mixed = product("nkgqs,nksd->nkgqd", weights, values).astype(query.dtype)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(query.shape)


def row_attention(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
    precision: Precision,
) -> jax.Array:
    """Attention [N, Q, H, D] where key s is visible from position s on; ``positions`` [N, Q].

    What lies behind the last of them may be anything, NaN too, which a weight of 0 would not hide.
    """
    places = jnp.arange(keys.shape[3])
    used = places <= jnp.max(positions, axis=1, keepdims=True)
    values = jnp.where(used[:, None, :, None], values, 0)

    def part(start: jax.Array, query: jax.Array, positions: jax.Array) -> jax.Array:
        visible = places <= positions[:, :, None]
        return attention(query, keys, values, visible, precision)

    return _chunked(part, query, positions)


def segment_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    positions: jax.Array,
    segments: jax.Array,
    reach: int,
    precision: Precision,
) -> jax.Array:
    """Causal attention within segments: query [T, H, D], key and value [T, K, D] to [T, H, D].

    A token sees those of its segment up to its position, of which none is more than ``reach``
    tokens before it. Values that are no numbers make NaN of the tokens that see them and of no
    others, padding among them, which a weight of 0 would not spare.
    """
    tokens = len(query)
    span = min(reach + QUERY_CHUNK, tokens)
    sound = jnp.isfinite(value).all((1, 2))
    value = jnp.where(sound[:, None, None], value, 0)
    of_keys: tuple[jax.Array, ...] = positions, segments, sound
    if span < tokens:
        key, value = (jnp.pad(x, ((reach, 0), (0, 0), (0, 0))) for x in (key, value))
        of_keys = tuple(jnp.pad(x, (reach, 0), constant_values=-2) for x in of_keys)
    keys, values = key.transpose(1, 2, 0), value.swapaxes(0, 1)

    def part(
        start: jax.Array, query: jax.Array, positions: jax.Array, segments: jax.Array
    ) -> jax.Array:
        begin = start if span < tokens else jnp.zeros_like(start)
        seen_keys = lax.dynamic_slice_in_dim(keys, begin, span, axis=2)
        seen_values = lax.dynamic_slice_in_dim(values, begin, span, axis=1)
        key_positions, key_segments, key_sound = (
            lax.dynamic_slice_in_dim(x, begin, span) for x in of_keys
        )
        same = segments[:, :, None] == key_segments
        visible = same & (key_positions <= positions[:, :, None])
        out = attention(query, seen_keys[None], seen_values[None], visible, precision)
        spoiled = jnp.any(visible & ~key_sound, axis=-1)
        return jnp.where(spoiled[:, :, None, None], jnp.nan, out)

    return _chunked(part, query[None], positions[None], segments[None])[0]


def _chunked(part: Callable[..., jax.Array], query: jax.Array, *others: jax.Array) -> jax.Array:
    """``part(start, query, *others)`` over chunks of the queries [N, Q, H, D] and others [N, Q].

    Nothing but what goes in is kept for a derivative: scores are made again for it.
    """
    rows, count = query.shape[:2]
    if count <= QUERY_CHUNK:
        return part(jnp.int32(0), query, *others)
    chunks = -(-count // QUERY_CHUNK)
    missing = chunks * QUERY_CHUNK - count

    def split(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, ((0, 0), (0, missing), *([(0, 0)] * (x.ndim - 2))))
        return padded.reshape(rows, chunks, QUERY_CHUNK, *x.shape[2:]).swapaxes(0, 1)

    starts = jnp.arange(chunks, dtype=jnp.int32) * QUERY_CHUNK
    inputs = (starts, split(query), *(split(x) for x in others))
    out: jax.Array = lax.map(lambda each: jax.checkpoint(part)(*each), inputs)
    return out.swapaxes(0, 1).reshape(rows, chunks * QUERY_CHUNK, *query.shape[2:])[:, :count]
