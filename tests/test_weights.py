"""The records: names, order, map and build."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from smollm2.weights import EMBEDDING, HEAD, Attention, Block, Mlp, Weights, state_names

LAYER = [
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
]


def named(num_layers: int, *, tied: bool) -> Weights[str]:
    return Weights.build(lambda name: name, num_layers=num_layers, tied=tied)


def test_names_of_two_layers_in_file_order() -> None:
    """Row 143: 20 names for 2 layers, embedding first, final norm last."""
    expected = [
        "model.embed_tokens.weight",
        *(f"model.layers.0.{part}.weight" for part in LAYER),
        *(f"model.layers.1.{part}.weight" for part in LAYER),
        "model.norm.weight",
    ]
    assert list(state_names(2, tied=True)) == expected
    assert list(state_names(2, tied=False)) == [*expected, "lm_head.weight"]


def test_135m_has_272_names_each_once() -> None:
    """Rows 143, 144: the tied tensor is listed once."""
    names = state_names(30, tied=True)
    assert len(names) == len(set(names)) == 272
    assert HEAD not in names
    assert names[0] == EMBEDDING


def test_names_are_those_of_transformers() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    for tied in (True, False):
        config = LlamaConfig(
            vocab_size=8,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            tie_word_embeddings=tied,
        )
        parameters = LlamaForCausalLM(config).named_parameters()
        assert list(state_names(2, tied=tied)) == sorted(
            (name for name, _ in parameters), key=state_names(2, tied=tied).index
        )


def test_build_puts_each_name_in_its_place() -> None:
    """Row 147."""
    weights = named(2, tied=False)
    block = weights.blocks[1]
    assert block.attention == Attention(
        *(f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkvo")
    )
    assert block.mlp == Mlp(
        *(f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up", "down"))
    )
    assert block.input_norm == "model.layers.1.input_layernorm.weight"
    assert block.post_attention_norm == "model.layers.1.post_attention_layernorm.weight"
    assert weights.final_norm == "model.norm.weight"
    assert (weights.token_embedding, weights.head) == (EMBEDDING, HEAD)


@pytest.mark.parametrize("tied", [True, False])
def test_items_pair_each_name_with_its_weight(tied: bool) -> None:
    assert all(name == weight for name, weight in named(3, tied=tied).items())


@pytest.mark.parametrize("tied", [True, False])
def test_map_keeps_the_structure(tied: bool) -> None:
    weights = named(2, tied=tied)
    lengths = weights.map(lambda name, weight: len(name) + len(weight))
    assert isinstance(lengths.blocks[0], Block)
    assert (lengths.head is None) == tied
    assert all(weight == 2 * len(name) for name, weight in lengths.items())
    assert weights.map(lambda _, weight: weight) == weights


def test_build_asks_once_in_file_order() -> None:
    asked: list[str] = []
    Weights.build(asked.append, num_layers=2, tied=False)
    assert asked == list(state_names(2, tied=False))


def test_records_are_frozen() -> None:
    weights: Any = named(1, tied=True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        weights.head = "other"
