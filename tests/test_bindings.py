"""Bindings from outside: which tensor of a checkpoint each weight is; the tied head among them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray
from safetensors.numpy import save_file

import smollm2
from smollm2.bindings import Bindings
from smollm2.checkpoint import Checkpoint, load_checkpoint, state_of
from smollm2.config import Config
from smollm2.errors import CheckpointError, FormatError, InputError
from smollm2.quantize import as_float32
from smollm2.state import NameMapping
from smollm2.weights import EMBEDDING, HEAD
from tests.tiny import Arrays, gguf_name, random_weights, tiny_config, write_gguf, write_hf

NORM = "model.norm.weight"
LINNET = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.q_proj",
    "self_attn.k_proj": "attention.k_proj",
    "self_attn.v_proj": "attention.v_proj",
    "self_attn.o_proj": "attention.o_proj",
    "post_attention_layernorm": "mlp_norm",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
}


def linnet_name(name: str) -> str:
    """The path that Linnet's cards give to a weight."""
    if name in (EMBEDDING, NORM, HEAD):
        return {EMBEDDING: "embedding.weight", NORM: "norm.weight", HEAD: HEAD}[name]
    _, _, layer, rest = name.split(".", 3)
    return f"layers.{layer}.{LINNET[rest.removesuffix('.weight')]}.weight"


