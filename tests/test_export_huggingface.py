"""Export to a Hugging Face folder: transformers loads it, with the logits of the original."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from transformers import AutoTokenizer, GenerationConfig, LlamaForCausalLM

from smollm2.checkpoint import Checkpoint, load_checkpoint, state_of
from smollm2.errors import FormatError, InputError
from smollm2.export import (
    DTYPES,
    MAX_SHARD_SIZE,
    Tensor,
    export_smol,
    huggingface,
    save_checkpoint,
)
from smollm2.formats import safetensors
from smollm2.formats.safetensors import open_safetensors
from smollm2.quantize import as_float32
from smollm2.template import SMOLLM2_TEMPLATE
from tests.fakes import write_byte_tokenizer
from tests.tiny import BFLOAT16, random_weights, tiny_config, write_gguf, write_hf

SHAPES: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "own head size": {"head_dim": 32, "num_key_value_heads": 4},
}
INDEX = "model.safetensors.index.json"


def folder(path: Path, dtype: Any = np.float32, **changes: Any) -> Path:
    config = tiny_config(**{"vocab_size": 260, **changes})
    write_hf(path, config, random_weights(config, dtype=dtype))
    write_byte_tokenizer(path, SMOLLM2_TEMPLATE)
    (path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}', encoding="utf-8")
    return path


def logits(path: Path, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Logits of transformers, of weights that were converted to ``dtype`` first, in float32."""
    model = LlamaForCausalLM.from_pretrained(path, dtype="auto")
    if dtype is not None:
        assert model.dtype == dtype
    with torch.no_grad():
        return model.float()(torch.arange(3, 67)[None]).logits


def names(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir())


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("limit", [MAX_SHARD_SIZE, 40_000], ids=["one file", "shards"])
def test_transformers_has_the_same_logits(
    tmp_path: Path, changes: dict[str, Any], limit: int
) -> None:
    source = folder(tmp_path / "hf", **changes)
    save_checkpoint(load_checkpoint(source), tmp_path / "x", max_shard_size=limit)
    assert (INDEX in names(tmp_path / "x")) == (limit == 40_000)
    assert torch.equal(logits(tmp_path / "x", torch.float32), logits(source))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", [np.float32, BFLOAT16], ids=["of f32", "of bf16"])
def test_each_dtype(tmp_path: Path, dtype: str, stored: Any) -> None:
    """Rounded as torch rounds; what is of the dtype already is not touched."""
    source = folder(tmp_path / "hf", stored)
    save_checkpoint(load_checkpoint(source), tmp_path / "x", dtype=dtype)
    of_torch: torch.dtype = getattr(torch, dtype)
    original = LlamaForCausalLM.from_pretrained(source, dtype="auto").to(of_torch)
    written = LlamaForCausalLM.from_pretrained(tmp_path / "x", dtype="auto").state_dict()
    assert written.keys() == original.state_dict().keys()
    for name, tensor in original.state_dict().items():
        assert written[name].dtype == of_torch
        assert torch.equal(written[name], tensor), name
    assert json.loads((tmp_path / "x" / "config.json").read_bytes())["dtype"] == dtype
    assert torch.isfinite(logits(tmp_path / "x", of_torch)).all()


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [(np.float32, "float32"), (np.float16, "float16"), (BFLOAT16, "bfloat16")],
)
def test_the_dtype_stays_by_default(tmp_path: Path, stored: Any, dtype: str) -> None:
    source = folder(tmp_path / "hf", stored)
    exported = save_checkpoint(load_checkpoint(source), tmp_path / "x")
    assert load_checkpoint(tmp_path / "x").config.dtype == dtype
    assert [size.kind for size in exported.kinds] == [DTYPES[dtype]]
    assert exported.nbytes == sum(path.stat().st_size for path in (tmp_path / "x").iterdir())
    assert exported.path == (tmp_path / "x").resolve()


