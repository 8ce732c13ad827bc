"""Traced: an entry as a function of JAX arrays whose shapes are static, to be written elsewhere.

The model's text over JAX's operations, with the rectangles of the entry in place of a batch, and
a cache that comes in and goes out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from smollm2.backends.jax.attention import attention
from smollm2.backends.jax.inputs import Inputs
from smollm2.backends.jax.losses import log_probs
from smollm2.backends.jax.ops import JaxOps, Plan
from smollm2.backends.jax.sampling import Settings, mix, pick
from smollm2.causal_lm import NO_TARGET
from smollm2.entries import builders
from smollm2.entries.builders import Tokens
from smollm2.entries.rectangles import Rectangle
from smollm2.export.binding import Bound
from smollm2.model import forward, head_of, hidden
from smollm2.sampling.draw import UNLIKELY
from smollm2.weights import Weights

_FLOAT32 = np.finfo(np.float32)
_shaped: Callable[..., jax.ShapeDtypeStruct] = jax.ShapeDtypeStruct  # which has no types of its own

Cache = list[tuple[jax.Array, jax.Array]]
"""Keys (after RoPE) and values of each layer, [slots, K, D]; empty where there is no cache."""


@dataclass(slots=True)
class _Pass(Plan):
    """One pass: its tokens, and the cache of each layer, which the layer replaces by its own."""

    tokens: Tokens
    places: jax.Array
    rectangles: tuple[Rectangle, ...]
    cache: Cache


@dataclass(frozen=True, slots=True)
class _TracedOps(JaxOps):
    """JAX's operations, over rectangles and a cache that is passed on."""

    def attend(
        self, query: jax.Array, key: jax.Array, value: jax.Array, layer: Any, plan: Any
    ) -> jax.Array:
        """Attention of each rectangle over tokens of the pass, or over what is stored."""
        stored = key, value
        if plan.cache:
            keys, values = plan.cache[layer]
            stored = keys.at[plan.places].set(key), values.at[plan.places].set(value)
            plan.cache[layer] = stored
        results = []
        for part in plan.rectangles:
            rows, count, length = part.visible.shape
            keys, values = (
                array[part.keys].reshape(rows, length, *array.shape[1:]).swapaxes(1, 2)
                for array in (stored if part.stored else (key, value))
            )
            shown = query[part.queries].reshape(rows, count, *query.shape[1:])
            result = attention(shown, keys.swapaxes(2, 3), values, part.visible, self.precision)
            results.append(result.reshape(rows * count, -1))
        return jnp.concatenate(results)


