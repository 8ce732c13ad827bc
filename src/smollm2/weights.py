"""Weights are records: which tensors a model has, under which names, in which order.

The records hold any kind of weight ``W``: NumPy arrays, quantized arrays, a framework's
tensors, or just names. Canonical state names are Hugging Face's; the order of the records'
fields is the order of the file. A tied head is not listed: its tensor is the token embedding.

Shapes: H query heads, K kv heads, D head size, C hidden, F mlp width, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

W = TypeVar("W")
V = TypeVar("V")

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Attention(Generic[W]):
    """Projections of one attention: query [H·D, C], key and value [K·D, C], output [C, H·D]."""

    query: W
    key: W
    value: W
    output: W


@dataclass(frozen=True, slots=True)
class Mlp(Generic[W]):
    """Projections of one gated MLP: gate and up [F, C], down [C, F]."""

    gate: W
    up: W
    down: W


@dataclass(frozen=True, slots=True)
class Block(Generic[W]):
    """One layer: input norm [C], attention, post-attention norm [C], MLP."""

    input_norm: W
    attention: Attention[W]
    post_attention_norm: W
    mlp: Mlp[W]


@dataclass(frozen=True, slots=True)
class Weights(Generic[W]):
    """All weights: token embedding [V, C], L blocks, final norm [C], head [V, C].

    ``head`` is None where it is tied to the token embedding.
    """

    token_embedding: W
    blocks: tuple[Block[W], ...]
    final_norm: W
    head: W | None = None

    @staticmethod
    def build(get: Callable[[str], V], *, num_layers: int, tied: bool) -> Weights[V]:
        """Fill the records by asking ``get`` for each canonical name, in file order."""

        def block(layer: int) -> Block[V]:
            def of(name: str) -> V:
                return get(f"model.layers.{layer}.{name}.weight")

            return Block(
                of("input_layernorm"),
                Attention(
                    of("self_attn.q_proj"),
                    of("self_attn.k_proj"),
                    of("self_attn.v_proj"),
                    of("self_attn.o_proj"),
                ),
                of("post_attention_layernorm"),
                Mlp(of("mlp.gate_proj"), of("mlp.up_proj"), of("mlp.down_proj")),
            )

        return Weights(
            token_embedding=get(EMBEDDING),
            blocks=tuple(block(layer) for layer in range(num_layers)),
            final_norm=get("model.norm.weight"),
            head=None if tied else get(HEAD),
        )

    def items(self) -> Iterator[tuple[str, W]]:
        """Canonical names and weights, in file order, the tied tensor once."""
        return zip(
            state_names(len(self.blocks), tied=self.head is None), _leaves(self), strict=True
        )

    def map(self, convert: Callable[[str, W], V]) -> Weights[V]:
        """The same records with ``convert(name, weight)`` in each place."""
        weights = dict(self.items())
        return Weights.build(
            lambda name: convert(name, weights[name]),
            num_layers=len(self.blocks),
            tied=self.head is None,
        )


def state_names(num_layers: int, *, tied: bool) -> tuple[str, ...]:
    """The canonical names of a model's tensors in file order: 2 + 9 a layer, one more untied."""
    names = Weights.build(lambda name: name, num_layers=num_layers, tied=tied)
    return tuple(_leaves(names))


def _leaves(record: Any) -> Iterator[Any]:
    if isinstance(record, Weights | Block | Attention | Mlp):
        for field in fields(record):
            yield from _leaves(getattr(record, field.name))
    elif isinstance(record, tuple):
        for part in record:
            yield from _leaves(part)
    elif record is not None:
        yield record