def test_everything_beside_the_weights(tmp_path: Path) -> None:
    """Tokenizer files byte for byte; transformers takes template and generation config."""
    source = folder(tmp_path / "hf")
    (source / "special_tokens_map.json").write_text('{"eos_token": "<|im_end|>" }')
    (source / "chat_template.jinja").write_text("{{ messages[0].content }}\n")
    save_checkpoint(load_checkpoint(source), tmp_path / "x")
    assert names(tmp_path / "x") == names(source)
    for name in names(source):
        if name not in ("config.json", "generation_config.json", "model.safetensors"):
            assert (tmp_path / "x" / name).read_bytes() == (source / name).read_bytes(), name
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "x")
    message = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(message, tokenize=False) == "Hi"
    assert GenerationConfig.from_pretrained(tmp_path / "x").eos_token_id == [2, 0]


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_quantized_files(tmp_path: Path, kind: str) -> None:
    """The values of a GGUF or .smol file, and its tokenizer in the form of transformers."""
    config = tiny_config(vocab_size=260)
    tokenizer = write_byte_tokenizer(tmp_path / "bytes")
    path = write_gguf(
        tmp_path / "a.gguf", config, random_weights(config), kind, tokenizer=tokenizer
    )
    export_smol(load_checkpoint(path), tmp_path / "a.smol")
    for source in (path, tmp_path / "a.smol"):
        before = load_checkpoint(source)
        save_checkpoint(before, tmp_path / f"x{source.suffix}")
        after = load_checkpoint(tmp_path / f"x{source.suffix}")
        one, other = state_of(before.weights), state_of(after.weights)
        assert all(np.array_equal(as_float32(one[name]), as_float32(other[name])) for name in one)
    assert torch.equal(logits(tmp_path / "x.gguf"), logits(tmp_path / "x.smol"))
    ids = AutoTokenizer.from_pretrained(tmp_path / "x.gguf")("the sea")["input_ids"]
    assert before.tokenizer is not None
    assert ids == before.tokenizer.encode("the sea")


@pytest.mark.parametrize("limit", [1, 10_000, 40_000, 66_815, 66_816, 10**9])
def test_shards_are_those_of_huggingface_hub(tmp_path: Path, limit: int) -> None:
    source = load_checkpoint(folder(tmp_path / "hf", tie_word_embeddings=False))
    tensors = {
        name: torch.from_numpy(np.array(weight))
        for name, weight in state_of(source.weights).items()
    }
    split = split_torch_state_dict_into_shards(
        tensors, max_shard_size=limit, filename_pattern="model{suffix}.safetensors"
    )
    save_checkpoint(source, tmp_path / "x", max_shard_size=limit)
    weights = [name for name in names(tmp_path / "x") if name.endswith(".safetensors")]
    assert weights == sorted(split.filename_to_tensors)
    for name, members in split.filename_to_tensors.items():
        assert set(open_safetensors(tmp_path / "x" / name).entries) == set(members)
    if split.is_sharded:
        index = json.loads((tmp_path / "x" / INDEX).read_bytes())
        assert index["weight_map"] == split.tensor_to_filename
        assert index["metadata"] == {
            "total_parameters": source.config.parameter_count,
            **split.metadata,
        }
    assert load_checkpoint(tmp_path / "x").config == replace(source.config, dtype="float32")


def test_the_same_files_as_transformers(tmp_path: Path) -> None:
    """Weights byte for byte; an index of the same form (modules are in another order there)."""
    source = folder(tmp_path / "hf")
    model = LlamaForCausalLM.from_pretrained(source)
    for limit in (10**9, 40_000):
        model.save_pretrained(tmp_path / f"theirs {limit}", max_shard_size=limit)
        save_checkpoint(load_checkpoint(source), tmp_path / f"ours {limit}", max_shard_size=limit)
    ours, theirs = (tmp_path / f"{who} {10**9}" / "model.safetensors" for who in ("ours", "theirs"))
    assert ours.read_bytes() == theirs.read_bytes()
    ours, theirs = (tmp_path / f"{who} 40000" / INDEX for who in ("ours", "theirs"))
    one, other = json.loads(ours.read_bytes()), json.loads(theirs.read_bytes())
    assert one["metadata"] == other["metadata"]
    assert one["weight_map"].keys() == other["weight_map"].keys()
    assert ours.read_bytes().splitlines()[:5] == theirs.read_bytes().splitlines()[:5]


def test_progress(tmp_path: Path) -> None:
    said: list[tuple[Tensor, int, int]] = []
    save_checkpoint(
        load_checkpoint(folder(tmp_path / "hf")),
        tmp_path / "x",
        dtype="bfloat16",
        max_shard_size=40_000,
        progress=lambda tensor, number, count: said.append((tensor, number, count)),
    )
    assert [number for _, number, _ in said] == list(range(1, 21))
    assert {count for _, _, count in said} == {20}
    assert {tensor.kind for tensor, _, _ in said} == {"BF16"}


def test_force_replaces_an_export_and_nothing_else(tmp_path: Path) -> None:
    """What an earlier export wrote goes whole; a folder with anything else is left alone."""
    source = load_checkpoint(folder(tmp_path / "hf"))
    save_checkpoint(source, tmp_path / "x", max_shard_size=40_000)
    with pytest.raises(InputError, match="is not an empty folder: give a new one"):
        save_checkpoint(source, tmp_path / "x")
    save_checkpoint(source, tmp_path / "x", force=True)
    assert names(tmp_path / "x") == names(tmp_path / "hf")
    (tmp_path / "x" / "README.md").write_text("mine")
    with pytest.raises(InputError, match=r"holds 'README\.md', which no export writes"):
        save_checkpoint(source, tmp_path / "x", force=True)
    assert "README.md" in names(tmp_path / "x")
    assert names(tmp_path) == ["hf", "x"]


