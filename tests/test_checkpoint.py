"""Checkpoints written by transformers and by the gguf package load with equal tensors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from smollm2.checkpoint import load_checkpoint, state_of
from smollm2.config import Config
from smollm2.quantize import Quantized, as_float32, kind_of
from smollm2.state import NameMapping
from smollm2.tokenizer import Tokenizer
from tests.fakes import write_byte_tokenizer
from tests.tiny import (
    BFLOAT16,
    Arrays,
    random_weights,
    tiny_config,
    write_gguf,
    write_hf,
)

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def write_transformers(folder: Path, config: Config, kind: str, shard: str = "1GB") -> Any:
    """A checkpoint that transformers saves; returns its model."""
    torch.manual_seed(0)
    theirs = LlamaConfig.from_dict(config.to_dict())
    model = LlamaForCausalLM(theirs).to(DTYPES[kind])
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def as_version_4(folder: Path) -> None:
    """Rewrite config.json as transformers 4 wrote it."""
    path = folder / "config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    values["rope_theta"] = values.pop("rope_parameters")["rope_theta"]
    values["rope_scaling"] = None
    values["torch_dtype"] = values.pop("dtype")
    path.write_text(json.dumps(values), encoding="utf-8")


def assert_equal_to_model(weights: Any, model: Any) -> None:
    theirs = dict(model.named_parameters())
    assert {name for name, _ in weights.items()} == theirs.keys()
    for name, weight in weights.items():
        tensor = theirs[name].detach()
        assert weight.shape == tuple(tensor.shape)
        assert DTYPES[kind_of(weight)] == tensor.dtype
        assert np.array_equal(as_float32(weight), tensor.float().numpy()), name


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("shard", ["1GB", "60KB"], ids=["single", "sharded"])
@pytest.mark.parametrize("version", [4, 5])
def test_what_transformers_writes(
    tmp_path: Path, kind: str, tied: bool, shard: str, version: int
) -> None:
    """Rows 102, 136. Cases: W3."""
    config = tiny_config(tie_word_embeddings=tied)
    model = write_transformers(tmp_path, config, kind, shard)
    assert (tmp_path / "model.safetensors").exists() == (shard == "1GB")
    if version == 4:
        as_version_4(tmp_path)
    checkpoint = load_checkpoint(tmp_path)
    assert_equal_to_model(checkpoint.weights, model)
    assert checkpoint.report.loaded == tuple(config.shapes)
    assert checkpoint.report.summary() == ""
    assert checkpoint.config.rope_theta == config.rope_theta
    assert checkpoint.config.dtype == str(DTYPES[kind]).removeprefix("torch.")
    assert (checkpoint.tokenizer, checkpoint.template) == (None, None)
    assert checkpoint.generation_config["eos_token_id"] == 2
    assert checkpoint.path == tmp_path


def test_weights_are_views_in_file_order(tmp_path: Path) -> None:
    """Row 143."""
    config = tiny_config(head_dim=8)
    write_hf(tmp_path, config, random_weights(config, dtype=BFLOAT16))
    state = state_of(load_checkpoint(tmp_path).weights)
    assert list(state) == list(config.shapes)
    assert all(not weight.flags.owndata for weight in state.values())


KINDS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_what_gguf_writes(tmp_path: Path, kind: str, tied: bool) -> None:
    """Q and K come back in Hugging Face's order, also quantized. Cases: W1, W2, W5. Row 130."""
    config = tiny_config(tie_word_embeddings=tied, num_key_value_heads=1)
    weights = random_weights(config)
    path = write_gguf(tmp_path / "tiny.gguf", config, weights, kind)
    checkpoint = load_checkpoint(path)
    assert checkpoint.config == config
    assert checkpoint.report.loaded == tuple(config.shapes)
    loaded = dict(checkpoint.weights.items())
    for name, weight in weights.items():
        matrix = weight.ndim == 2
        assert kind_of(loaded[name]) == (kind if matrix else "F32")
        expected = through_kind(weight, kind) if matrix else weight
        assert np.array_equal(as_float32(loaded[name]), expected), name
    assert checkpoint.generation_config == {}


def through_kind(values: np.ndarray, kind: str) -> np.ndarray:
    """Values as they are after the gguf package has stored them."""
    quant = gguf.GGMLQuantizationType[kind]
    return gguf.quants.dequantize(gguf.quants.quantize(values, quant), quant)


def test_gguf_kinds_may_be_mixed_and_wide_heads_keep_their_order(tmp_path: Path) -> None:
    config = tiny_config(head_dim=32, num_attention_heads=3, num_key_value_heads=3)
    weights = random_weights(config)
    checkpoint = load_checkpoint(write_gguf(tmp_path / "a.gguf", config, weights, "F16"))
    assert checkpoint.config == config
    query = checkpoint.weights.blocks[1].attention.query
    assert np.array_equal(query, weights.blocks[1].attention.query.astype(np.float16))


def test_a_folder_with_one_gguf_file(tmp_path: Path) -> None:
    config = tiny_config()
    path = write_gguf(tmp_path / "a.gguf", config, random_weights(config))
    assert load_checkpoint(tmp_path).path == path
    assert load_checkpoint(str(tmp_path)).config == config