def write_renamed(folder: Path, config: Config, weights: Arrays) -> dict[str, str]:
    """A checkpoint whose tensors are named t0, t1, …; returns canonical name → tensor."""
    names = {name: f"t{place}" for place, (name, _) in enumerate(weights.items())}
    write_hf(folder, config, weights)
    tensors: dict[str, NDArray[Any]] = {names[name]: array for name, array in weights.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return names


def assert_holds(checkpoint: Checkpoint, weights: Arrays) -> None:
    loaded = state_of(checkpoint.weights)
    assert list(loaded) == [name for name, _ in weights.items()]
    for name, array in weights.items():
        assert np.array_equal(as_float32(loaded[name]), array), name


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("as_file", [True, False])
@pytest.mark.parametrize("named", [str, linnet_name], ids=["canonical", "linnet"])
def test_every_weight_can_be_bound(tmp_path: Path, tied: bool, as_file: bool, named: Any) -> None:
    """cases: feature 109"""
    config = tiny_config(tie_word_embeddings=tied)
    weights = random_weights(config)
    names = write_renamed(tmp_path / "hf", config, weights)
    bindings: Any = {named(name): tensor for name, tensor in names.items()}
    with pytest.raises(CheckpointError, match=r"missing: model\.embed_tokens"):
        load_checkpoint(tmp_path / "hf")
    if as_file:
        (tmp_path / "bindings.json").write_text(json.dumps(bindings), encoding="utf-8")
        bindings = tmp_path / "bindings.json"
    loaded = load_checkpoint(tmp_path / "hf", bindings=bindings)
    assert_holds(loaded, weights)
    assert loaded.report.summary() == ""
    assert loaded.config == config


@pytest.mark.parametrize("says", [True, False], ids=["config tied", "config untied"])
@pytest.mark.parametrize("order", [(EMBEDDING, HEAD), (HEAD, EMBEDDING)])
def test_two_names_of_one_tensor_are_one_weight(
    tmp_path: Path, says: bool, order: tuple[str, str]
) -> None:
    """cases: feature 109: bound to one tensor, the head is tied, whatever the config says"""
    weights = random_weights(tiny_config())
    write_hf(tmp_path, tiny_config(tie_word_embeddings=says), weights)
    bindings = dict.fromkeys(order, EMBEDDING)
    loaded = load_checkpoint(tmp_path, bindings=bindings)
    assert loaded.config == tiny_config(tie_word_embeddings=True)
    assert loaded.weights.head is None
    assert_holds(loaded, weights)
    assert loaded.report.loaded == tuple(name for name, _ in weights.items())


def test_a_head_of_its_own_in_a_tied_config(tmp_path: Path) -> None:
    """What differs from the embedding is refused, as it is without bindings."""
    weights = random_weights(tiny_config(tie_word_embeddings=False))
    write_hf(tmp_path, tiny_config(), weights)
    with pytest.raises(CheckpointError, match="differs from the token embedding"):
        load_checkpoint(tmp_path, bindings={HEAD: HEAD})


def test_what_is_not_bound_keeps_its_name(tmp_path: Path) -> None:
    weights = random_weights(tiny_config())
    extra = {"other.norm": np.full(64, 2, dtype=np.float32)}
    write_hf(tmp_path, tiny_config(), weights, extra=extra, omit=(NORM,))
    loaded = load_checkpoint(tmp_path, bindings={NORM: "other.norm"})
    assert np.array_equal(as_float32(loaded.weights.final_norm), extra["other.norm"])
    with pytest.raises(CheckpointError, match=r"unexpected: other\.norm"):
        load_checkpoint(tmp_path, bindings={})


def test_tensors_of_gguf_files(tmp_path: Path) -> None:
    """They are bound under the names that they have in the file; rows of Q and K are restored."""
    config = tiny_config(tie_word_embeddings=False)
    weights = random_weights(config)
    path = write_gguf(tmp_path / "x.gguf", config, weights)
    bindings = {linnet_name(name): gguf_name(name) for name, _ in weights.items()}
    assert_holds(load_checkpoint(path, bindings=bindings), weights)


@pytest.mark.parametrize("backend", ["numpy", "native"])
def test_a_model_is_loaded_with_bindings(tmp_path: Path, backend: str) -> None:
    config = tiny_config()
    weights = random_weights(config)
    names = write_renamed(tmp_path / "bound", config, weights)
    write_hf(tmp_path / "plain", config, weights)
    ids = [
        smollm2.load(tmp_path / folder, bindings=bindings, backend=backend)
        .generate([1, 5, 7], max_tokens=6, ignore_eos=True)
        .token_ids
        for folder, bindings in (("bound", names), ("plain", None))
    ]
    assert ids[0] == ids[1]


@pytest.mark.parametrize(
    ("bindings", "message"),
    [
        (
            {"model.norm.wieght": NORM},
            "bindings: the model has no weight 'model.norm.wieght': "
            "did you mean 'model.norm.weight'?",
        ),
        ({"qqqq": NORM}, "bindings: the model has no weight 'qqqq'"),
        (
            {"layers.2.mlp.up.weight": NORM},
            "bindings: the model has no weight 'model.layers.2.mlp.up_proj.weight': "
            "did you mean 'model.layers.1.mlp.up_proj.weight'?",
        ),
        (
            {NORM: "model.norm"},
            "bindings: model.norm.weight is bound to 'model.norm', which the checkpoint does not "
            "have: did you mean 'model.norm.weight'?",
        ),
        (
            {NORM: EMBEDDING, HEAD: EMBEDDING},
            "bindings: model.norm.weight and lm_head.weight are both bound to "
            "'model.embed_tokens.weight'",
        ),
        (
            {EMBEDDING: EMBEDDING, "embedding.weight": EMBEDDING},
            "bindings: tensors 'model.embed_tokens.weight' and 'embedding.weight' are both mapped "
            "to 'model.embed_tokens.weight'",
        ),
        ({NORM: 7}, "bindings: 'model.norm.weight': bindings map names to names of tensors"),
        ({7: NORM}, "bindings: 'a key': bindings map names to names of tensors"),
        (7, "bindings is int: give a mapping, or the path of a JSON file"),
    ],
)
def test_wrong_bindings(tmp_path: Path, bindings: Any, message: str) -> None:
    write_hf(tmp_path, tiny_config(), random_weights(tiny_config()))
    with pytest.raises(InputError) as caught:
        load_checkpoint(tmp_path, bindings=bindings)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": "x", "a": "y"}', "the key 'a' appears twice"),
        ('["a"]', "a JSON object is needed, not a list"),
        ("{", "not JSON"),
    ],
)
def test_broken_files(tmp_path: Path, text: str, message: str) -> None:
    write_hf(tmp_path, tiny_config(), random_weights(tiny_config()))
    path = tmp_path / "bindings.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(FormatError, match=message):
        load_checkpoint(tmp_path, bindings=path)
    with pytest.raises(FormatError, match="no such file"):
        load_checkpoint(tmp_path, bindings=str(tmp_path / "none.json"))
    path.write_text('{"a": 1}', encoding="utf-8")
    with pytest.raises(InputError, match=r"bindings\.json: 'a': bindings map names"):
        load_checkpoint(tmp_path, bindings=path)


def test_mapping_and_bindings_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="give one of them"):
        load_checkpoint(tmp_path, mapping=NameMapping(), bindings={})


@given(st.data())
def test_any_permutation_is_undone(data: st.DataObject) -> None:
    """The rules that bindings make give each bound tensor its weight's name, and no other's."""
    config = tiny_config(num_hidden_layers=1, tie_word_embeddings=False)
    names = list(config.shapes)
    tensors = data.draw(st.permutations([f"t{place}" for place in range(len(names))]))
    given_names = [data.draw(st.sampled_from([name, linnet_name(name)])) for name in names]
    bindings = Bindings.read(dict(zip(given_names, tensors, strict=True)))
    targets = bindings.mapping(config, tensors).apply(tensors)
    assert targets == dict(zip(tensors, names, strict=True))
