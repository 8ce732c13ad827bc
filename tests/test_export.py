"""Export to .smol: the same model in another layout, without loss unless a loss was asked for."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import smollm2
from smollm2.checkpoint import Checkpoint, load_checkpoint, state_of
from smollm2.errors import CheckpointError, FormatError, InputError
from smollm2.export import export_smol, save_checkpoint
from smollm2.formats.smol import SmolTensor, open_smol, write_smol
from smollm2.kinds import QUANTS
from smollm2.packing import Packed
from smollm2.quantize import as_float32, kind_of
from smollm2.smoothing import easier_to_round
from smollm2.template import SMOLLM2_TEMPLATE
from tests.fakes import write_byte_tokenizer
from tests.tiny import BFLOAT16, random_weights, tiny_config, write_gguf, write_hf

QUERY = "model.layers.0.self_attn.q_proj.weight"
EMBEDDING = "model.embed_tokens.weight"


def folder(path: Path, dtype: Any = BFLOAT16, **changes: Any) -> Path:
    config = tiny_config(vocab_size=260, **changes)
    write_hf(path, config, random_weights(config, dtype=dtype))
    write_byte_tokenizer(path, SMOLLM2_TEMPLATE)
    (path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}', encoding="utf-8")
    return path


def export(source: Path, out: Path, **options: Any) -> Checkpoint:
    export_smol(load_checkpoint(source), out, **options)
    return load_checkpoint(out)


def assert_same_values(one: Checkpoint, other: Checkpoint) -> None:
    first, second = state_of(one.weights), state_of(other.weights)
    assert list(first) == list(second)
    for name in first:
        assert np.array_equal(as_float32(first[name]), as_float32(second[name])), name


def kinds_of(checkpoint: Checkpoint) -> dict[str, str]:
    return {spec.name: spec.kind for spec in state_of(checkpoint.weights).descriptor}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16, "bf16 as f32"])
@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_nothing_is_lost_by_default(tmp_path: Path, dtype: Any, stacked: bool, tied: bool) -> None:
    """cases: features 1, 6, 8, 12: tensors, tokenizer, template, config, generation config"""
    narrow = dtype == "bf16 as f32"
    source = folder(tmp_path / "hf", BFLOAT16 if narrow else dtype, tie_word_embeddings=tied)
    if narrow:
        save_checkpoint(load_checkpoint(source), tmp_path / "wide", dtype="float32")
        source = tmp_path / "wide"
    before = load_checkpoint(source)
    after = export(source, tmp_path / "x.smol", stacked=stacked)
    assert_same_values(before, after)
    matrices = {kind for name, kind in kinds_of(after).items() if "norm" not in name}
    assert matrices == {"bf16" if narrow or dtype == BFLOAT16 else "f32"}
    assert kinds_of(after)["model.norm.weight"] == "F32"
    assert after.config == before.config
    assert dict(after.generation_config) == {"eos_token_id": [2, 0]}
    assert before.tokenizer is not None
    assert after.tokenizer is not None
    assert after.tokenizer.files() == before.tokenizer.files()
    assert after.template is not None
    assert after.template.source == SMOLLM2_TEMPLATE
    assert after.report.summary() == ""


@pytest.mark.parametrize(
    ("kind", "packed"),
    [("Q8_0", "q8"), ("Q4_0", "q4"), ("Q4_1", "q4m"), ("F32", "f32"), ("BF16", "bf16")],
)
@pytest.mark.parametrize("stacked", [True, False])
def test_gguf_is_held_without_loss(tmp_path: Path, kind: str, packed: str, stacked: bool) -> None:
    """cases: Q1: what is stored is what was there; L6: norms are float32"""
    config = tiny_config(num_key_value_heads=1)
    path = write_gguf(tmp_path / "x.gguf", config, random_weights(config), kind)
    exported = export_smol(load_checkpoint(path), tmp_path / "x.smol", stacked=stacked)
    assert exported.remarks == ()
    after = load_checkpoint(tmp_path / "x.smol")
    assert_same_values(load_checkpoint(path), after)
    assert set(kinds_of(after).values()) == {"F32", packed}


@pytest.mark.parametrize("kind", ["Q5_0", "Q5_1"])
def test_other_kinds_of_gguf_are_rounded_and_it_says_so(tmp_path: Path, kind: str) -> None:
    """cases: Q1, Q2: nothing is substituted in silence"""
    path = write_gguf(tmp_path / "x.gguf", tiny_config(), random_weights(tiny_config()), kind)
    exported = export_smol(load_checkpoint(path), tmp_path / "x.smol")
    (remark,) = exported.remarks
    assert remark.startswith(f"15 tensors of {kind} are rounded to q8")
    before, after = load_checkpoint(path), load_checkpoint(tmp_path / "x.smol")
    for name, weight in state_of(easier_to_round(before, "q8")).items():
        exact = as_float32(weight)
        off = np.abs(as_float32(state_of(after.weights)[name]) - exact).max()
        assert off <= np.abs(exact).max() / 127
    assert export_smol(before, tmp_path / "y.smol", quant="q8").remarks == ()


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("stacked", [True, False])
def test_each_quant(tmp_path: Path, quant: str, stacked: bool) -> None:
    """cases: features 4, 5, 7, 8, 14; Q1: real bits per weight; the ends of 4-bit models are q8"""
    source = folder(tmp_path / "hf", tie_word_embeddings=False)
    before = load_checkpoint(source)
    exported = export_smol(before, tmp_path / "x.smol", quant=quant, stacked=stacked)
    after = load_checkpoint(tmp_path / "x.smol")
    ends = "q8" if quant in ("q4", "q4m") else quant
    for name, kind in kinds_of(after).items():
        end = name in (EMBEDDING, "lm_head.weight")
        assert kind == ("F32" if "norm" in name else ends if end else quant)
    limits = {"f32": 0, "bf16": 0, "q16": 2**-13, "q8": 2**-6, "q4": 0.2, "q4m": 0.15}
    for name, weight in easier_to_round(before, quant).items():
        exact = as_float32(weight)
        off = np.abs(as_float32(state_of(after.weights)[name]) - exact).max()
        assert off <= limits[quant] * np.abs(exact).max()
    bits = {"f32": 32, "bf16": 16, "q16": 16.5, "q8": 8.5, "q4": 4.5, "q4m": 5}
    by_kind = {kind.kind: kind for kind in exported.kinds}
    if quant != "f32":
        assert by_kind["f32"].weights == 5 * 64
    assert by_kind[quant].bits_per_weight >= bits[quant]
    assert sum(kind.weights for kind in exported.kinds) == before.config.parameter_count
    assert exported.nbytes == (tmp_path / "x.smol").stat().st_size
    assert sum(kind.nbytes for kind in exported.kinds) < exported.nbytes


def test_bits_are_those_of_whole_tiles(tmp_path: Path) -> None:
    """cases: Q1: 96 columns take 128"""
    config = tiny_config(hidden_size=96, num_attention_heads=6, num_key_value_heads=3)
    write_hf(tmp_path / "hf", config, random_weights(config))
    exported = export_smol(load_checkpoint(tmp_path / "hf"), tmp_path / "x.smol", quant="q8")
    (q8,) = (kind for kind in exported.kinds if kind.kind == "q8")
    matrices = [shape for shape in config.shapes.values() if len(shape) == 2]
    wide = sum(prod((rows, -(-cols // 64) * 64)) for rows, cols in matrices)
    assert q8.weights == sum(map(prod, matrices))
    assert q8.bits_per_weight == 8.5 * wide / q8.weights


def test_stacks_are_one_matrix_and_views(tmp_path: Path) -> None:
    source = folder(tmp_path / "hf")
    after = export(source, tmp_path / "x.smol", quant="q4", stacked=True)
    file = open_smol(tmp_path / "x.smol")
    assert list(file.entries)[:6] == [
        EMBEDDING,
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.self_attn.qkv",
        "model.layers.0.self_attn.o_proj.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "model.layers.0.mlp.gate_up",
    ]
    assert file.entries["model.layers.0.self_attn.qkv"].shape == (128, 64)
    assert file.entries["model.layers.0.mlp.gate_up"].shape == (256, 64)
    mlp, whole = after.weights.blocks[0].mlp, file.raw("model.layers.0.mlp.gate_up")
    tiles = whole.reshape(16, -1)
    for part, first in (mlp.gate, 0), (mlp.up, 1):
        assert isinstance(part, Packed)
        assert not part.data.flags.owndata
        assert np.array_equal(part.data, tiles[first::2])
    attention = after.weights.blocks[0].attention
    key = attention.key
    assert isinstance(key, Packed)
    tiles = file.raw("model.layers.0.self_attn.qkv").reshape(8, -1)
    assert np.array_equal(key.data, tiles[4:6])
    apart = export(source, tmp_path / "y.smol", quant="q4")
    assert_same_values(apart, after)
    assert (tmp_path / "y.smol").stat().st_size >= (tmp_path / "x.smol").stat().st_size


def test_parts_of_no_whole_tiles_stay_apart(tmp_path: Path) -> None:
    source = folder(tmp_path / "hf", num_key_value_heads=1, head_dim=24, intermediate_size=40)
    before, after = load_checkpoint(source), export(source, tmp_path / "x.smol", stacked=True)
    assert not [name for name in open_smol(tmp_path / "x.smol").entries if "qkv" in name]
    assert_same_values(before, after)


def test_parts_of_two_kinds_stay_apart(tmp_path: Path) -> None:
    before = load_checkpoint(folder(tmp_path / "hf"))
    third = np.float32(1 / 3)
    mixed = replace(
        before,
        weights=before.weights.map(
            lambda name, weight: as_float32(weight) * third if "v_proj" in name else weight
        ),
    )
    export_smol(mixed, tmp_path / "x.smol", stacked=True)
    after = load_checkpoint(tmp_path / "x.smol")
    assert_same_values(mixed, after)
    assert kinds_of(after)[QUERY] == "bf16"
    assert kinds_of(after)["model.layers.0.self_attn.v_proj.weight"] == "f32"
    assert "model.layers.0.self_attn.qkv" not in open_smol(tmp_path / "x.smol").entries
    assert "model.layers.0.mlp.gate_up" in open_smol(tmp_path / "x.smol").entries


@pytest.mark.parametrize("quant", [None, "q8", "q4"])
def test_a_smol_file_can_be_exported_again(tmp_path: Path, quant: str | None) -> None:
    source = folder(tmp_path / "hf")
    first = export(source, tmp_path / "x.smol", quant="q8", stacked=True)
    again = export(tmp_path / "x.smol", tmp_path / "y.smol", quant=quant)
    if quant != "q4":
        assert_same_values(first, again)
    assert kinds_of(again)[QUERY] == (quant or "q8")
    save_checkpoint(again, tmp_path / "back")
    assert_same_values(again, load_checkpoint(tmp_path / "back"))


def test_single_and_sharded_files_give_the_same_bytes(tmp_path: Path) -> None:
    """cases: feature 11"""
    source = folder(tmp_path / "one")
    export(source, tmp_path / "one.smol", quant="q8")
    sharded = folder(tmp_path / "two")
    from safetensors.numpy import load_file, save_file

    tensors = load_file(sharded / "model.safetensors")
    (sharded / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, members in shards.items():
        save_file({name: tensors[name] for name in members}, sharded / shard)
    index = {"weight_map": {name: shard for shard, group in shards.items() for name in group}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    export(sharded, tmp_path / "two.smol", quant="q8")
    assert (tmp_path / "one.smol").read_bytes() == (tmp_path / "two.smol").read_bytes()


@pytest.mark.parametrize("quant", [None, "q8"])
def test_it_writes_the_same_text(tmp_path: Path, quant: str | None) -> None:
    """cases: feature 1: greedy ids equal those of the dequantized weights"""
    source = folder(tmp_path / "hf")
    out = tmp_path / "x.smol"
    save_checkpoint(export(source, out, quant=quant), tmp_path / "back", dtype="float32")
    ids = []
    for path in out, tmp_path / "back", *([source] if quant is None else []):
        with smollm2.load(path, backend="numpy") as model:
            ids.append(model.generate("the sea", max_tokens=16, ignore_eos=True).token_ids)
    assert all(one == ids[0] for one in ids)


@pytest.mark.parametrize("quant", ["q8", "q4", "q16"])
def test_weights_that_are_not_numbers_are_refused(tmp_path: Path, quant: str) -> None:
    """cases: feature 12, 16: nothing is left behind"""
    config = tiny_config()
    weights = random_weights(config)
    weights.blocks[1].mlp.down[3, 4] = np.inf
    write_hf(tmp_path / "hf", config, weights)
    with pytest.raises(InputError, match=r"layers\.1\.mlp\.down_proj\.weight: weights with NaN"):
        export(tmp_path / "hf", tmp_path / "x.smol", quant=quant)
    assert not [path for path in tmp_path.iterdir() if path.name != "hf"]
    assert_same_values(
        load_checkpoint(tmp_path / "hf"), export(tmp_path / "hf", tmp_path / "x.smol")
    )


def test_what_cannot_be_exported(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(folder(tmp_path / "hf"))
    with pytest.raises(InputError, match="quant is 'int4': it must be one of f32, bf16"):
        export_smol(checkpoint, tmp_path / "x.smol", quant="int4")
    with pytest.raises(InputError, match="is a folder"):
        export_smol(checkpoint, tmp_path)
    (tmp_path / "x.smol").write_text("mine")
    with pytest.raises(InputError, match=r"x\.smol: exists: give another name, or --force"):
        export_smol(checkpoint, tmp_path / "x.smol")
    assert (tmp_path / "x.smol").read_text() == "mine"
    export_smol(checkpoint, tmp_path / "x.smol", force=True)
    assert_same_values(checkpoint, load_checkpoint(tmp_path / "x.smol"))
    wrong = replace(checkpoint, config=replace(checkpoint.config, intermediate_size=64))
    with pytest.raises(CheckpointError, match="other names or shapes"):
        export_smol(wrong, tmp_path / "y.smol")


def rewritten(path: Path, out: Path, change: Any) -> Path:
    """A .smol file whose tensors (name → kind, shape, bytes) were changed."""
    file = open_smol(path)
    tensors = {
        name: (entry.kind.lower(), entry.shape, file.raw(name))
        for name, entry in file.entries.items()
    }
    sections = dict(file.metadata)
    change(tensors, sections)
    specs = [SmolTensor(name, kind, shape) for name, (kind, shape, _) in tensors.items()]
    write_smol(out, sections, specs, lambda spec: tensors[spec.name][2])
    return out


def test_a_file_that_does_not_fit_its_config(tmp_path: Path) -> None:
    """Names, shapes and stacks are checked as those of any checkpoint."""
    export(folder(tmp_path / "hf"), tmp_path / "x.smol", quant="q8", stacked=True)
    source, out = tmp_path / "x.smol", tmp_path / "y.smol"
    qkv = "model.layers.0.self_attn.qkv"
    small = ("q8", (16, 64), np.zeros(1088, dtype=np.uint8))
    for change, message in (
        (lambda t, _: t.pop(qkv), r"missing: model\.layers\.0\.self_attn\.q_proj\.weight"),
        (lambda t, _: t.update({"more": small}), "unexpected: more"),
        (lambda t, _: t.update({EMBEDDING: small}), r"shape mismatches: .*got \[16, 64\]"),
        (lambda t, _: t.update({qkv: small}), r"has the shape \[16, 64\], but its parts have"),
        (lambda t, _: t.update({QUERY: small}), r"q_proj\.weight is there twice"),
    ):
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(rewritten(source, out, change))
    with pytest.raises(FormatError, match=r"there is no section config\.json"):
        load_checkpoint(rewritten(source, out, lambda _, s: s.clear()))
    with pytest.raises(FormatError, match=r"y\.smol: config\.json: not JSON"):
        load_checkpoint(rewritten(source, out, lambda _, s: s.update({"config.json": b"{"})))


def test_a_folder_that_holds_one_file(tmp_path: Path) -> None:
    export(folder(tmp_path / "hf"), tmp_path / "x.smol")
    inside = tmp_path / "only"
    inside.mkdir()
    (tmp_path / "x.smol").rename(inside / "x.smol")
    assert load_checkpoint(inside).path == inside / "x.smol"
    (inside / "y.smol").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"holds 2 \.smol files: give one of x\.smol, y\."):
        load_checkpoint(inside)


@pytest.mark.weights
def test_the_real_weights(tmp_path: Path, real_gguf: Path) -> None:
    """cases: feature 17: all tensors of the 135M model, and no more than the file's own bytes"""
    checkpoint = load_checkpoint(real_gguf)
    exported = export_smol(checkpoint, tmp_path / "x.smol")
    after = load_checkpoint(tmp_path / "x.smol")
    assert_same_values(checkpoint, after)
    assert sum(kind.nbytes for kind in exported.kinds) < real_gguf.stat().st_size
    assert {kind.kind: round(kind.bits_per_weight, 2) for kind in exported.kinds} == {
        "q8": 8.5,
        "f32": 32,
        "q4m": 5,
    }
    assert kind_of(after.weights.token_embedding) == "q8"
    assert ml_dtypes.bfloat16 != after.weights.final_norm.dtype
