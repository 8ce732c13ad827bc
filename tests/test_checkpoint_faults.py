"""Each fault of a checkpoint is one clear error, raised before any tensor is read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from smollm2.checkpoint import load_checkpoint
from smollm2.errors import (
    CheckpointError,
    ConfigError,
    FormatError,
    ModelNotFoundError,
    SmolLM2Error,
)
from smollm2.formats.tensorfile import TensorFile
from smollm2.state import Mismatch, NameMapping
from tests.fakes import write_byte_tokenizer
from tests.tiny import BFLOAT16, random_weights, tiny_config, write_gguf, write_hf

QUERY = "model.layers.0.self_attn.q_proj.weight"
NORM = "model.norm.weight"
EXTRA = "model.layers.0.self_attn.q_proj.bias"


@pytest.fixture
def no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where a tensor's bytes are asked for."""

    def read(*_: Any) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(TensorFile, "raw", read)
    monkeypatch.setattr(TensorFile, "array", read)


def faulty(folder: Path, **changes: Any) -> Path:
    config = tiny_config()
    return write_hf(folder, config, random_weights(config, dtype=BFLOAT16), **changes)


@pytest.mark.usefixtures("no_reading")
def test_everything_that_does_not_fit_is_one_error(tmp_path: Path) -> None:
    """Rows 110, 139, 141."""
    extra = {
        EXTRA: np.zeros(64, dtype=BFLOAT16),
        QUERY: np.zeros((64, 32), dtype=np.float32),
        NORM: np.zeros(64, dtype=np.float32),
    }
    gone = "model.layers.1.mlp.up_proj.weight"
    faulty(tmp_path, extra=extra, omit=(gone, "model.layers.1.mlp.gate_proj.weight"))
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: missing: model.layers.1.mlp.gate_proj.weight, {gone}; "
        f"unexpected: {EXTRA}; "
        f"shape mismatches: {QUERY} (expected [64, 64], got [64, 32]); "
        f"dtype mismatches: {NORM} (expected BF16, got F32)"
    )
    with pytest.raises(CheckpointError, match=r"missing: [^;]*; shape mismatches: [^;]*$"):
        load_checkpoint(tmp_path, strict=False)


def test_lenient_loads_what_matches_and_reports_the_rest(tmp_path: Path) -> None:
    """Row 140."""
    norm = np.full(64, 2, dtype=np.float32)
    faulty(tmp_path, extra={EXTRA: np.zeros(64, dtype=BFLOAT16), NORM: norm})
    with pytest.raises(CheckpointError, match=r"unexpected: .*; dtype mismatches: "):
        load_checkpoint(tmp_path)
    checkpoint = load_checkpoint(tmp_path, strict=False)
    report = checkpoint.report
    assert report.unexpected == (EXTRA,)
    assert report.dtype_mismatches == (Mismatch(NORM, "BF16", "F32"),)
    assert report.loaded == tuple(checkpoint.config.shapes)
    assert np.array_equal(checkpoint.weights.final_norm, norm)
    assert checkpoint.weights.final_norm.dtype == np.float32


@pytest.mark.usefixtures("no_reading")
@pytest.mark.parametrize("name", [NORM, "model.embed_tokens.weight"])
def test_integers_are_never_weights(tmp_path: Path, name: str) -> None:
    """Row 139."""
    shape = tiny_config().shapes[name]
    faulty(tmp_path, extra={name: np.zeros(shape, dtype=np.int32)})
    for strict in (True, False):
        with pytest.raises(CheckpointError, match=f"dtype mismatches: {name} .*got I32"):
            load_checkpoint(tmp_path, strict=strict)


@pytest.mark.usefixtures("no_reading")
@pytest.mark.parametrize("omit", [("model.embed_tokens.weight",), tuple(tiny_config().shapes)])
def test_missing_tensors(tmp_path: Path, omit: tuple[str, ...]) -> None:
    """Cases: W7."""
    faulty(tmp_path, omit=omit)
    for strict in (True, False):
        with pytest.raises(CheckpointError, match=f"missing: {omit[0]}"):
            load_checkpoint(tmp_path, strict=strict)


