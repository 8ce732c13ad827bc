"""Each rule of Config has a test that breaks it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from smollm2.config import Config
from smollm2.errors import ConfigError
from tests.test_config import REQUIRED, V4
from tests.tiny import tiny_config


@pytest.mark.parametrize("key", REQUIRED)
def test_required_keys(key: str) -> None:
    values = {name: value for name, value in V4.items() if name != key}
    with pytest.raises(ConfigError, match=f"^{key} missing"):
        Config.from_dict(values)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vocab_size", 0),
        ("vocab_size", 49152.0),
        ("vocab_size", "49152"),
        ("vocab_size", 2**24 + 1),
        ("hidden_size", True),
        ("hidden_size", None),
        ("hidden_size", [576]),
        ("intermediate_size", -1),
        ("num_hidden_layers", 1001),
        ("num_attention_heads", 0),
        ("num_attention_heads", 7),
        ("num_key_value_heads", 2),
        ("num_key_value_heads", "3"),
        ("head_dim", 63),
        ("head_dim", 64.0),
        ("max_position_embeddings", 10**30),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", -1e-5),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", "1e-5"),
        ("rms_norm_eps", None),
        ("rope_theta", float("inf")),
        ("rope_theta", 10**400),
        ("rope_theta", 1e-300),  # 0 in float32
        ("rms_norm_eps", 1e300),  # infinite in float32
        ("rope_theta", False),
        ("tie_word_embeddings", 1),
        ("tie_word_embeddings", None),
        ("bos_token_id", 49152),
        ("pad_token_id", -1),
        ("eos_token_id", [2, 49152]),
        ("eos_token_id", 2.0),
        ("eos_token_id", [[2]]),
        ("eos_token_id", {"id": 2}),
        ("torch_dtype", "int8"),
        ("torch_dtype", ["bfloat16"]),
    ],
)
def test_wrong_values_are_refused_by_name(key: str, value: Any) -> None:
    """Row 135."""
    name = "dtype" if key == "torch_dtype" else key
    with pytest.raises(ConfigError, match=name) as caught:
        Config.from_dict({**V4, key: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "mistral"),
        ("model_type", None),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("mlp_bias", None),
        ("attention_dropout", 0.1),
        ("rope_interleaved", True),
        ("pretraining_tp", 2),
        ("pretraining_tp", True),
        ("attention_bias", 0),
        ("attention_dropout", False),
        ("quantization_config", {"quant_method": "gptq"}),
        ("sliding_window", 4096),
        ("attention_multiplier", 0.015625),
        ("residual_multiplier", 0.22),
        ("embedding_multiplier", 12),
        ("logits_scaling", 8),
        ("final_logit_softcapping", 30.0),
        ("attn_logit_softcapping", 50.0),
        ("partial_rotary_factor", 0.5),
        ("no_rope_layers", [1, 1, 1, 0]),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("layer_types", 5),
        ("use_qk_norm", True),
        ("query_pre_attn_scalar", 256),
        ("num_experts", 8),
    ],
)
def test_what_changes_the_maths_is_refused(key: str, value: Any) -> None:
    """Cases: W4. Row 135."""
    with pytest.raises(ConfigError, match=rf"^{key}(\[\d\])? is .* it must be "):
        Config.from_dict({**V4, key: value})
    if key not in V4:
        with pytest.raises(ConfigError, match=key):
            tiny_config(extra={key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("residual_multiplier", 1),
        ("sliding_window", None),
        ("use_qk_norm", False),
        ("no_rope_layers", [1] * 30),
        ("layer_types", ["full_attention"] * 30),
        ("partial_rotary_factor", 1.0),
        ("num_experts", 0),
    ],
)
def test_neutral_values_are_kept(key: str, value: Any) -> None:
    assert Config.from_dict({**V4, key: value}).to_dict()[key] == value


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.type is 'linear'"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling.rope_type is 'llama3'"),
        ({"rope_scaling": {"rope_type": "default", "factor": 2.0}}, "rope_scaling.factor is 2.0"),
        ({"rope_scaling": 2.0}, "rope_scaling is 2.0"),
        ({"rope_parameters": {"rope_theta": 10000.0}}, "rope_theta is given as"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.rope_type is 'yarn'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "full_attention is"),
        ({"dtype": "float32"}, "dtype is 'float32' but torch_dtype is 'bfloat16'"),
    ],
)
def test_only_plain_rope_in_one_voice(rope: dict[str, Any], message: str) -> None:
    """Cases: W3, W4."""
    with pytest.raises(ConfigError, match=re.escape(message)):
        Config.from_dict({**V4, **rope})
    plain = {"rope_scaling": {"rope_type": "default"}, "dtype": "bfloat16"}
    assert Config.from_dict({**V4, **plain}) == Config.from_dict(V4)


def test_head_dim_frees_hidden_size_from_the_heads() -> None:
    with pytest.raises(ConfigError, match="hidden_size 577 is not a multiple"):
        Config.from_dict({**V4, "hidden_size": 577})
    assert Config.from_dict({**V4, "hidden_size": 577, "head_dim": 64}).head_dim == 64


def test_extra_cannot_hold_a_field() -> None:
    for key in ("rope_theta", "rope_scaling", "model_type"):
        with pytest.raises(ConfigError, match=f"{key} is a field"):
            tiny_config(extra={key: None} if key != "model_type" else {key: "llama"})
