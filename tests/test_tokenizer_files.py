"""Tokenizers from files, folders and GGUF metadata, and back to files."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from smollm2.errors import FormatError, TokenizerError
from smollm2.template import SMOLLM2_TEMPLATE
from smollm2.tokenizer import Tokenizer
from smollm2.tokenizer.declaration import declared_by_gguf
from tests.fakes import write_byte_tokenizer
from tests.vocabulary import (
    GOLDEN,
    added,
    gguf_metadata,
    golden_tokenizer,
    small_declaration,
    small_model,
)


def write(folder: Path, **files: Any) -> Path:
    for stem, value in files.items():
        text = value if isinstance(value, str) else json.dumps(value)
        name = "chat_template.jinja" if stem == "chat_template" else f"{stem}.json"
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def test_a_tokenizer_json_is_enough(tmp_path: Path) -> None:
    # cases: W15
    tokenizer = Tokenizer.from_folder(write(tmp_path, tokenizer=small_declaration()))
    assert tokenizer.encode("ab") == [257]
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (None, None, None)
    assert tokenizer.chat_template is None


@pytest.mark.parametrize("token", ["<|end|>", {"content": "<|end|>", "lstrip": False}])
def test_named_tokens(tmp_path: Path, token: Any) -> None:
    write(
        tmp_path,
        tokenizer=small_declaration(),
        tokenizer_config={"eos_token": token, "pad_token": None, "add_bos_token": True},
        special_tokens_map={"eos_token": "a", "pad_token": token, "bos_token": "b"},
    )
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.token_bytes(tokenizer.bos_id or 0)) == (
        0,
        0,
        b"b",
    )
    assert tokenizer.encode("ab") == [257]  # add_bos_token adds nothing


def test_a_named_token_must_exist(tmp_path: Path) -> None:
    write(tmp_path, tokenizer=small_declaration(), tokenizer_config={"eos_token": "<gone>"})
    with pytest.raises(TokenizerError, match="eos token '<gone>' is not in the vocabulary"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        ("one", "one"),
        ([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], "d"),
        ([{"name": "tool_use", "template": "t"}], None),
        (None, None),
    ],
)
def test_the_chat_template(tmp_path: Path, declared: Any, expected: str | None) -> None:
    config = {"chat_template": declared}
    write(tmp_path, tokenizer=small_declaration(), tokenizer_config=config)
    assert Tokenizer.from_folder(tmp_path).chat_template == expected
    write(tmp_path, chat_template="{# a file wins #}")
    assert Tokenizer.from_folder(tmp_path).chat_template == "{# a file wins #}"


@pytest.mark.parametrize("declared", [3, {"name": "default"}, [{"name": "default", "template": 1}]])
def test_a_chat_template_is_a_text(tmp_path: Path, declared: Any) -> None:
    config = {"chat_template": declared}
    write(tmp_path, tokenizer=small_declaration(), tokenizer_config=config)
    with pytest.raises(TokenizerError, match="chat_template is not a string"):
        Tokenizer.from_folder(tmp_path)


def test_both_styles_of_merges(shared: Path) -> None:
    # cases: T6
    declaration = json.loads(golden_tokenizer(shared).to_json())
    pairs = declaration["model"]["merges"]
    assert isinstance(pairs[0], list)
    declaration["model"]["merges"] = [" ".join(pair) for pair in pairs]
    tokenizer = Tokenizer(declaration, source="made up")
    assert all(tokenizer.encode(case["text"]) == case["ids"] for case in GOLDEN)
    declaration["model"]["merges"][::2] = pairs[::2]
    mixed = Tokenizer(declaration, source="made up")
    assert mixed.encode("1 plus 1") == tokenizer.encode("1 plus 1")


def test_what_is_for_training_is_switched_off() -> None:
    # cases: table 32
    tokenizer = Tokenizer(
        small_declaration(
            truncation={
                "direction": "Right",
                "max_length": 2,
                "strategy": "LongestFirst",
                "stride": 0,
            },
            padding={
                "strategy": {"Fixed": 8},
                "direction": "Right",
                "pad_to_multiple_of": None,
                "pad_id": 0,
                "pad_type_id": 0,
                "pad_token": "<|end|>",
            },
            post_processor={
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<|end|>", "type_id": 0}}],
                "pair": [],
                "special_tokens": {"<|end|>": {"id": "<|end|>", "ids": [0], "tokens": ["<|end|>"]}},
            },
        ),
        source="made up",
    )
    assert len(tokenizer.encode("xyz")) == 3
    assert len(tokenizer.encode("xyz", allow_special=True)) == 3


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model is None"),
    ({"model": {"type": "WordPiece"}}, "model is 'WordPiece'"),
    ({"model": small_model(merges=[])}, "merges is missing or empty"),
    ({"model": small_model(merges=None)}, "merges is missing or empty"),
    ({"model": small_model(merges=[["a", "b", "c"]])}, "merge 0 is not a pair"),
    ({"model": small_model(merges=["ab"])}, "merge 0 is not a pair"),
    ({"model": small_model(merges=[5])}, "merge 0 is not a pair"),
    ({"model": small_model(merges=[["a", "nowhere"]])}, "nowhere"),
    ({"model": small_model(merges=[[1, 2]])}, "merge 0 is not a pair"),
    ({"model": small_model(vocab={})}, "vocab is missing or empty"),
    ({"model": small_model(vocab=["a"])}, "vocab is missing or empty"),
    ({"model": small_model(vocab={"a": "1"})}, "not a whole number"),
    ({"model": small_model(vocab={"a": -1})}, "not a whole number"),
    ({"model": small_model(vocab={"a": 2**40, "b": 1, "ab": 2})}, "made up"),
    ({"model": small_model(vocab={"a": 0, "b": 0})}, "two tokens the same id"),
    ({"model": small_model(dropout=0.1)}, "dropout"),
    ({"model": small_model(unk_token=["a"])}, "made up"),
    ({"decoder": None}, "decoder is None"),
    ({"decoder": {"type": "WordPiece"}}, "decoder is 'WordPiece'"),
    ({"decoder": [1]}, "decoder is"),
    ({"pre_tokenizer": {"type": "Nonsense"}}, "made up"),
    ({"normalizer": 3}, "made up"),
    ({"added_tokens": [{}]}, "added_tokens.0. needs a text"),
    ({"added_tokens": [{"id": "x", "content": "y"}]}, "no usable content or id"),
    ({"added_tokens": [added(0, "")]}, "no usable content or id"),
    ({"added_tokens": ["x"]}, "added_tokens.0. needs a text"),
    ({"added_tokens": [added(0, "<|end|>"), added(0, "b")]}, "two added tokens have the id 0"),
    ({"added_tokens": [added(9, "<|end|>")]}, "has id 9, but its place in the vocabulary is 0"),
    ({"added_tokens": [added(9000, "<new>")]}, "has id 9000, but its place in the vocabulary"),
]


@pytest.mark.parametrize(("change", "message"), BROKEN)
def test_broken_declarations(change: dict[str, Any], message: str) -> None:
    # cases: T6, T16
    with pytest.raises(TokenizerError, match=message):
        Tokenizer(small_declaration(**change), source="made up")


def test_files_that_are_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    with pytest.raises(FormatError, match="nowhere"):
        Tokenizer.from_file(tmp_path / "nowhere")
    write(tmp_path, tokenizer="not json")
    with pytest.raises(FormatError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    write(tmp_path, tokenizer=small_declaration())
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(FormatError, match=r"chat_template\.jinja: not UTF-8 at byte 0"):
        Tokenizer.from_folder(tmp_path)


GGUF_FAULTS: list[tuple[str, Any, str]] = [
    ("tokenizer.ggml.model", "llama", "model is 'llama'"),
    ("tokenizer.ggml.pre", "llama-bpe", "pre is 'llama-bpe': supported are smollm"),
    ("tokenizer.ggml.pre", None, "pre is None"),
    ("tokenizer.ggml.tokens", [], "tokens is missing"),
    ("tokenizer.ggml.tokens", ["a", "a"], "lists 'a' twice"),
    ("tokenizer.ggml.merges", None, "merges is missing"),
    ("tokenizer.ggml.token_type", None, "token_type is missing"),
    ("tokenizer.ggml.token_type", np.ones(5, dtype=np.int32), "token_type is missing"),
    ("tokenizer.ggml.token_type", ["a"], "token_type is missing"),
    ("tokenizer.ggml.eos_token_id", 49152, "eos token 49152 is not in the vocabulary"),
    ("tokenizer.ggml.bos_token_id", -1, "bos token -1 is not in the vocabulary"),
    ("tokenizer.ggml.bos_token_id", True, "bos token True is not in the vocabulary"),
    ("tokenizer.chat_template", 5, "chat_template is not a string"),
]


@pytest.mark.parametrize(("key", "value", "message"), GGUF_FAULTS)
def test_gguf_metadata_that_is_not_ours(shared: Path, key: str, value: Any, message: str) -> None:
    # cases: T4, T5
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_gguf(gguf_metadata(shared) | {key: value})


def test_gguf_metadata_declares_what_the_file_does(shared: Path) -> None:
    # cases: T5
    declared = declared_by_gguf(gguf_metadata(shared))
    original = json.loads(golden_tokenizer(shared).to_json())
    assert declared["added_tokens"] == original["added_tokens"]
    assert declared["model"]["vocab"] == original["model"]["vocab"]
    assert declared["pre_tokenizer"] == original["pre_tokenizer"]


@pytest.mark.parametrize("pre", ["gpt-2", "default"])
def test_gpt2_does_not_split_digits(shared: Path, pre: str) -> None:
    tokenizer = Tokenizer.from_gguf(gguf_metadata(shared) | {"tokenizer.ggml.pre": pre})
    assert tokenizer.encode("a  1") == [81, 216, 216, 33]


def test_user_defined_tokens_of_gguf(shared: Path) -> None:
    metadata = gguf_metadata(shared)
    metadata["tokenizer.ggml.token_type"][3] = 4
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.encode("<repo_name>") == [3]
    assert not tokenizer.is_special(3)


def test_gguf_metadata_is_read_quickly(shared: Path) -> None:
    metadata = gguf_metadata(shared)
    taken = []
    for _ in range(3):
        start = time.perf_counter()
        Tokenizer.from_gguf(metadata)
        taken.append(time.perf_counter() - start)
    assert min(taken) < 1.0  # about 0.1 s; 1 s leaves room for a busy machine


def test_saving_is_byte_exact(tmp_path: Path) -> None:
    source, copy = tmp_path / "source", tmp_path / "new" / "copy"
    source.mkdir()
    write(
        source,
        tokenizer=json.dumps(small_declaration(), indent=7),
        tokenizer_config='{"eos_token":   "<|end|>", "unknown": [1]}\n\n',
        special_tokens_map="{ }",
        chat_template="a\n\n",
    )
    Tokenizer.from_folder(source).save(copy)
    assert {p.name: p.read_bytes() for p in copy.iterdir()} == {
        p.name: p.read_bytes() for p in source.iterdir()
    }
    Tokenizer.from_folder(copy).save(copy)  # onto itself


def test_saving_a_file_alone_adds_the_rest(tmp_path: Path) -> None:
    write(tmp_path, tokenizer=small_declaration())
    before = (tmp_path / "tokenizer.json").read_bytes()
    Tokenizer.from_file(tmp_path / "tokenizer.json").save(tmp_path / "copy")
    assert (tmp_path / "copy" / "tokenizer.json").read_bytes() == before
    assert (tmp_path / "copy" / "tokenizer_config.json").is_file()


def test_from_gguf_to_a_folder_that_others_read(shared: Path, tmp_path: Path) -> None:
    # cases: T1, T6
    tokenizer = Tokenizer.from_gguf(gguf_metadata(shared))
    tokenizer.save(tmp_path)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    again = Tokenizer.from_folder(tmp_path)
    for case in GOLDEN:
        assert library.encode(case["text"], add_special_tokens=False).ids == case["ids"]
        assert again.encode(case["text"]) == case["ids"]
    assert (again.bos_id, again.eos_id, again.pad_id) == (1, 2, 2)
    assert again.chat_template == SMOLLM2_TEMPLATE
    assert again.special_tokens == tokenizer.special_tokens
    assert tokenizer.to_json() == (tmp_path / "tokenizer.json").read_text(encoding="utf-8")


def test_transformers_reads_the_saved_folder(shared: Path, tmp_path: Path) -> None:
    # cases: T1, T15
    transformers = pytest.importorskip("transformers")
    Tokenizer.from_gguf(gguf_metadata(shared)).save(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert all(theirs(case["text"])["input_ids"] == case["ids"] for case in GOLDEN)
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (1, 2, 2)
    chosen = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert chosen("a  1")["input_ids"] == [81, 256, 33]
    ids = theirs.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_dict=False
    )
    assert ids[:2] == [1, 9690]
    assert len(ids) == 31


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"added_tokens": 1}, "added_tokens is not a list"),
        ({"added_tokens": True}, "added_tokens is not a list"),
        ({"model": {"continuing_subword_prefix": "<|im_end|>"}}, "has no place in byte-level"),
        ({"model": {"end_of_word_suffix": "</w>"}}, "has no place in byte-level"),
        ({"model": {"vocab": {"a": 2**64}}}, "an id that is not a whole number"),
    ],
)
def test_hostile_declarations(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    """cases: X11; each is one line, also where the library would panic"""
    path = write_byte_tokenizer(tmp_path)
    value = json.loads(path.read_text(encoding="utf-8"))
    model = {**value["model"], **change.get("model", {})}
    path.write_text(json.dumps({**value, **change, "model": model}), encoding="utf-8")
    with pytest.raises(TokenizerError, match=message) as caught:
        Tokenizer.from_folder(tmp_path)
    assert "\n" not in str(caught.value)
