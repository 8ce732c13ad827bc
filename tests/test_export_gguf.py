"""Export to GGUF: what llama.cpp's converter would have written of the same checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import smollm2
from smollm2.checkpoint import Checkpoint, load_checkpoint, state_of
from smollm2.errors import CheckpointError, InputError, TokenizerError
from smollm2.export import GGUF_QUANTS, export_gguf, export_smol, gguf as module
from smollm2.formats.gguf import GROUPS, open_gguf
from smollm2.quantize import Quantized, as_float32
from smollm2.template import SMOLLM2_TEMPLATE
from tests.fakes import write_byte_tokenizer
from tests.tiny import BFLOAT16, gguf_name, random_weights, tiny_config, write_gguf, write_hf

EMBEDDING = "model.embed_tokens.weight"
SHAPES: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "one kv head": {"num_key_value_heads": 1},
    "own head size": {"head_dim": 32, "num_key_value_heads": 4},
}


def folder(path: Path, dtype: Any = np.float32, **changes: Any) -> Path:
    config = tiny_config(**{"vocab_size": 260, **changes})
    write_hf(path, config, random_weights(config, dtype=dtype))
    write_byte_tokenizer(path, SMOLLM2_TEMPLATE)
    return path


def export(source: Path, out: Path, **options: Any) -> Checkpoint:
    export_gguf(load_checkpoint(source), out, **options)
    return load_checkpoint(out)


def raw_of(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Kind, shape and bytes of each tensor, by the gguf package."""
    return {
        tensor.name: (
            tensor.tensor_type.name,
            tuple(map(int, tensor.shape))[::-1],
            np.asarray(tensor.data).tobytes(),
        )
        for tensor in gguf.GGUFReader(path).tensors
    }


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("quant", ["f32", "f16", "q8_0"])
def test_the_tensors_of_a_converter(tmp_path: Path, changes: dict[str, Any], quant: str) -> None:
    """Names, order of the rows of Q and K, kinds and bytes. Cases: W1, W2, L6."""
    config = tiny_config(vocab_size=260, **changes)
    weights = random_weights(config)
    theirs = write_gguf(tmp_path / "theirs.gguf", config, weights, quant.upper())
    export_gguf(
        load_checkpoint(folder(tmp_path / "hf", **changes)), tmp_path / "x.gguf", quant=quant
    )
    assert raw_of(tmp_path / "x.gguf") == raw_of(theirs)
    assert ("output.weight" in raw_of(tmp_path / "x.gguf")) != config.tie_word_embeddings


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_the_metadata_of_a_converter(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Keys, types and values of what the gguf package's writer makes of the same model."""
    source = folder(tmp_path / "hf", **changes)
    config = tiny_config(vocab_size=260, **changes)
    theirs = write_gguf(
        tmp_path / "theirs.gguf",
        config,
        random_weights(config),
        tokenizer=source / "tokenizer.json",
        metadata={
            "general.type": "model",
            "general.name": "Tiny",
            "general.file_type": int(gguf.LlamaFileType.ALL_F32),
            "general.quantization_version": gguf.GGML_QUANT_VERSION,
            "tokenizer.ggml.add_bos_token": False,
            "tokenizer.ggml.add_space_prefix": False,
            "tokenizer.chat_template": SMOLLM2_TEMPLATE,
        },
    )
    export_gguf(load_checkpoint(source), tmp_path / "x.gguf", name="Tiny")
    ours = gguf.GGUFReader(tmp_path / "x.gguf").fields
    expected = gguf.GGUFReader(theirs).fields
    assert ours.keys() == expected.keys()
    for key, field in expected.items():
        if key == "tokenizer.ggml.pre":  # the tokenizer of bytes does not split at digits
            assert (ours[key].contents(), field.contents()) == ("gpt-2", "smollm")
        elif not key.startswith("GGUF."):
            assert ours[key].types == field.types, key
            assert ours[key].contents() == field.contents(), key


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16])
def test_nothing_is_lost_by_default(tmp_path: Path, changes: dict[str, Any], dtype: Any) -> None:
    """The config, the tokenizer, the template and every value come back. Cases: W1, W2."""
    before = load_checkpoint(folder(tmp_path / "hf", dtype, **changes))
    exported = export_gguf(before, tmp_path / "x.gguf")
    after = load_checkpoint(tmp_path / "x.gguf")
    assert exported.remarks == ()
    assert exported.nbytes == (tmp_path / "x.gguf").stat().st_size
    kind = {np.float32: "F32", np.float16: "F16"}.get(dtype, "BF16")
    assert {size.kind for size in exported.kinds} == {kind, "F32"}
    one, other = state_of(before.weights), state_of(after.weights)
    assert list(one) == list(other)
    assert all(np.array_equal(as_float32(one[name]), as_float32(other[name])) for name in one)
    assert replace(after.config, dtype=None) == replace(before.config, dtype=None)
    assert after.template is not None
    assert after.template.source == SMOLLM2_TEMPLATE
    assert before.tokenizer is not None
    assert after.tokenizer is not None
    for text in ("The 12 seas.\n", "naïve <|im_end|> 🦙"):
        assert after.tokenizer.encode(text) == before.tokenizer.encode(text)
    assert after.tokenizer.special_tokens == before.tokenizer.special_tokens
    assert after.tokenizer.bos_id == before.tokenizer.bos_id


