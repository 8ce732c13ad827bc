"""The NumPy backend: float32, readable, and the reference that every other one is held to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from smollm2.backends import Backend, BackendOptions, given_options
from smollm2.backends.kvcache import KVCache
from smollm2.backends.rotary import rotary_tables
from smollm2.batch import Batch, Ints
from smollm2.cache import Cache, Layout
from smollm2.causal_lm import (
    LOGITS_CHUNK,
    LoadedModel,
    Traffic,
    check_batch,
    checked_cache,
    dense_traffic,
    learned_tokens,
    log_probs_of,
)
from smollm2.config import Config
from smollm2.errors import InputError
from smollm2.model import forward, head_of, hidden
from smollm2.quantize import as_float32
from smollm2.weights import Attention, Block, Mlp, Weights

Floats = NDArray[np.float32]

QUERY_CHUNK = 128
"""Queries that attend at a time: bounds the scores to QUERY_CHUNK × H × S numbers."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Queries that attend together.

    ``tokens`` [n]; the last of them sees ``visible`` keys; ``masked`` [n, visible] marks those
    that each does not see (None: all see all).
    """

    tokens: NDArray[np.int64]
    visible: int
    masked: NDArray[np.bool_] | None


@dataclass(frozen=True, slots=True)
class Visible:
    """Tokens that may see one another: one row of the cache, or one segment without a cache."""

    row: int
    tokens: NDArray[np.int64]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What one batch needs in every layer: rotary tables [T, 1, D/2] and who sees whom."""

    batch: Batch
    cache: KVCache | None
    cos: Floats
    sin: Floats
    parts: tuple[Visible, ...]


