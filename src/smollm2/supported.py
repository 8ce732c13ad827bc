"""Which keys change the maths of a Llama-type model, and their values that change nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from smollm2.errors import ConfigError

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "model_type": ("llama",),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0.0, None),
    "pretraining_tp": (1, None),
    "quantization_config": (None,),
    "compression_config": (None,),
    "pruned_heads": ({}, None),
    # rotary embedding
    "rope_interleaved": (False, None),
    "partial_rotary_factor": (1.0, None),
    "rotary_pct": (1.0, None),
    "rope_local_base_freq": (None,),
    "no_rope_layer_interval": (0, None),
    "alibi": (False, None),
    # attention
    "sliding_window": (None,),
    "use_sliding_window": (False, None),
    "attention_chunk_size": (None,),
    "attention_multiplier": (None,),
    "query_pre_attn_scalar": (None,),
    "attn_logit_softcapping": (None,),
    "attn_temperature_tuning": (False, None),
    "clip_qkv": (None,),
    "use_qk_norm": (False, None),
    "qk_norm": (False, None),
    "qk_layernorm": (False, None),
    "use_bidirectional_attention": (False, None),
    "num_kv_shared_layers": (0, None),
    "q_lora_rank": (None,),
    "kv_lora_rank": (None,),
    # residual stream and logits
    "embedding_multiplier": (1.0, None),
    "residual_multiplier": (1.0, None),
    "logits_scaling": (1.0, None),
    "logit_scale": (1.0, None),
    "final_logit_softcapping": (None,),
    "scale_emb": (1.0, None),
    "scale_depth": (None,),
    "dim_model_base": (None,),
    "parallel_attn": (False, None),
    "use_parallel_residual": (False, None),
    # experts
    "num_experts": (0, None),
    "num_local_experts": (0, None),
    "n_routed_experts": (0, None),
    "num_experts_per_tok": (0, None),
}
"""Keys that change the maths of a Llama-type model, with the values that do not."""

NEUTRAL_LAYERS: Mapping[str, Any] = {"layer_types": "full_attention", "no_rope_layers": 1}
"""Lists of one entry a layer, and the entry that changes nothing (1: RoPE is used)."""

GGUF_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention.layer_norm_epsilon": (None,),
    "attention.group_norm_epsilon": (None,),
    "attention.clamp_kqv": (0.0, None),
    "attention.max_alibi_bias": (0.0, None),
    "attention.sliding_window": (0, None),
    "attention.scale": (0.0, None),
    "attention.output_scale": (0.0, 1.0, None),
    "attention.temperature_length": (0, None),
    "attention.temperature_scale": (0.0, None),
    "attention.causal": (True, None),
    "attn_logit_softcapping": (0.0, None),
    "final_logit_softcapping": (0.0, None),
    "logit_scale": (0.0, 1.0, None),
    "embedding_scale": (0.0, 1.0, None),
    "residual_scale": (0.0, 1.0, None),
    "use_parallel_residual": (False, None),
    "expert_count": (0, None),
    "expert_used_count": (0, None),
    "rope.scaling.type": ("none", None),
    "rope.scaling.factor": (0.0, 1.0, None),
    "rope.scaling.attn_factor": (1.0, None),
    "rope.scale_linear": (0.0, 1.0, None),
}
"""The same for GGUF's ``llama.*`` keys (llama.cpp reads 0 as "off" for scales)."""


def check_value(key: str, value: Any, neutral: Collection[Any]) -> None:
    """Refuse a value that is none of the neutral ones; true is not 1, and false is not 0."""
    if not any(
        value == accepted and isinstance(value, bool) == isinstance(accepted, bool)
        for accepted in neutral
    ):
        raise ConfigError(
            f"{key} is {value!r:.80}, which is not supported since it changes the maths: "
            f"it must be {' or '.join(repr(accepted) for accepted in neutral)}"
        )


def check_supported(values: Mapping[str, Any]) -> None:
    """Refuse a config.json whose keys change the maths. Raises ``ConfigError``."""
    for key, neutral in NEUTRAL.items():
        if key in values:
            check_value(key, values[key], neutral)
    for key, entry in NEUTRAL_LAYERS.items():
        layers = values.get(key)
        if isinstance(layers, list):
            for i, layer in enumerate(layers):
                check_value(f"{key}[{i}]", layer, (entry,))
        else:
            check_value(key, layers, (None,))


def check_supported_gguf(metadata: Mapping[str, Any]) -> None:
    """Refuse GGUF metadata whose keys change the maths. Raises ``ConfigError``."""
    for key, neutral in GGUF_NEUTRAL.items():
        value = metadata.get(f"llama.{key}")
        check_value(
            f"llama.{key}", value.tolist() if isinstance(value, np.ndarray) else value, neutral
        )