@pytest.mark.parametrize("backend", ["numpy", "native"])
def test_the_same_answers(tmp_path: Path, backend: str) -> None:
    """Greedy ids past 32 positions, where rows in a wrong order show. Cases: W1."""
    source = folder(tmp_path / "hf")
    export_gguf(load_checkpoint(source), tmp_path / "x.gguf")
    options: Any = {"quant": "f32"} if backend == "native" else {}
    answers = [
        smollm2.load(path, backend=backend, **options).generate(
            list(range(3, 60)), max_tokens=24, ignore_eos=True
        )
        for path in (source, tmp_path / "x.gguf")
    ]
    assert answers[0].token_ids == answers[1].token_ids
    scores = [
        smollm2.load(path, backend="numpy").score(list(range(3, 80))).logprobs
        for path in (source, tmp_path / "x.gguf")
    ]
    assert scores[0] == scores[1]


@pytest.mark.parametrize("quant", GGUF_QUANTS)
@pytest.mark.parametrize("tied", [True, False])
def test_each_quant(tmp_path: Path, quant: str, tied: bool) -> None:
    """Bytes of ggml's quantizers; the ends of a 4-bit file are q8_0, norms float32. Cases: L6."""
    config = tiny_config(vocab_size=260, tie_word_embeddings=tied)
    source = load_checkpoint(folder(tmp_path / "hf", tie_word_embeddings=tied))
    export_gguf(source, tmp_path / "x.gguf", quant=quant)
    found = raw_of(tmp_path / "x.gguf")
    for name, array in random_weights(config).items():
        kind, _, raw = found[gguf_name(name)]
        ends = name in (EMBEDDING, "lm_head.weight")
        expected = "q8_0" if ends and quant.startswith("q4") else quant
        assert kind.lower() == ("f32" if array.ndim == 1 else expected), name
        if array.ndim == 2 and not name.split(".")[-2].startswith(("q_", "k_")):
            of = gguf.GGMLQuantizationType[kind]
            assert raw == np.asarray(gguf.quants.quantize(array, of)).tobytes(), name
    file_type = gguf.GGUFReader(tmp_path / "x.gguf").fields["general.file_type"].contents()
    names = {"f32": "ALL_F32"}
    assert file_type == gguf.LlamaFileType[names.get(quant, f"MOSTLY_{quant.upper()}")]


def test_file_types_are_llama_cpps() -> None:
    for kind, number in module._FILE_TYPES.items():
        names = (f"MOSTLY_{kind}", f"MOSTLY_{kind}_M", "ALL_F32")
        assert number in [int(t) for t in gguf.LlamaFileType if t.name in names], kind
    assert set(module._FILE_TYPES) == {"F32", "F16", "BF16", *GROUPS}


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_groups_are_written_as_they_are(tmp_path: Path, kind: str) -> None:
    """Every byte of a quantized file's tensors, by default and where their kind is asked for."""
    config = tiny_config(vocab_size=260, num_key_value_heads=1)
    tokenizer = write_byte_tokenizer(tmp_path / "bytes")
    path = write_gguf(
        tmp_path / "a.gguf", config, random_weights(config), kind, tokenizer=tokenizer
    )
    export_gguf(load_checkpoint(path), tmp_path / "x.gguf")
    assert raw_of(tmp_path / "x.gguf") == raw_of(path)
    if kind.lower() in GGUF_QUANTS:
        export_gguf(load_checkpoint(path), tmp_path / "y.gguf", quant=kind.lower())
        assert (tmp_path / "y.gguf").read_bytes()[:4] == b"GGUF"
        assert raw_of(tmp_path / "y.gguf") == raw_of(path)