class NumpyOps:
    """The table of operations, filled with NumPy."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def plan(self, batch: Batch, cache: KVCache | None) -> Plan:
        """Rotary tables and masks of a batch."""
        cos, sin = rotary_tables(self.config, batch.positions)
        return Plan(batch, cache, cos[:, None], sin[:, None], tuple(_split(batch, cache)))

    def embed(self, table: Floats, plan: Plan) -> Floats:
        """Rows of the embedding, [T, C]."""
        return table[plan.batch.ids]

    def rms_norm(self, x: Floats, weight: Floats) -> Floats:
        """Root-mean-square norm over the last axis."""
        squares: Floats = np.einsum("tc,tc->t", x, x)[:, None]
        mean = squares / np.float32(x.shape[-1])
        scale: Floats = 1 / np.sqrt(mean + np.float32(self.config.rms_norm_eps))
        return x * scale * weight

    def linear(self, x: Floats, weight: Floats) -> Floats:
        """Matrix product with a weight [out, in]."""
        return x @ weight.T

    def qkv(self, x: Floats, attention: Attention[Floats]) -> tuple[Floats, Floats, Floats]:
        """Three products, split into heads."""
        shape = (len(x), -1, self.config.head_dim)
        return (
            self.linear(x, attention.query).reshape(shape),
            self.linear(x, attention.key).reshape(shape),
            self.linear(x, attention.value).reshape(shape),
        )

    def rope(self, x: Floats, plan: Plan) -> Floats:
        """Rotary embedding in the half-split form: halves (a, b) of a head rotate as pairs."""
        half = x.shape[-1] // 2
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * plan.cos - b * plan.sin, b * plan.cos + a * plan.sin], axis=-1)

    def attend(self, query: Floats, key: Floats, value: Floats, layer: int, plan: Plan) -> Floats:
        """Causal attention of each part over its stored (or own) keys and values."""
        if plan.cache is not None:
            plan.cache.write(layer, plan.batch.slots, key, value)
        out = np.empty_like(query)
        for part in plan.parts:
            if plan.cache is None:
                keys = key[part.tokens].swapaxes(0, 1)
                values = value[part.tokens].swapaxes(0, 1)
            else:
                pages = plan.batch.page_table[part.row]
                keys, values = plan.cache.read(layer, pages, int(plan.batch.lengths[part.row]))
            for chunk in part.chunks:
                out[chunk.tokens] = _attention(
                    query[chunk.tokens],
                    keys[:, : chunk.visible],
                    values[:, : chunk.visible],
                    chunk.masked,
                )
        return out.reshape(len(query), -1)

    def swiglu(self, x: Floats, mlp: Mlp[Floats]) -> Floats:
        """Gated MLP."""
        gate = self.linear(x, mlp.gate)
        gate /= 1.0 + np.exp(-gate)  # exp(-gate) is inf where silu(gate) is 0
        gate *= self.linear(x, mlp.up)
        return self.linear(gate, mlp.down)

    def blocks(
        self,
        x: Floats,
        blocks: Sequence[Block[Floats]],
        plan: Plan,
        block: Callable[[Floats, Block[Floats], int, Plan], Floats],
    ) -> Floats:
        """One layer after the other."""
        for layer, weights in enumerate(blocks):
            x = block(x, weights, layer, plan)
        return x

    def wanted(self, x: Floats, plan: Plan) -> Floats:
        """Rows whose logits are wanted."""
        return x[plan.batch.wanted]

    def head(self, x: Floats, weight: Floats) -> Floats:
        """Logits, [W, V]."""
        return self.linear(x, weight)


def _split(batch: Batch, cache: KVCache | None) -> Iterator[Visible]:
    """Split a batch into parts that do not see each other, and their queries into chunks."""
    owners = batch.segments if cache is None else batch.rows
    for owner in np.unique(owners):
        tokens = np.flatnonzero(owners == owner)
        positions = batch.positions[tokens]
        places = positions if cache is None else np.arange(batch.lengths[owner])
        chunks = []
        for start in range(0, len(tokens), QUERY_CHUNK):
            part = slice(start, start + QUERY_CHUNK)
            masked = places[None, :] > positions[part, None]
            visible = int(np.flatnonzero(~masked.all(axis=0))[-1]) + 1
            masked = masked[:, :visible]
            chunks.append(Chunk(tokens[part], visible, masked if masked.any() else None))
        yield Visible(int(owner), tokens, tuple(chunks))


def _attention(
    query: Floats, keys: Floats, values: Floats, masked: NDArray[np.bool_] | None
) -> Floats:
    """Softmax attention of n queries [n, H, D] over S keys and values [K, S, D].

    ``masked`` [n, S] marks what a query must not see. Query heads share kv heads in consecutive
    groups of H/K.
    """
    count, heads, size = query.shape
    shared, length, _ = keys.shape
    scaled: Floats = query * np.float32(1 / sqrt(size))
    by_head = scaled.reshape(count, shared, heads // shared, size).transpose(1, 2, 0, 3)
    scores: Floats = by_head.reshape(shared, -1, size) @ keys.swapaxes(1, 2)
    if masked is not None:
        view = scores.reshape(shared, heads // shared, count, length)
        np.copyto(view, np.float32(-np.inf), where=masked)
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    mixed: Floats = scores @ values
    mixed /= scores.sum(axis=-1, keepdims=True)
    by_query = mixed.reshape(shared, heads // shared, count, size).transpose(2, 0, 1, 3)
    return by_query.reshape(count, heads, size)


class NumpyModel(LoadedModel[KVCache]):
    """A model whose weights are float32 arrays."""

    threads: None = None

    def __init__(self, config: Config, weights: Weights[Floats]) -> None:
        super().__init__(config)
        self.ops = NumpyOps(config)
        self._weights: Weights[Floats] | None = weights

    @property
    def traffic(self) -> Traffic:
        """Every value in float32; of an embedding that is not the head, next to nothing."""
        return dense_traffic(self.config, 4)

    def make_cache(self, layout: Layout) -> KVCache:
        """Storage in float32."""
        return KVCache(
            layout,
            layers=self.config.num_hidden_layers,
            heads=self.config.num_key_value_heads,
            size=self.config.head_dim,
        )

    def forward(self, batch: Batch, cache: Cache | None = None) -> Floats:
        """Logits of the wanted tokens, [W, V]. See ``CausalLM.forward``."""
        return self._run(forward, batch, cache)

    def hidden(self, batch: Batch, cache: Cache | None = None) -> Floats:
        """Hidden states of the wanted tokens, [W, C]. See ``CausalLM.hidden``."""
        return self._run(hidden, batch, cache)

    def log_probs(self, batch: Batch, targets: Ints) -> Floats:
        """Log-probability of each target, [T]. See ``CausalLM.log_probs``."""
        learned = learned_tokens(self.config, batch, targets)
        states = self.hidden(replace(batch, wanted=learned.astype(np.int32)))
        head = head_of(self._open_weights())
        log_probs = np.zeros(len(batch), np.float32)
        for start in range(0, len(learned), LOGITS_CHUNK):
            part = slice(start, start + LOGITS_CHUNK)
            with np.errstate(all="ignore"):  # whoever turns logits into probabilities checks them
                logits = self.ops.head(states[part], head)
            log_probs[learned[part]] = log_probs_of(logits, targets[learned[part]])
        return log_probs

    def _open_weights(self) -> Weights[Floats]:
        if self._weights is None:
            raise InputError("the model is closed: load it again")
        return self._weights

    def _run(
        self,
        text: Callable[[Weights[Floats], NumpyOps, Plan], Floats],
        batch: Batch,
        cache: Cache | None,
    ) -> Floats:
        weights = self._open_weights()
        stored = checked_cache(KVCache, cache)
        check_batch(self.config, batch)
        if stored is not None:
            stored.prepare(batch)
        with np.errstate(all="ignore"):  # whoever reads the logits checks them
            result = text(weights, self.ops, self.ops.plan(batch, stored))
        if stored is not None:
            stored.advance(batch)
        return result

    def close(self) -> None:
        """Let go of the weights."""
        self._weights = None


class NumpyBackend:
    """Weights of any kind, computed with in float32."""

    def load(
        self, config: Config, weights: Weights[Any], **options: Unpack[BackendOptions]
    ) -> NumpyModel:
        """Dequantise what is quantized; float32 arrays are used where they lie.

        There are no options: NumPy computes in float32, with the threads that its library takes.
        """
        given_options("numpy", options)
        return NumpyModel(config, weights.map(lambda _, weight: as_float32(weight)))


backend: Backend = NumpyBackend()