@pytest.mark.weights
def test_real_file(real_gguf: Path) -> None:
    """Rows 113, 143. Q rows compared with the gguf package's own reading. Cases: W1."""
    checkpoint = load_checkpoint(real_gguf)
    weights = checkpoint.weights
    assert len(list(weights.items())) == 272
    assert checkpoint.config.parameter_count == 134_515_008
    assert sum(int(np.prod(weight.shape)) for _, weight in weights.items()) == 134_515_008
    assert kind_of(weights.token_embedding) == "Q8_0"
    assert checkpoint.tokenizer is not None
    assert checkpoint.tokenizer.vocab_size == 49152
    assert checkpoint.template is not None
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(real_gguf).tensors}
    for part, heads in (("q", 9), ("k", 3)):
        tensor = theirs[f"blk.7.attn_{part}.weight"]
        rows = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        expected = rows.reshape(heads, 32, 2, 576).swapaxes(1, 2).reshape(-1, 576)
        ours = checkpoint.weights.blocks[7].attention
        ours = as_float32(ours.query if part == "q" else ours.key)
        assert np.array_equal(ours, expected)


def test_tokenizer_and_template_of_a_folder(tmp_path: Path) -> None:
    """tokenizer.json is enough. Cases: W15."""
    config = tiny_config(vocab_size=300)
    write_hf(tmp_path, config, random_weights(config))
    write_byte_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    checkpoint = load_checkpoint(tmp_path)
    assert checkpoint.tokenizer is not None
    assert checkpoint.tokenizer.vocab_size == 260
    assert checkpoint.template is None
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    template = load_checkpoint(tmp_path).template
    assert template is not None
    assert template.source == "{{ messages }}"


def test_tokenizer_of_a_gguf_file(tmp_path: Path) -> None:
    config = tiny_config(vocab_size=260)
    write_byte_tokenizer(tmp_path)
    path = tmp_path / "a.gguf"
    vocabulary = tmp_path / "tokenizer.json"
    write_gguf(path, config, random_weights(config), tokenizer=vocabulary)
    checkpoint = load_checkpoint(path)
    assert checkpoint.tokenizer is not None
    assert checkpoint.tokenizer.encode("the") == Tokenizer.from_file(vocabulary).encode("the")


def test_stale_buffers_are_ignored(tmp_path: Path) -> None:
    """Cases: W13."""
    config = tiny_config()
    stale = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, dtype=np.float32),
        "model.layers.1.self_attn.masked_bias": np.ones((), dtype=np.float32),
    }
    write_hf(tmp_path, config, random_weights(config), extra=stale)
    report = load_checkpoint(tmp_path).report
    assert sorted(report.ignored) == sorted(stale)
    assert report.summary() == ""


@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16])
def test_a_stored_duplicate_of_a_tied_head_is_ignored(tmp_path: Path, dtype: Any) -> None:
    """Cases: W5. Rows 109, 144."""
    config = tiny_config()
    weights = random_weights(config, dtype=dtype)
    write_hf(tmp_path, config, weights, extra={"lm_head.weight": weights.token_embedding.copy()})
    checkpoint = load_checkpoint(tmp_path)
    assert checkpoint.report.ignored == ("lm_head.weight",)
    assert checkpoint.weights.head is None
    assert len(state_of(checkpoint.weights)) == 20


def test_names_are_mapped_before_they_are_matched(tmp_path: Path) -> None:
    """Row 142."""
    config = tiny_config()
    weights = random_weights(config)
    write_hf(tmp_path / "hf", config, weights)
    path = tmp_path / "hf" / "model.safetensors"
    renamed = {f"base.{name}": tensor for name, tensor in load_file(path).items()}
    save_file({**renamed, "base.step": torch.ones(1)}, path)
    mapping = NameMapping(
        rename={
            "base.model.embed_tokens.weight": "model.embed_tokens.weight",
            "base.model.norm.weight": "model.norm.weight",
        },
        rewrite={
            "base.model.layers.{i}.{part}.weight": "model.layers.{i}.{part}.weight",
            "base.model.layers.{i}.{part}.{proj}.weight": "model.layers.{i}.{part}.{proj}.weight",
        },
        ignore_suffix=("step",),
    )
    checkpoint = load_checkpoint(tmp_path / "hf", mapping=mapping)
    assert checkpoint.report.ignored == ("base.step",)
    assert_same(checkpoint.weights, weights)


def assert_same(ours: Any, expected: Arrays) -> None:
    for (name, weight), (_, array) in zip(ours.items(), expected.items(), strict=True):
        assert not isinstance(weight, Quantized)
        assert np.array_equal(weight, array), name


MEASURE = """
import sys
from pathlib import Path
from smollm2.checkpoint import load_checkpoint
def peak():  # not ru_maxrss, which begins at what the parent of this process had
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(status["VmHWM"].split()[0]) * 1024
before = peak()
weights = load_checkpoint(Path(sys.argv[1])).weights
loaded = peak()
total = sum(float(weight[-1].sum()) for _, weight in weights.items())
print(loaded - before, peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/status is Linux's")
@pytest.mark.parametrize("format_", ["safetensors", "gguf"])
def test_memory_stays_bounded(tmp_path: Path, format_: str) -> None:
    """Row 146: loading maps; a tied duplicate is compared in parts."""
    config = tiny_config(vocab_size=30_000, hidden_size=512, intermediate_size=2048)
    weights = random_weights(config)
    largest, model = weights.token_embedding.nbytes, 4 * config.parameter_count
    if format_ == "gguf":
        path = write_gguf(tmp_path / "a.gguf", config, weights, "F16")
    else:
        path = write_hf(tmp_path, config, weights)
    script = [sys.executable, "-c", MEASURE, str(path)]
    done = subprocess.run(script, capture_output=True, text=True, check=True)
    loaded, touched = map(int, done.stdout.split())
    assert loaded < largest / 2
    assert touched < model + largest
