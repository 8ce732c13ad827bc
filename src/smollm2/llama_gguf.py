"""How GGUF files of the architecture ``llama`` name tensors and order the rows of Q and K."""

from __future__ import annotations

import numpy as np

from smollm2.config import Config
from smollm2.quantize import Quantized, Weight
from smollm2.state import NameMapping
from smollm2.weights import EMBEDDING, HEAD

ROPE_FACTORS = "rope_freqs.weight"
"""Factors of RoPE's frequencies; a model with others than 1 is not supported."""

_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

NAMES = NameMapping(
    rename={
        "token_embd.weight": EMBEDDING,
        "output_norm.weight": "model.norm.weight",
        "output.weight": HEAD,
    },
    rewrite={
        f"blk.{{layer}}.{theirs}.weight": f"model.layers.{{layer}}.{ours}.weight"
        for theirs, ours in _PARTS.items()
    },
    ignore_suffix=("attn_rot_embd.weight", ROPE_FACTORS),
)
"""GGUF's names → canonical names."""


def restore_rows(name: str, weight: Weight, config: Config) -> Weight:
    """Put the rows of Q and K back in the canonical order; other weights stay as they are.

    GGUF's RoPE turns neighbouring rows of a head, ours those that lie half a head apart, so
    llama.cpp's converter interleaves the halves of each head (``LlamaModel.permute`` in
    convert_hf_to_gguf.py). Quantized rows are moved as they are.
    """
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = heads.get(name.split(".")[-2])
    if count is None:
        return weight
    rows = np.arange(count * config.head_dim).reshape(count, config.head_dim // 2, 2)
    order = rows.swapaxes(1, 2).reshape(-1)
    if isinstance(weight, Quantized):
        return weight.take_rows(order)
    return weight[order] if isinstance(weight, np.ndarray) else weight
