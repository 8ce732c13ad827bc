"""How GGUF files of the architecture ``llama`` name tensors, order the rows of Q and K, say sizes.

Both ways: to read such a file, and to write one as llama.cpp's converter does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

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


WRITTEN_NAMES = NameMapping(
    rename={ours: theirs for theirs, ours in NAMES.rename.items()},
    rewrite={ours: theirs for theirs, ours in NAMES.rewrite.items()},
)
"""Canonical names → GGUF's names."""


def restore_rows(name: str, weight: Weight, config: Config) -> Weight:
    """Put the rows of Q and K back in the canonical order; other weights stay as they are.

    GGUF's RoPE turns neighbouring rows of a head, ours those that lie half a head apart, so
    llama.cpp's converter interleaves the halves of each head (``LlamaModel.permute`` in
    convert_hf_to_gguf.py). Quantized rows are moved as they are.
    """
    interleaved = interleaved_rows(name, config)
    if interleaved is None:
        return weight
    order = np.argsort(interleaved)
    if isinstance(weight, Quantized):
        return weight.take_rows(order)
    return weight[order] if isinstance(weight, np.ndarray) else weight


def interleaved_rows(name: str, config: Config) -> NDArray[np.int64] | None:
    """Which row of Q or K each row in a file is; None for weights whose rows stay in place."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = heads.get(name.split(".")[-2])
    if count is None:
        return None
    rows = np.arange(count * config.head_dim).reshape(count, 2, config.head_dim // 2)
    return rows.swapaxes(1, 2).reshape(-1)


def metadata_of(config: Config, end_ids: Sequence[int]) -> dict[str, Any]:
    """The keys that say a config, which ``Config.from_gguf`` reads.

    ``end_ids`` are the tokens that end an answer, most common first; the format has room for
    three of them.
    """
    heads, head_dim = config.num_attention_heads, config.head_dim
    sizes = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_theta,
        "rope.dimension_count": head_dim,
        "vocab_size": config.vocab_size,
    }
    if heads * head_dim != config.hidden_size:
        sizes |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    ids = {
        "bos": config.bos_token_id,
        **dict(zip(("eos", "eot", "eom"), end_ids, strict=False)),
        "padding": config.pad_token_id,
    }
    return {
        **{f"llama.{key}": value for key, value in sizes.items()},
        **{f"tokenizer.ggml.{key}_token_id": i for key, i in ids.items() if i is not None},
    }