def test_no_group_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(vocab_size=260)
    tokenizer = write_byte_tokenizer(tmp_path / "bytes")
    path = write_gguf(
        tmp_path / "a.gguf", config, random_weights(config), "Q8_0", tokenizer=tokenizer
    )

    def refuse(self: Quantized) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(Quantized, "dequantize", refuse)
    export_gguf(load_checkpoint(path), tmp_path / "x.gguf", quant="q8_0")
    with pytest.raises(AssertionError, match="decoded"):
        export_gguf(load_checkpoint(path), tmp_path / "y.gguf", quant="q4_0")


@pytest.mark.parametrize(
    ("packed", "kind"),
    [("q8", "Q8_0"), ("q4", "Q4_0"), ("q4m", "Q4_1"), ("bf16", "BF16"), ("q16", "F32")],
)
def test_smol_files_keep_their_numbers(tmp_path: Path, packed: str, kind: str) -> None:
    """What the package rounded is not rounded again: llama.cpp gets its better scales."""
    export_smol(load_checkpoint(folder(tmp_path / "hf")), tmp_path / "a.smol", quant=packed)
    before = load_checkpoint(tmp_path / "a.smol")
    after = export(tmp_path / "a.smol", tmp_path / "x.gguf")
    one, other = state_of(before.weights), state_of(after.weights)
    assert all(np.array_equal(as_float32(one[name]), as_float32(other[name])) for name in one)
    assert open_gguf(tmp_path / "x.gguf").entries["blk.0.attn_q.weight"].kind == kind


def test_gguf_to_smol_and_back(tmp_path: Path) -> None:
    config = tiny_config(vocab_size=260)
    tokenizer = write_byte_tokenizer(tmp_path / "bytes")
    path = write_gguf(
        tmp_path / "a.gguf", config, random_weights(config), "Q4_1", tokenizer=tokenizer
    )
    export_smol(load_checkpoint(path), tmp_path / "a.smol", stacked=True)
    export_gguf(load_checkpoint(tmp_path / "a.smol"), tmp_path / "x.gguf")
    assert raw_of(tmp_path / "x.gguf") == raw_of(path)


def test_ids_that_end_an_answer(tmp_path: Path) -> None:
    """Of the config, the generation config and the tokenizer; the format has room for three."""
    source = folder(tmp_path / "hf", eos_token_ids=(5, 7))
    (source / "generation_config.json").write_text('{"eos_token_id": [7, 9, 8]}')
    exported = export_gguf(load_checkpoint(source), tmp_path / "x.gguf")
    assert load_checkpoint(tmp_path / "x.gguf").config.eos_token_ids == (5, 7, 8)
    assert exported.remarks == ("GGUF has room for 3 ids that end an answer: left out: 9, 2",)
    (source / "tokenizer_config.json").unlink()
    (source / "generation_config.json").unlink()
    bare = load_checkpoint(source)
    bare = replace(bare, config=replace(bare.config, eos_token_ids=()))
    assert export_gguf(bare, tmp_path / "y.gguf").remarks == (
        "no token is known to end an answer: llama.cpp takes the one with id 11",
    )


def test_the_name_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = folder(tmp_path / "SmolLM2-1.7B")
    monkeypatch.chdir(source)
    assert name_in(export_gguf(load_checkpoint("."), tmp_path / "w.gguf").path) == source.name
    assert name_in(export_gguf(load_checkpoint(source), tmp_path / "x.y.gguf").path) == source.name
    again = load_checkpoint(tmp_path / "x.y.gguf")
    assert name_in(export_gguf(again, tmp_path / "z.gguf").path) == "x.y"
    assert name_in(export_gguf(again, tmp_path / "z.gguf", name="Me", force=True).path) == "Me"


def name_in(path: Path) -> Any:
    return open_gguf(path).metadata["general.name"]


def test_a_file_needs_no_ending(tmp_path: Path) -> None:
    """It is known by its first bytes."""
    source = folder(tmp_path / "hf")
    assert export(source, tmp_path / "model").config.vocab_size == 260


def test_progress(tmp_path: Path) -> None:
    said: list[Any] = []
    source = load_checkpoint(folder(tmp_path / "hf"))
    export_gguf(
        source, tmp_path / "x.gguf", quant="q4_0", progress=lambda *facts: said.append(facts)
    )
    assert [number for _, number, _ in said] == list(range(1, 21))
    assert {count for _, _, count in said} == {20}
    assert (said[0][0].name, said[0][0].kind) == ("token_embd.weight", "Q8_0")
    assert sum(tensor.nbytes for tensor, _, _ in said) < (tmp_path / "x.gguf").stat().st_size


