"""GGUF metadata → Config."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from smollm2.config import Config
from smollm2.errors import ConfigError
from smollm2.formats.gguf import open_gguf
from tests.tiny import random_weights, tiny_config, write_gguf

TIED = ("token_embd.weight", "output_norm.weight")


def metadata_of(path: Path) -> dict[str, Any]:
    """Read by the gguf package: Python scalars and lists."""
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    config = tiny_config()
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return metadata_of(write_gguf(path, config, random_weights(config)))


def test_equals_the_config_that_was_written(metadata: dict[str, Any]) -> None:
    """Stored as float32, 1e-05 comes back as 9.999999747e-06. Cases: W3."""
    assert metadata["llama.attention.layer_norm_rms_epsilon"] != 1e-5
    assert Config.from_gguf(metadata, TIED) == tiny_config()


def test_real_file(real_gguf: Path) -> None:
    file = open_gguf(real_gguf)
    config = Config.from_gguf(file.metadata, file.entries)
    assert config.parameter_count == 134_515_008
    assert (config.rope_theta, config.rms_norm_eps, config.head_dim) == (100000.0, 1e-5, 64)
    assert (config.bos_token_id, config.eos_token_ids, config.pad_token_id) == (1, (2,), 2)
    assert config.tie_word_embeddings
    assert config.vocab_size == 49152


def test_tied_exactly_where_there_is_no_output(metadata: dict[str, Any]) -> None:
    """Cases: W5."""
    assert Config.from_gguf(metadata, TIED).tie_word_embeddings
    assert not Config.from_gguf(metadata, (*TIED, "output.weight")).tie_word_embeddings


def test_written_config_loads_in_transformers(metadata: dict[str, Any]) -> None:
    from transformers import LlamaConfig

    theirs = LlamaConfig.from_dict(Config.from_gguf(metadata, TIED).to_dict())
    assert theirs.rms_norm_eps == 1e-5
    assert theirs.rope_parameters["rope_theta"] == 100000.0
    assert theirs.num_key_value_heads == 2


def without(metadata: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in metadata.items() if key not in keys}


def test_optional_keys(metadata: dict[str, Any]) -> None:
    optional = ("llama.attention.head_count_kv", "llama.rope.freq_base")
    config = Config.from_gguf(without(metadata, *optional, "llama.rope.dimension_count"), TIED)
    assert config.num_key_value_heads == config.num_attention_heads
    assert config.rope_theta == 10000.0
    wide = {"llama.attention.key_length": 32, "llama.attention.value_length": 32}
    wide["llama.rope.dimension_count"] = 32
    assert Config.from_gguf({**metadata, **wide, "llama.embedding_length": 65}, TIED).head_dim == 32
    ends = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 2}
    assert Config.from_gguf({**metadata, **ends}, TIED).eos_token_ids == (2, 5)
    none = without(metadata, "tokenizer.ggml.eos_token_id", "tokenizer.ggml.bos_token_id")
    assert Config.from_gguf(none, TIED).eos_token_ids == ()
    assert Config.from_gguf(none, TIED).bos_token_id is None


def test_vocabulary_from_the_token_list(metadata: dict[str, Any]) -> None:
    tokens = {"tokenizer.ggml.tokens": [str(i) for i in range(96)]}
    listed = {**without(metadata, "llama.vocab_size"), **tokens}
    assert Config.from_gguf(listed, TIED).vocab_size == 96
    with pytest.raises(ConfigError, match=r"llama\.vocab_size is 97 but the file lists 96"):
        Config.from_gguf({**listed, "llama.vocab_size": 97}, TIED)


@pytest.mark.parametrize(
    "key",
    [
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.layer_norm_rms_epsilon",
        "vocab_size",
    ],
)
def test_missing_keys(metadata: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"llama.{key} is missing")):
        Config.from_gguf(without(metadata, f"llama.{key}"), TIED)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("general.architecture", "qwen2", "only 'llama'"),
        ("general.architecture", None, "only 'llama'"),
        ("general.architecture", np.array([1, 2]), "only 'llama'"),
        ("llama.rope.scaling.type", "yarn", "it must be 'none'"),
        ("llama.rope.scaling.factor", 2.0, "changes the maths"),
        ("llama.rope.scale_linear", 4.0, "changes the maths"),
        ("llama.rope.dimension_count", 8, "it must be 16"),
        ("llama.attention.value_length", 8, "it must be 16"),
        ("llama.attention.layer_norm_epsilon", 1e-5, "changes the maths"),
        ("llama.attention.clamp_kqv", 8.0, "changes the maths"),
        ("llama.attention.sliding_window", 4096, "changes the maths"),
        ("llama.attention.sliding_window", np.array([1, 2]), "changes the maths"),
        ("llama.attention.causal", False, "changes the maths"),
        ("llama.expert_count", 8, "changes the maths"),
        ("llama.logit_scale", 0.5, "changes the maths"),
        ("llama.attention.head_count", np.array([4, 2]), "one value a layer"),
        ("llama.attention.head_count_kv", np.array([2, 1]), "one value a layer"),
        ("llama.feed_forward_length", np.array([2, 1]), "one value a layer"),
        ("llama.block_count", 2**31, "num_hidden_layers is 2147483648"),
        ("llama.block_count", "2", "num_hidden_layers is '2'"),
        ("llama.embedding_length", True, "hidden_size is True"),
        ("llama.attention.head_count", 3, "not a multiple"),
        ("llama.rope.freq_base", float("nan"), "rope_theta is nan"),
        ("llama.rope.freq_base", float("inf"), "rope_theta is inf"),
        ("llama.attention.layer_norm_rms_epsilon", 0.0, "rms_norm_eps is 0.0"),
        ("tokenizer.ggml.eos_token_id", 96, "eos_token_id is 96"),
    ],
)
def test_refused(metadata: dict[str, Any], key: str, value: Any, message: str) -> None:
    """Cases: W4."""
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        Config.from_gguf({**metadata, key: value}, TIED)
    assert "\n" not in str(caught.value)


def test_neutral_values_are_read(metadata: dict[str, Any]) -> None:
    neutral = {
        "llama.rope.scaling.type": "none",
        "llama.expert_count": 0,
        "llama.attention.causal": True,
        "llama.attention.key_length": 16,
    }
    assert Config.from_gguf({**metadata, **neutral}, TIED) == tiny_config()


def test_double_precision_is_not_rounded(metadata: dict[str, Any]) -> None:
    exact = {"llama.rope.freq_base": 123456.789012345}
    assert Config.from_gguf({**metadata, **exact}, TIED).rope_theta == 123456.789012345