def test_an_untied_model_needs_its_head(tmp_path: Path) -> None:
    config = tiny_config(tie_word_embeddings=False)
    write_hf(tmp_path, config, random_weights(config), omit=("lm_head.weight",))
    with pytest.raises(CheckpointError, match=r"missing: lm_head\.weight$"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("fault", ["values", "dtype", "shape"])
def test_a_stored_head_that_differs_from_the_tied_one(tmp_path: Path, fault: str) -> None:
    """Cases: W5."""
    head = np.array(random_weights(tiny_config(), dtype=BFLOAT16).token_embedding)
    if fault == "values":
        head[-1, -1] += 1
    head = {"values": head, "dtype": head.astype(np.float32), "shape": head[1:]}[fault]
    faulty(tmp_path, extra={"lm_head.weight": head.copy()})
    for strict in (True, False):
        with pytest.raises(CheckpointError, match=r"lm_head\.weight differs .* set it to false"):
            load_checkpoint(tmp_path, strict=strict)


def test_two_tensors_for_one_name(tmp_path: Path) -> None:
    """Row 142."""
    faulty(tmp_path, extra={EXTRA: np.zeros(64, dtype=BFLOAT16)})
    with pytest.raises(CheckpointError, match="are both mapped to"):
        load_checkpoint(tmp_path, mapping=NameMapping(rename={EXTRA: QUERY}))


def write_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))), encoding="utf-8")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def write_index(folder: Path, shard: str) -> None:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {NORM: shard}}), encoding="utf-8")


FOLDER_FAULTS: dict[str, tuple[Callable[[Path], Any], type[SmolLM2Error], str]] = {
    "truncated": (lambda p: cut(p / "model.safetensors"), FormatError, "cut short"),
    "empty file": (lambda p: (p / "model.safetensors").write_bytes(b""), FormatError, "empty"),
    "both": (lambda p: write_index(p, "a"), CheckpointError, "keep one of them"),
    "neither": (lambda p: (p / "model.safetensors").unlink(), ModelNotFoundError, "holds no"),
    "no config": (
        lambda p: (p / "config.json").unlink(),
        FormatError,
        "no such file: copy that of",
    ),
    "config a list": (lambda p: write_config(p, lambda c: [c]), FormatError, "object"),
    "config of another model": (
        lambda p: write_config(p, lambda c: {**c, "model_type": "gpt2"}),
        ConfigError,
        "model_type is 'gpt2'",
    ),
    "config with a text": (
        lambda p: write_config(p, lambda c: {**c, "num_hidden_layers": "2"}),
        ConfigError,
        "must be an integer",
    ),
    "config of more layers": (
        lambda p: write_config(p, lambda c: {**c, "num_hidden_layers": 1000}),
        CheckpointError,
        "and 8962 more",
    ),
    "generation config": (
        lambda p: (p / "generation_config.json").write_text("[]"),
        FormatError,
        "object",
    ),
    "tokenizer": (
        lambda p: (p / "tokenizer.json").write_text("{"),
        FormatError,
        "not JSON",
    ),
    "tokenizer too large": (
        write_byte_tokenizer,
        CheckpointError,
        "the tokenizer has 260 tokens, but vocab_size is 96",
    ),
}