def test_what_is_refused(tmp_path: Path) -> None:
    """One line each, and no file. Cases: W12."""
    source = load_checkpoint(folder(tmp_path / "hf"))
    (tmp_path / "mine.gguf").write_text("mine")
    refused: list[tuple[type[Exception], str, Checkpoint, str, dict[str, Any]]] = [
        (
            InputError,
            "quant is 'q8': it must be one of f32, f16, bf16",
            source,
            "x",
            {"quant": "q8"},
        ),
        (InputError, "exists: give another name, or --force", source, "mine.gguf", {}),
        (InputError, "hf: is a folder", source, "hf", {}),
        (InputError, r"give one that ends in \.gguf", source, "x.smol", {}),
        (
            TokenizerError,
            "has no tokenizer, without which llama.cpp opens no GGUF file: put its tokenizer.json",
            replace(source, tokenizer=None),
            "x.gguf",
            {},
        ),
        (
            CheckpointError,
            "other names or shapes",
            replace(source, config=replace(source.config, num_hidden_layers=3)),
            "x.gguf",
            {},
        ),
    ]
    for error, message, checkpoint, name, options in refused:
        with pytest.raises(error, match=message) as caught:
            export_gguf(checkpoint, tmp_path / name, **options)
        assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "mine.gguf"]
    assert (tmp_path / "mine.gguf").read_text() == "mine"


def test_a_tokenizer_that_gguf_cannot_say(tmp_path: Path) -> None:
    source = folder(tmp_path / "hf")
    declaration = (source / "tokenizer.json").read_text(encoding="utf-8")
    changed = declaration.replace('"normalizer": null', '"normalizer": {"type": "NFC"}')
    (source / "tokenizer.json").write_text(changed, encoding="utf-8")
    with pytest.raises(TokenizerError, match="hf: the tokenizer has a normalizer, which GGUF"):
        export_gguf(load_checkpoint(source), tmp_path / "x.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_weights_that_a_kind_does_not_hold(tmp_path: Path) -> None:
    config = tiny_config(vocab_size=260)
    weights = random_weights(config)
    write_byte_tokenizer(tmp_path / "hf")
    weights.blocks[0].mlp.up[0, 0] = 1e6
    large = load_checkpoint(write_hf(tmp_path / "hf", config, weights))
    with pytest.raises(InputError, match=r"blk\.0\.ffn_up\.weight: .*up to 1e\+06 .* for F16"):
        export_gguf(large, tmp_path / "x.gguf", quant="f16")
    export_gguf(large, tmp_path / "ok.gguf", quant="bf16")
    weights.blocks[0].mlp.up[0, 0] = np.nan
    broken = load_checkpoint(write_hf(tmp_path / "nan", config, weights))
    broken = replace(broken, tokenizer=large.tokenizer)
    with pytest.raises(InputError, match="NaN or infinity cannot be rounded to Q4_0"):
        export_gguf(broken, tmp_path / "x.gguf", quant="q4_0")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "nan", "ok.gguf"]


def test_double_precision_needs_a_quant(tmp_path: Path) -> None:
    source = load_checkpoint(folder(tmp_path / "hf", np.float64))
    with pytest.raises(InputError, match=r"is F64, which llama\.cpp does not compute"):
        export_gguf(source, tmp_path / "x.gguf")
    assert export_gguf(source, tmp_path / "x.gguf", quant="f32").nbytes > 0


def test_rows_that_are_not_whole_groups(tmp_path: Path) -> None:
    config = {"hidden_size": 48, "num_attention_heads": 4, "head_dim": 12}
    source = load_checkpoint(folder(tmp_path / "hf", **config))
    with pytest.raises(InputError, match="rows of 48, but q8_0 needs a multiple of 32: choose f32"):
        export_gguf(source, tmp_path / "x.gguf", quant="q8_0")
    export_gguf(source, tmp_path / "x.gguf", quant="bf16")


def test_tensors_are_made_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes, whatever the number of rows at a time."""
    source = load_checkpoint(folder(tmp_path / "hf", BFLOAT16))
    files = []
    for rows in (1, 7, 10**6):
        monkeypatch.setattr(module, "_CHUNK", rows * 64)
        path = export_gguf(source, tmp_path / f"{rows}.gguf", quant="q4_1", name="x").path
        files.append(path.read_bytes())
    assert files[0] == files[1] == files[2]
