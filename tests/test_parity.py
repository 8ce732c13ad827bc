"""Tiny random checkpoints that transformers writes: its logits and greedy ids against ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import smollm2
from smollm2.batch import Batch, Span
from tests.tiny import write_gguf

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

IDS = [int(i) for i in np.random.default_rng(5).integers(0, 128, 80)]

SHAPES = {
    "gqa, tied": {"tie_word_embeddings": True},
    "gqa, untied": {"tie_word_embeddings": False},
    "one kv head": {"num_key_value_heads": 1},
    "as many kv heads": {"num_key_value_heads": 6},
    "own head size": {"head_dim": 32},
    "other rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
}


def hf_model(dtype: Any = torch.float32, **changes: Any) -> Any:
    values = {
        "vocab_size": 128,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 130000.0},
        "initializer_range": 0.2,
    }
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**values, **changes})
    return transformers.LlamaForCausalLM(config).eval().to(dtype)


def reference(folder: Path) -> np.ndarray:
    """Logits of the saved checkpoint, loaded and computed in float32."""
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model.eval()(torch.tensor([IDS])).logits[0].numpy()


def ours(path: Path) -> np.ndarray:
    model = smollm2.load(path, backend="numpy")
    return model.lm.forward(Batch.build([Span(0, 0, IDS, "all")]))


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_through_safetensors(tmp_path: Path, shape: str) -> None:
    """Feature row 20; cases: W3, W5."""
    model = hf_model(**SHAPES[shape])
    model.save_pretrained(tmp_path)
    np.testing.assert_allclose(ours(tmp_path), reference(tmp_path), atol=1e-4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_logits_of_half_precision_weights(tmp_path: Path, dtype: str) -> None:
    model = hf_model(getattr(torch, dtype))
    model.save_pretrained(tmp_path)
    np.testing.assert_allclose(ours(tmp_path), reference(tmp_path), atol=1e-4)


def test_logits_of_a_sharded_checkpoint(tmp_path: Path) -> None:
    model = hf_model()
    model.save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    np.testing.assert_allclose(ours(tmp_path), reference(tmp_path), atol=1e-4)


def test_logits_with_a_config_of_transformers_4(tmp_path: Path) -> None:
    model = hf_model()
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["rope_scaling"] = None
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config))
    np.testing.assert_allclose(ours(tmp_path), reference(tmp_path), atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_logits_through_gguf(tmp_path: Path, tied: bool) -> None:
    """cases: W1; every position is compared, also those far from the start."""
    model = hf_model(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "hf")
    checkpoint = smollm2.load_checkpoint(tmp_path / "hf")
    path = write_gguf(tmp_path / "model.gguf", checkpoint.config, checkpoint.weights)
    np.testing.assert_allclose(ours(path), reference(tmp_path / "hf"), atol=1e-4)


def test_greedy_ids_equal_transformers(tmp_path: Path) -> None:
    model = hf_model()
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        theirs = model.generate(
            torch.tensor([IDS[:8]]),
            attention_mask=torch.ones(1, 8, dtype=torch.long),
            max_new_tokens=40,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, 8:]
    g = smollm2.load(tmp_path, backend="numpy").generate(IDS[:8], max_tokens=40, ignore_eos=True)
    assert list(g.token_ids) == theirs.tolist()
