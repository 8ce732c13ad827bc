"""The table of operations, filled with jax.numpy and traced once a form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from smollm2.backends.jax.attention import row_attention, segment_attention
from smollm2.backends.jax.inputs import Inputs, Rows
from smollm2.backends.jax.layers import is_stacked
from smollm2.backends.jax.storage import Stored, read, write
from smollm2.backends.rotary import frequencies
from smollm2.config import Config
from smollm2.weights import Attention, Block, Mlp

Numerics = Literal["exact", "fast"]
Storage: TypeAlias = list[Stored]
"""What is stored of each layer, or of all layers in one."""


Carry: TypeAlias = tuple[jax.Array, Storage | None]


@dataclass(slots=True)
class Plan:
    """What one batch needs in every layer, while it is traced.

    ``cos``, ``sin`` [T, 1, D/2] float32; ``storage`` is replaced as it is written.
    """

    inputs: Inputs
    cos: jax.Array
    sin: jax.Array
    storage: Storage | None


@dataclass(frozen=True, slots=True)
class JaxOps:
    """The operations for a config. Equal ones share what is compiled.

    ``numerics``: "exact" multiplies matrices in full precision; "fast" as the device likes best,
    which on a GPU may be TF32 and on a TPU bfloat16.
    """

    config: Config
    numerics: Numerics = "exact"

    @property
    def precision(self) -> lax.Precision:
        """What products are made with."""
        return lax.Precision.HIGHEST if self.numerics == "exact" else lax.Precision.DEFAULT

    def plan(self, inputs: Inputs, storage: Storage | None = None) -> Plan:
        """Rotary tables of a batch; angles in float32 as ``rotary_tables`` has them."""
        positions = jnp.asarray(inputs.positions).astype(jnp.float32)
        angles = positions[:, None, None] * frequencies(self.config)
        return Plan(inputs, jnp.cos(angles), jnp.sin(angles), storage)

    def embed(self, table: jax.Array, plan: Plan) -> jax.Array:
        """Rows of the embedding, [T, C]."""
        return jnp.take(table, plan.inputs.ids, axis=0, mode="clip")

    def rms_norm(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """Root-mean-square norm over the last axis, in float32 and rounded once."""
        wide = x.astype(jnp.float32)
        mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        normal = wide * lax.rsqrt(mean + self.config.rms_norm_eps)
        return (normal * weight.astype(jnp.float32)).astype(x.dtype)

    def linear(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """Matrix product with a weight [out, in], summed in float32."""
        return self._product(x, weight).astype(x.dtype)

    def qkv(
        self, x: jax.Array, attention: Attention[jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Three products, split into heads."""
        shape = (len(x), -1, self.config.head_dim)
        return (
            self.linear(x, attention.query).reshape(shape),
            self.linear(x, attention.key).reshape(shape),
            self.linear(x, attention.value).reshape(shape),
        )

    def rope(self, x: jax.Array, plan: Plan) -> jax.Array:
        """Rotary embedding in the half-split form, in float32 and rounded once."""
        a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        turned = jnp.concatenate(
            [a * plan.cos - b * plan.sin, b * plan.cos + a * plan.sin], axis=-1
        )
        return turned.astype(x.dtype)

    def attend(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        layer: Any,
        plan: Plan,
    ) -> jax.Array:
        """Causal attention of each row over what is stored of it, or within segments."""
        inputs = plan.inputs
        if plan.storage is None:
            out = segment_attention(
                query,
                key,
                value,
                inputs.positions,
                inputs.segments,
                inputs.reach,
                self.precision,
            )
            return out.reshape(len(query), -1)
        part, layer = (layer, 0) if len(plan.storage) > 1 else (0, layer)
        stored = plan.storage[part] = write(plan.storage[part], layer, key, value, inputs)
        parts = [self._rows(query, stored, layer, rows) for rows in inputs.rows]
        out = jnp.concatenate([part.reshape(-1, *query.shape[1:]) for part in parts])
        if inputs.places is not None:
            out = out[inputs.places]
        return out.reshape(len(query), -1)

    def swiglu(self, x: jax.Array, mlp: Mlp[jax.Array]) -> jax.Array:
        """Gated MLP."""
        gate = jax.nn.silu(self._product(x, mlp.gate))
        return self.linear((gate * self._product(x, mlp.up)).astype(x.dtype), mlp.down)

    def blocks(
        self,
        x: jax.Array,
        blocks: Sequence[Block[jax.Array]],
        plan: Plan,
        block: Callable[[jax.Array, Block[jax.Array], int, Plan], jax.Array],
    ) -> jax.Array:
        """One layer after the other: those that are stacked in a loop.

        With a cache the loop takes each layer out of the stack where it is used, which XLA does
        without a copy; without one it goes over the stack, which has a cheap derivative.
        """
        if not is_stacked(blocks):
            for layer, weights in enumerate(blocks):
                x = block(x, weights, layer, plan)
            return x
        (stack,) = blocks

        def step(carry: Carry, each: tuple[Any, Block[jax.Array] | None]) -> tuple[Carry, None]:
            x, storage = carry
            layer, weights = each
            if weights is None:
                weights = jax.tree.map(
                    lambda leaf: lax.dynamic_index_in_dim(leaf, layer, keepdims=False), stack
                )
            inner = replace(plan, storage=None if storage is None else list(storage))
            return (block(x, weights, layer, inner), inner.storage), None

        layers = jnp.arange(self.config.num_hidden_layers)
        over = layers, (stack if plan.storage is None else None)
        (x, plan.storage), _ = lax.scan(step, (x, plan.storage), over)
        return x

    def wanted(self, x: jax.Array, plan: Plan) -> jax.Array:
        """Rows whose logits are wanted."""
        return x if plan.inputs.wanted is None else x[plan.inputs.wanted]

    def head(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """Logits, [W, V] float32."""
        return self._product(x, weight)

    def _product(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """``x · weightᵀ`` in float32."""
        return lax.dot_general(
            x,
            weight,
            (((1,), (1,)), ((), ())),
            precision=self.precision,
            preferred_element_type=jnp.float32,
        )

    def _rows(self, query: jax.Array, stored: Stored, layer: Any, rows: Rows) -> jax.Array:
        """Attention of the rows' queries, [N, Q, H, D]."""
        shape = (*rows.positions.shape, *query.shape[1:])
        chosen = query.reshape(shape) if rows.queries is None else query[rows.queries]
        keys, values = read(stored, layer, rows)
        return row_attention(chosen, keys, values, rows.positions, self.precision)