def test_onto_itself(tmp_path: Path) -> None:
    source = folder(tmp_path / "hf", BFLOAT16)
    before = logits(source)
    save_checkpoint(load_checkpoint(source), source, force=True)
    assert torch.equal(logits(source), before)


def test_a_failure_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases: W12."""
    source = load_checkpoint(folder(tmp_path / "hf"))
    save_checkpoint(source, tmp_path / "x")
    before = {name: (tmp_path / "x" / name).read_bytes() for name in names(tmp_path / "x")}

    def fail(*_: object) -> Checkpoint:
        raise FormatError("broken")

    monkeypatch.setattr(huggingface, "load_checkpoint", fail)
    with pytest.raises(FormatError, match="broken"):
        save_checkpoint(source, tmp_path / "x", force=True)
    assert {name: (tmp_path / "x" / name).read_bytes() for name in names(tmp_path / "x")} == before
    assert names(tmp_path) == ["hf", "x"]


@pytest.mark.parametrize("place", [1, 2])
def test_a_folder_that_cannot_be_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    """The old one gets its name back, and is the one that is named."""
    source = load_checkpoint(folder(tmp_path / "hf"))
    save_checkpoint(source, tmp_path / "x")
    rename = Path.replace
    calls = []

    def fail_once(self: Path, target: Path) -> Path:
        if self.is_dir():
            calls.append(target)
            if len(calls) == place:
                raise OSError(28, "No space left on device", str(self), None, str(target))
        return rename(self, target)

    monkeypatch.setattr(Path, "replace", fail_once)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path / 'x'}'$"):
        save_checkpoint(source, tmp_path / "x", force=True)
    assert names(tmp_path / "x") == names(tmp_path / "hf")
    assert names(tmp_path) == ["hf", "x"]


def test_a_broken_disk_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(path: Path) -> Any:
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)
        return open_safetensors(path)

    source = load_checkpoint(folder(tmp_path / "hf"))
    monkeypatch.setattr(safetensors, "open_safetensors", damaged)
    message = rf"^{tmp_path / 'x' / 'model.safetensors'}: tensor .* reads otherwise than it was"
    with pytest.raises(FormatError, match=message):
        save_checkpoint(source, tmp_path / "x")
    assert names(tmp_path) == ["hf"]


def test_a_full_disk_is_told_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the name that it was to have. Cases: W12."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    source = load_checkpoint(folder(tmp_path / "hf"))
    monkeypatch.setattr(safetensors, "_packed", full)
    message = f"No space left on device: '{tmp_path / 'x' / 'model.safetensors'}'$"
    with pytest.raises(OSError, match=message):
        save_checkpoint(source, tmp_path / "x")
    assert names(tmp_path) == ["hf"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "dtype is 'int8': it must be one of float32, bfloat16, float16"),
        ({"max_shard_size": 0}, "max_shard_size is 0: it must be a number of bytes"),
        ({"max_shard_size": "5GB"}, "max_shard_size is '5GB': give a whole number"),
    ],
)
def test_wrong_options(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    source = load_checkpoint(folder(tmp_path / "hf"))
    with pytest.raises(InputError, match=message):
        save_checkpoint(source, tmp_path / "x", **options)
    assert names(tmp_path) == ["hf"]


def test_values_that_a_dtype_has_no_room_for(tmp_path: Path) -> None:
    config = tiny_config()
    weights = random_weights(config)
    weights.blocks[1].mlp.down[3, 4] = -1e5
    source = load_checkpoint(write_hf(tmp_path / "hf", config, weights))
    with pytest.raises(InputError, match=r"/hf: .*1\.mlp\.down.* 1e\+05 are too large for F16"):
        save_checkpoint(source, tmp_path / "x", dtype="float16")
    assert names(tmp_path) == ["hf"]
    save_checkpoint(source, tmp_path / "x", dtype="bfloat16")


def test_double_precision_needs_a_dtype(tmp_path: Path) -> None:
    source = load_checkpoint(folder(tmp_path / "hf", np.float64))
    with pytest.raises(InputError, match="the weights are F64, which a folder does not hold"):
        save_checkpoint(source, tmp_path / "x")
    save_checkpoint(source, tmp_path / "x", dtype="float32")
