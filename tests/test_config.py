"""config.json ⇄ Config: values as transformers reads and writes them."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from smollm2.config import Config
from smollm2.errors import ConfigError, FormatError
from tests.tiny import tiny_config

V4: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 49152,
}
"""SmolLM2-135M-Instruct's config.json, as transformers 4 wrote it."""

OLD_ONLY = ("rope_theta", "rope_scaling", "torch_dtype", "rope_interleaved")
V5: dict[str, Any] = {
    **{key: value for key, value in V4.items() if key not in OLD_ONLY},
    "dtype": "bfloat16",
    "head_dim": 64,
    "rope_parameters": {"rope_theta": 100000, "rope_type": "default"},
    "transformers_version": "5.0.0",
}
"""The same as transformers 5 writes it."""

REQUIRED = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)


@pytest.mark.parametrize("values", [V4, V5], ids=["transformers4", "transformers5"])
def test_reads_both_styles(values: dict[str, Any]) -> None:
    """Cases: W3, W4. Rows 134, 135."""
    config = Config.from_dict(values)
    assert config.num_hidden_layers == 30
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert (config.rope_theta, type(config.rope_theta)) == (100000.0, float)
    assert config.rms_norm_eps == 1e-5
    assert config.tie_word_embeddings
    assert (config.bos_token_id, config.eos_token_ids, config.pad_token_id) == (1, (2,), 2)
    assert config.dtype == "bfloat16"
    assert config.extra["initializer_range"] == V4["initializer_range"]


@pytest.mark.parametrize("values", [V4, V5], ids=["transformers4", "transformers5"])
def test_transformers_reads_what_to_dict_writes(values: dict[str, Any]) -> None:
    """Row 131."""
    from transformers import LlamaConfig

    theirs = LlamaConfig.from_dict(Config.from_dict(values).to_dict())
    expected = LlamaConfig.from_dict(values)
    ours = {**theirs.to_dict(), "transformers_version": None, "rope_interleaved": None}
    wanted = {**expected.to_dict(), "transformers_version": None, "rope_interleaved": None}
    assert {key: ours[key] for key in wanted} == wanted
    assert theirs.rope_parameters == {"rope_theta": 100000.0, "rope_type": "default"}


def test_defaults_are_those_of_transformers() -> None:
    from transformers import LlamaConfig

    values = {key: V4[key] for key in REQUIRED}
    config, theirs = Config.from_dict(values), LlamaConfig.from_dict(values)
    for name in (
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "tie_word_embeddings",
        "bos_token_id",
        "pad_token_id",
    ):
        assert getattr(config, name) == getattr(theirs, name), name
    assert config.eos_token_ids == (theirs.eos_token_id,)
    assert config.rope_theta == theirs.rope_parameters["rope_theta"]


def test_transformers_4_finds_the_base_where_it_looks() -> None:
    """Transformers 4 reads ``rope_theta`` and would take 10000 without it. Cases: W3."""
    written = tiny_config(rope_theta=130000.0).to_dict()
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 130000.0


def test_json_round_trip_is_identity() -> None:
    for values in (V4, V5):
        config = Config.from_dict(values)
        assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert Config.from_dict(V4).to_dict()["is_llama_config"] is True
    assert Config.from_dict({**V4, "architectures": ["MyLlama"]}).to_dict()["architectures"] == [
        "MyLlama"
    ]


ids = st.integers(0, 95)


@settings(deadline=None)
@given(
    kv_heads=st.sampled_from([1, 2, 4]),
    head_dim=st.sampled_from([2, 16, 64]),
    eps=st.floats(1e-12, 1.0),
    theta=st.floats(1.0, 1e9),
    bos=st.none() | ids,
    eos=st.lists(ids, max_size=3, unique=True),
    pad=st.none() | ids,
    tied=st.booleans(),
    dtype=st.sampled_from([None, "float32", "bfloat16", "float16"]),
    extra=st.dictionaries(st.sampled_from(["use_cache", "note"]), st.none() | st.text()),
)
def test_any_valid_config_round_trips(
    kv_heads: int, head_dim: int, eps: float, theta: float, eos: list[int], **rest: Any
) -> None:
    config = tiny_config(
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=eps,
        rope_theta=theta,
        bos_token_id=rest["bos"],
        eos_token_ids=tuple(eos),
        pad_token_id=rest["pad"],
        tie_word_embeddings=rest["tied"],
        dtype=rest["dtype"],
        extra=rest["extra"],
    )
    again = Config.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert hash(again) == hash(config)


@pytest.mark.parametrize(
    ("given_", "expected"), [(2, (2,)), ([2, 0], (2, 0)), ([2, 2], (2,)), (None, ()), ([], ())]
)
def test_eos_token_id_is_one_or_many_or_none(given_: Any, expected: tuple[int, ...]) -> None:
    assert Config.from_dict({**V4, "eos_token_id": given_}).eos_token_ids == expected


def test_shapes_and_parameter_count() -> None:
    """Row 113 for the sizes of SmolLM2, the tied tensor counted once."""
    small = Config.from_dict(V4)
    assert len(small.shapes) == 272
    assert small.parameter_count == 134_515_008
    big = dataclasses.replace(
        small,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=24,
        num_attention_heads=32,
        num_key_value_heads=32,
    )
    assert big.parameter_count == 1_711_376_384
    shapes = tiny_config(head_dim=32, tie_word_embeddings=False).shapes
    assert shapes["model.layers.1.self_attn.q_proj.weight"] == (128, 64)
    assert shapes["model.layers.1.self_attn.k_proj.weight"] == (64, 64)
    assert shapes["model.layers.1.self_attn.o_proj.weight"] == (64, 128)
    assert list(shapes)[-1] == "lm_head.weight"


def test_shapes_are_those_of_transformers() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    for tied in (True, False):
        config = tiny_config(tie_word_embeddings=tied, head_dim=8)
        model = LlamaForCausalLM(LlamaConfig.from_dict(config.to_dict()))
        expected = {name: tuple(value.shape) for name, value in model.named_parameters()}
        assert config.shapes == expected


def test_files_are_named_in_errors(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**V4, "hidden_act": "gelu"}), encoding="utf-8")
    with pytest.raises(ConfigError, match=re.escape(f"{path}: hidden_act")):
        Config.from_file(path)
    for text in ("[]", "{", '{"a": NaN}', '{"vocab_size": 1, "vocab_size": 2}', "[" * 100_000):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(FormatError, match=re.escape(str(path))):
            Config.from_file(path)


@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(sorted({*V4, *V5, "no_rope_layers", "layer_types"})),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner),
            max_leaves=5,
        ),
        max_size=3,
    )
)
def test_any_json_gives_a_config_or_a_config_error(changes: dict[str, Any]) -> None:
    try:
        config = Config.from_dict({**V4, **changes})
    except ConfigError:
        return
    assert len(config.shapes) == 2 + 9 * config.num_hidden_layers + (not config.tie_word_embeddings)
