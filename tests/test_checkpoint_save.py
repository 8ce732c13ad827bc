"""What save_checkpoint writes loads again, here and in transformers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from smollm2.checkpoint import Checkpoint, load_checkpoint, state_of
from smollm2.errors import CheckpointError, InputError
from smollm2.export import huggingface, save_checkpoint
from smollm2.quantize import as_float32
from smollm2.state import State
from smollm2.template import ChatTemplate
from tests.fakes import write_byte_tokenizer
from tests.tiny import BFLOAT16, random_weights, tiny_config, write_gguf, write_hf


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    config = tiny_config(vocab_size=260, extra={"initializer_range": 0.5})
    folder = write_hf(tmp_path / "source", config, random_weights(config, dtype=BFLOAT16))
    write_byte_tokenizer(folder, chat_template="{{ messages[0].content }}")
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 0]}', encoding="utf-8")
    return load_checkpoint(folder)


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(
        np.array_equal(as_float32(one[name]), as_float32(other[name])) for name in one
    )


def test_loads_again(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Rows 8, 131, 144, 145."""
    folder = tmp_path / "deep" / "copy"
    save_checkpoint(checkpoint, folder)
    again = load_checkpoint(folder)
    assert again.config == dataclasses.replace(checkpoint.config, dtype="bfloat16")
    assert again.config.extra == {"initializer_range": 0.5}
    assert again.report == checkpoint.report
    assert state_of(again.weights).descriptor == state_of(checkpoint.weights).descriptor
    assert same(state_of(again.weights), state_of(checkpoint.weights))
    assert again.generation_config == {"eos_token_id": [2, 0]}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (folder / name).read_bytes() == (checkpoint.path / name).read_bytes()
    assert again.template is not None
    assert again.template.source == "{{ messages[0].content }}"
    assert sorted(path.name for path in tmp_path.glob("**/*.tmp")) == []


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_it(tmp_path: Path, tied: bool) -> None:
    """Row 131: equal tensors and equal logits from a GGUF file's weights. Cases: W1, W2, W3."""
    config = tiny_config(tie_word_embeddings=tied)
    weights = random_weights(config)
    checkpoint = load_checkpoint(write_gguf(tmp_path / "a.gguf", config, weights))
    save_checkpoint(checkpoint, tmp_path / "a")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "a", dtype="auto")
    assert model.dtype == torch.float32
    for name, weight in weights.items():
        assert np.array_equal(model.state_dict()[name].numpy(), weight), name
    original = write_hf(tmp_path / "b", config, weights)
    reference = LlamaForCausalLM.from_pretrained(original, dtype="auto")
    ids = torch.arange(3, 67)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, reference(ids).logits)


def test_quantized_weights_become_float32(tmp_path: Path) -> None:
    """Which loses nothing; other dtypes are rounded to when they are asked for."""
    config = tiny_config()
    path = write_gguf(tmp_path / "a.gguf", config, random_weights(config), "Q8_0")
    checkpoint = load_checkpoint(path)
    save_checkpoint(checkpoint, tmp_path / "a")
    again = load_checkpoint(tmp_path / "a")
    assert again.config.dtype == "float32"
    assert same(state_of(again.weights), state_of(checkpoint.weights))
    save_checkpoint(checkpoint, tmp_path / "half", dtype="bfloat16")
    halves = state_of(load_checkpoint(tmp_path / "half").weights)
    assert {spec.kind for spec in halves.descriptor} == {"BF16"}


def test_a_folder_with_content_is_left_alone(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = tmp_path / "full"
    folder.mkdir()
    (folder / "mine").write_text("mine", encoding="utf-8")
    for place, why in ((folder, "is not an empty folder"), (folder / "mine", "is not a folder")):
        with pytest.raises(InputError, match=f"exists and {why}: give a new one"):
            save_checkpoint(checkpoint, place)
    assert [path.name for path in folder.iterdir()] == ["mine"]
    (tmp_path / "empty").mkdir()
    save_checkpoint(checkpoint, tmp_path / "empty")
    assert load_checkpoint(tmp_path / "empty").config.vocab_size == 260


def test_a_failure_leaves_nothing(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cases: W12."""

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface, "stream_safetensors", fail)
    before = set(tmp_path.iterdir())
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(checkpoint, tmp_path / "copy")
    assert set(tmp_path.iterdir()) == before


def test_a_failure_names_the_folder(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not the one that is made meanwhile, which is gone when anybody looks for it."""

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("smollm2.files.os.fsync", full)
    with pytest.raises(
        OSError, match=f"No space left on device: '{tmp_path / 'copy'}/config.json'$"
    ):
        save_checkpoint(checkpoint, tmp_path / "copy")
    assert not any(tmp_path.glob(".*"))


def test_weights_must_fit_the_config(checkpoint: Checkpoint, tmp_path: Path) -> None:
    wrong = dataclasses.replace(checkpoint.config, num_hidden_layers=3)
    with pytest.raises(CheckpointError, match="other names or shapes"):
        save_checkpoint(dataclasses.replace(checkpoint, config=wrong), tmp_path / "copy")


def test_another_template_is_kept(checkpoint: Checkpoint, tmp_path: Path) -> None:
    changed = dataclasses.replace(checkpoint, template=ChatTemplate("{{ messages }}"))
    save_checkpoint(changed, tmp_path / "copy")
    template = load_checkpoint(tmp_path / "copy").template
    assert template is not None
    assert template.source == "{{ messages }}"
    config = json.loads((tmp_path / "copy" / "tokenizer_config.json").read_bytes())
    assert config["chat_template"] == "{{ messages[0].content }}"
