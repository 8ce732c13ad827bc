"""Tiny models for tests, written by libraries that are not ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray
from safetensors.numpy import save_file

from smollm2.config import Config
from smollm2.weights import Weights

Arrays = Weights[NDArray[Any]]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tiny_config(**changes: Any) -> Config:
    """2 layers, 64 wide, 4 query and 2 kv heads of 16, vocabulary of 96, tied, context 256."""
    values: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_ids": (2,),
        "pad_token_id": 2,
    }
    return Config(**{**values, **changes})


def random_weights(config: Config, seed: int = 0, dtype: DTypeLike = np.float32) -> Arrays:
    """Weights that let every tensor matter: norms near 1, matrices that keep the scale."""
    rng = np.random.default_rng(seed)
    shapes = config.shapes

    def make(name: str) -> NDArray[Any]:
        shape = shapes[name]
        values: NDArray[Any] = rng.standard_normal(shape, dtype=np.float32)
        values = 1 + values / 10 if len(shape) == 1 else values / np.sqrt(np.float32(shape[1]))
        return values.astype(dtype)

    return Weights.build(make, num_layers=config.num_hidden_layers, tied=config.tie_word_embeddings)


def write_hf(
    folder: Path,
    config: Config,
    weights: Arrays,
    *,
    extra: dict[str, NDArray[Any]] | None = None,
    omit: tuple[str, ...] = (),
) -> Path:
    """A Hugging Face folder of config.json and model.safetensors; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_dict()), encoding="utf-8")
    tensors = {name: array for name, array in weights.items() if name not in omit}
    save_file({**tensors, **(extra or {})}, folder / "model.safetensors", {"format": "pt"})
    return folder


def write_gguf(
    path: Path,
    config: Config,
    weights: Arrays,
    kind: str = "F32",
    *,
    tokenizer: Path | None = None,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, NDArray[Any]] | None = None,
) -> Path:
    """A GGUF file as llama.cpp's converter writes it; ``kind`` is that of the matrices.

    ``tokenizer`` is a tokenizer.json; ``metadata`` adds or replaces (or, with None, leaves out)
    keys; ``extra`` adds tensors under GGUF names. Returns the path.
    """
    writer = gguf.GGUFWriter(path, "llama")
    keys = {**_gguf_metadata(config), **(metadata or {})}
    if tokenizer is not None:
        _add_vocabulary(writer, tokenizer)
    for key, value in keys.items():
        _add_key(writer, key, value)
    for name, array in weights.items():
        matrix = _permuted(name, array, config) if array.ndim == 2 else array
        _add_tensor(writer, gguf_name(name), matrix, kind if array.ndim == 2 else "F32")
    for name, array in (extra or {}).items():
        _add_tensor(writer, name, array, "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    """The name that llama.cpp's converter gives to a Hugging Face tensor."""
    top = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in top:
        return top[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[rest.removesuffix('.weight')]}.weight"


def _permuted(name: str, array: NDArray[Any], config: Config) -> NDArray[Any]:
    heads = {
        "q_proj": config.num_attention_heads,
        "k_proj": config.num_key_value_heads,
    }.get(name.split(".")[-2])
    if heads is None:
        return array
    rows, width = array.shape
    return array.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


def _add_tensor(writer: gguf.GGUFWriter, name: str, array: NDArray[Any], kind: str) -> None:
    values = np.ascontiguousarray(array, dtype=np.float32)
    if kind in ("F32", "F16"):
        writer.add_tensor(name, values.astype({"F32": np.float32, "F16": np.float16}[kind]))
    else:
        quant = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quants.quantize(values, quant), raw_dtype=quant)


def _gguf_metadata(config: Config) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.rope.freq_base": config.rope_theta,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.vocab_size": config.vocab_size,
        "llama.rope.dimension_count": config.head_dim,
        "tokenizer.ggml.bos_token_id": config.bos_token_id,
        "tokenizer.ggml.eos_token_id": next(iter(config.eos_token_ids), None),
        "tokenizer.ggml.padding_token_id": config.pad_token_id,
    }
    if config.head_dim * config.num_attention_heads != config.hidden_size:
        keys["llama.attention.key_length"] = config.head_dim
        keys["llama.attention.value_length"] = config.head_dim
    return keys


def _add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if key == "general.architecture" or value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _add_vocabulary(writer: gguf.GGUFWriter, tokenizer: Path) -> None:
    source = json.loads(tokenizer.read_text(encoding="utf-8"))
    special = {token["id"] for token in source["added_tokens"]}
    vocabulary = {**source["model"]["vocab"]}
    vocabulary.update({token["content"]: token["id"] for token in source["added_tokens"]})
    tokens = sorted(vocabulary, key=lambda token: int(vocabulary[token]))
    merges = [m if isinstance(m, str) else " ".join(m) for m in source["model"]["merges"]]
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([control if i in special else normal for i in range(len(tokens))])
    writer.add_token_merges(merges)