@pytest.mark.parametrize("fault", FOLDER_FAULTS)
def test_a_faulty_folder(tmp_path: Path, fault: str) -> None:
    """Rows 135, 136. Cases: W11, W12."""
    break_it, error, message = FOLDER_FAULTS[fault]
    faulty(tmp_path)
    break_it(tmp_path)
    with pytest.raises(error, match=re.escape(message)) as caught:
        load_checkpoint(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_shard(tmp_path: Path) -> None:
    """Cases: W7."""
    faulty(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    write_index(tmp_path, "model-00001-of-00002.safetensors")
    with pytest.raises(FormatError, match="model-00001-of-00002"):
        load_checkpoint(tmp_path)


def test_paths_that_hold_no_checkpoint(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path / "none.gguf"):
        with pytest.raises(ModelNotFoundError, match="no such folder or file"):
            load_checkpoint(path)
    with pytest.raises(ModelNotFoundError, match=r"holds no model\.safetensors"):
        load_checkpoint(tmp_path)
    faulty(tmp_path)
    with pytest.raises(ModelNotFoundError, match=r"give a \.gguf or \.smol file, or"):
        load_checkpoint(tmp_path / "model.safetensors")


def test_two_gguf_files_in_a_folder(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=r"give one of a\.gguf, b\.gguf"):
        load_checkpoint(tmp_path)


@pytest.mark.usefixtures("no_reading")
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"extra": {"blk.0.attn_q.bias": np.ones(64)}},
            CheckpointError,
            "unexpected: blk.0.attn_q",
        ),
        ({"metadata": {"llama.block_count": 3}}, CheckpointError, "missing: model.layers.2."),
        ({"metadata": {"llama.vocab_size": 97}}, CheckpointError, "expected [97, 64]"),
        ({"metadata": {"llama.context_length": None}}, ConfigError, "context_length is missing"),
        ({"metadata": {"llama.expert_count": 8}}, ConfigError, "llama.expert_count is 8"),
        ({"metadata": {"split.count": 2}}, CheckpointError, "one part of 2"),
    ],
)
def test_a_faulty_gguf(
    tmp_path: Path, changes: dict[str, Any], error: type[SmolLM2Error], message: str
) -> None:
    """Row 139."""
    config = tiny_config()
    path = write_gguf(tmp_path / "a.gguf", config, random_weights(config), **changes)
    with pytest.raises(error, match=re.escape(message)) as caught:
        load_checkpoint(path)
    assert str(path) in str(caught.value)


def test_gguf_of_another_architecture(tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "qwen2")
    writer.add_tensor("a", np.ones(32, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"a\.gguf: general\.architecture is 'qwen2'"):
        load_checkpoint(tmp_path)


def test_rope_factors_must_be_ones(tmp_path: Path) -> None:
    """Cases: W4."""
    config, weights = tiny_config(), random_weights(tiny_config())
    ones = {"rope_freqs.weight": np.ones(8), "blk.0.attn_rot_embd.weight": np.ones(8)}
    plain = write_gguf(tmp_path / "plain.gguf", config, weights, extra=ones)
    assert set(load_checkpoint(plain).report.ignored) == set(ones)
    scaled = {"rope_freqs.weight": np.linspace(1, 8, 8)}
    path = write_gguf(tmp_path / "scaled.gguf", config, weights, extra=scaled)
    for strict in (True, False):
        with pytest.raises(CheckpointError, match=r"rope_freqs\.weight scales RoPE"):
            load_checkpoint(path, strict=strict)


@settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.integers(0, 4095), st.binary(min_size=1, max_size=8), st.booleans(), st.data())
def test_broken_bytes_give_errors_of_ours(
    tmp_path: Path, where: int, what: bytes, is_gguf: bool, data: st.DataObject
) -> None:
    """Whatever is overwritten or cut, no other exception leaks. Cases: W11."""
    path = tmp_path / ("a.gguf" if is_gguf else "model.safetensors")
    config = tiny_config(num_hidden_layers=1)
    keep = tmp_path / f"{path.name}.good"
    if not keep.exists():
        weights = random_weights(config)
        _ = write_gguf(path, config, weights) if is_gguf else write_hf(tmp_path, config, weights)
        keep.write_bytes(path.read_bytes())
    good = keep.read_bytes()
    broken = good[:where] + what + good[where + len(what) :]
    cut_at = data.draw(st.none() | st.integers(0, len(broken)))
    path.write_bytes(broken[:cut_at])
    message = ""
    try:
        load_checkpoint(path if is_gguf else tmp_path)
    except SmolLM2Error as error:
        message = str(error)
    assert "\n" not in message
