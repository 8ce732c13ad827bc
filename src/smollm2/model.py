"""The model, once: the forward pass of SmolLM2 over a table of coarse operations.

T tokens, H query heads, K kv heads, D head size, C hidden, V vocabulary, W logits wanted.
Source: Touvron et al. 2023 (LLaMA) and the transformers implementation `LlamaForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from smollm2.weights import Attention, Block, Mlp, Weights

A = TypeVar("A")
P = TypeVar("P")


class Ops(Protocol[A, P]):
    """What a backend provides. ``A`` is its array, ``P`` its plan of one batch.

    The plan holds all that is made once per batch: ids, rotary tables, masks, the cache.
    """

    def embed(self, table: Any, plan: P) -> A:
        """Rows of the embedding for the batch's ids, [T, C]."""

    def rms_norm(self, x: A, weight: Any) -> A:
        """``x / sqrt(mean(x²) + eps) · weight``, the mean in float32."""

    def qkv(self, x: A, attention: Attention[Any]) -> tuple[A, A, A]:
        """Query [T, H, D], key and value [T, K, D]."""

    def rope(self, x: A, plan: P) -> A:
        """Rotate the two halves of each head by the angles of the tokens' positions."""

    def attend(self, query: A, key: A, value: A, layer: int, plan: P) -> A:
        """Store key and value where there is a cache; causal attention, [T, H·D]."""

    def linear(self, x: A, weight: Any) -> A:
        """``x · weightᵀ``, whatever kind of weight it is."""

    def swiglu(self, x: A, mlp: Mlp[Any]) -> A:
        """``down(silu(gate(x)) · up(x))``, [T, C]."""

    def blocks(
        self,
        x: A,
        blocks: Sequence[Block[Any]],
        plan: P,
        block: Callable[[A, Block[Any], int, P], A],
    ) -> A:
        """``x`` through ``block(x, weights, layer, plan)`` for each layer in turn."""

    def wanted(self, x: A, plan: P) -> A:
        """The rows of ``x`` whose logits are wanted, [W, C]."""

    def head(self, x: A, weight: Any) -> A:
        """``x · weightᵀ`` over the whole vocabulary, [W, V]."""


def hidden(weights: Weights[Any], ops: Ops[A, P], plan: P) -> A:
    """Hidden states of the wanted tokens after the final norm, [W, C]."""

    def block(x: Any, weights: Block[Any], layer: int, plan: P) -> Any:
        h = ops.rms_norm(x, weights.input_norm)
        query, key, value = ops.qkv(h, weights.attention)
        h = ops.attend(ops.rope(query, plan), ops.rope(key, plan), value, layer, plan)
        x = x + ops.linear(h, weights.attention.output)
        return x + ops.swiglu(ops.rms_norm(x, weights.post_attention_norm), weights.mlp)

    x = ops.blocks(ops.embed(weights.token_embedding, plan), weights.blocks, plan, block)
    return ops.rms_norm(ops.wanted(x, plan), weights.final_norm)


def head_of(weights: Weights[Any]) -> Any:
    """The weight of the head, [V, C]; a tied head is the token embedding."""
    return weights.token_embedding if weights.head is None else weights.head


def forward(weights: Weights[Any], ops: Ops[A, P], plan: P) -> A:
    """Logits of the wanted tokens, [W, V]."""
    return ops.head(hidden(weights, ops, plan), head_of(weights))