@dataclass(frozen=True, slots=True)
class Program:
    """An entry with these sizes: a function of its inputs, its cache and the weights.

    Called with the inputs by name, the cache, and weights; returns what the entry gives (of
    ``generate_until`` the counts too) and the cache. Rows without a token are zeros.
    """

    bound: Bound

    def __call__(
        self, inputs: Mapping[str, jax.Array], cache: Cache, weights: Weights[jax.Array]
    ) -> tuple[list[jax.Array], Cache]:
        """One call of the entry."""
        if self.bound.entry.output == "ids":
            return self._steps(inputs, cache, weights)
        of_builder = list(inputs.values())[: len(inputs) - self.bound.entry.extra]
        plan = self._plan(self.bound.tokens(jnp, of_builder), list(cache))
        return [self._result(plan, inputs, weights)], plan.cache

    @property
    def _ops(self) -> _TracedOps:
        return _TracedOps(self.bound.config)

    def _plan(self, tokens: Tokens, cache: Cache) -> _Pass:
        inputs = Inputs(tokens.ids, tokens.positions, jnp.maximum(tokens.wanted, 0))
        plan = self._ops.plan(inputs)
        scratch = self.bound.slots - 1  # of a fixed cache, the only one that has slot -1
        return _Pass(
            inputs,
            plan.cos,
            plan.sin,
            storage=None,
            tokens=tokens,
            places=jnp.where(tokens.slots < 0, scratch, tokens.slots),
            rectangles=self.bound.rectangles(jnp, tokens),
            cache=cache,
        )

    def _result(
        self, plan: _Pass, inputs: Mapping[str, jax.Array], weights: Weights[jax.Array]
    ) -> jax.Array:
        """What the entry gives of one pass."""
        output = self.bound.entry.output
        if output == "logits":
            return self._logits(plan, weights).reshape(self.bound.result)
        states = _kept(plan, hidden(weights, self._ops, plan))
        if output == "hidden":
            return states.astype(jnp.float32)
        learned = (plan.tokens.wanted >= 0) & (inputs["targets"] != NO_TARGET)
        if output == "loss":
            learned &= inputs["weights"] != 0
        targets = jnp.where(learned, inputs["targets"], NO_TARGET)
        found = log_probs(states, head_of(weights), targets, self._ops.precision)
        return found if output == "log_probs" else -jnp.sum(inputs["weights"] * found)

    def _logits(self, plan: _Pass, weights: Weights[jax.Array]) -> jax.Array:
        return _kept(plan, forward(weights, self._ops, plan))

    def _steps(
        self, inputs: Mapping[str, jax.Array], cache: Cache, weights: Weights[jax.Array]
    ) -> tuple[list[jax.Array], Cache]:
        """Steps of decode in a loop: ids [Batch, Steps], and the cache."""
        ids = inputs["token"]
        rows = len(ids)
        starts = jnp.broadcast_to(inputs["pos"], rows)

        def step(carry: Any, number: jax.Array) -> Any:
            ids, going, counts, cache = carry
            places = jnp.where(going, starts + number, -1)
            tokens = builders.decode_rows(jnp, self.bound.page_size, ids, places)
            plan = self._plan(tokens, list(cache))
            chosen = _chosen(self._logits(plan, weights), places + 1, inputs)
            column, counts = jnp.where(going, chosen, 0), counts + going
            if "eos" in inputs:
                going &= chosen != inputs["eos"]
            return (chosen[:, None], going, counts, plan.cache), column

        nothing = jnp.zeros(rows, jnp.int32)
        begin = ids, jnp.ones(rows, bool), nothing, cache
        (_, _, counts, cache), columns = lax.scan(step, begin, jnp.arange(self.bound.steps))
        return [columns.T, *([counts] if "eos" in inputs else [])], cache


def _kept(plan: _Pass, rows: jax.Array) -> jax.Array:
    """Rows [W, n], zeros in place of those that nobody wants."""
    return jnp.where(plan.tokens.wanted[:, None] >= 0, rows, 0)


def _chosen(logits: jax.Array, positions: jax.Array, inputs: Mapping[str, jax.Array]) -> jax.Array:
    """Ids [Batch] by logits: the likeliest, or drawn with ``key`` + row and ``temperature``.

    See ``smollm2.sampling.draw``: a key has 31 bits, so that a row's seed has 32.
    """
    settings = None
    if "key" in inputs:
        rows = jnp.arange(len(logits), dtype=jnp.uint32)
        temperature = inputs["temperature"]
        divisor = jnp.clip(temperature, _FLOAT32.tiny, _FLOAT32.max)
        settings = Settings(
            temperatures=jnp.broadcast_to(jnp.where(temperature > 0, divisor, 0), len(rows)),
            top_k=None,
            top_p=None,
            floors=jnp.full(len(rows), UNLIKELY, jnp.float32),
            counters=mix(
                mix(inputs["key"].astype(jnp.uint32) + rows) ^ positions.astype(jnp.uint32)
            ),
        )
    ids: jax.Array = pick(logits, settings, filtered=False)[0]
    return ids


def flat(bound: Bound) -> Callable[..., tuple[jax.Array, ...]]:
    """The program over arrays one after the other, see ``arguments``; results likewise."""

    def main(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        named = dict(zip(arguments(bound), arrays, strict=True))
        stored = [named[name] for name in bound.cache_names]
        weights = Weights.build(
            named.__getitem__,
            num_layers=bound.config.num_hidden_layers,
            tied=bound.config.tie_word_embeddings,
        )
        results, cache = Program(bound)(
            {name: named[name] for name in bound.inputs},
            list(zip(stored[::2], stored[1::2], strict=True)),
            weights,
        )
        return (*results, *(array for layer in cache for array in layer))

    return main


def arguments(bound: Bound, dtype: str = "float32") -> dict[str, jax.ShapeDtypeStruct]:
    """What ``flat`` takes: the inputs, the cache, and the weights in file order."""
    return {
        **{item.name: _shaped(bound.inputs[item.name], item.dtype) for item in bound.entry.inputs},
        **{name: _shaped(bound.cache_shape, dtype) for name in bound.cache_names},
        **{name: _shaped(shape, dtype) for name, shape in bound.config.shapes.items()},
    }
