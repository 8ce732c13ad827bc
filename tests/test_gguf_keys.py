"""The keys of a GGUF file that say what a tokenizer.json declares; cases: T11."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from smollm2.errors import TokenizerError
from smollm2.tokenizer import Tokenizer
from smollm2.tokenizer.gguf_keys import gguf_vocabulary
from tests.fakes import SPECIALS, byte_alphabet, byte_tokenizer, write_byte_tokenizer
from tests.vocabulary import GOLDEN, gguf_metadata, golden_tokenizer

Change = Callable[[dict[str, Any]], object]


def changed(folder: Path, change: Change) -> Tokenizer:
    """The tokenizer of bytes with something else in its tokenizer.json."""
    path = write_byte_tokenizer(folder)
    declaration = json.loads(path.read_text(encoding="utf-8"))
    change(declaration)
    path.write_text(json.dumps(declaration), encoding="utf-8")
    return Tokenizer.from_folder(folder)


def test_the_real_vocabulary(shared: Path) -> None:
    """Equal to what a GGUF file of SmolLM2 has; the golden ids are those of the keys."""
    tokenizer = golden_tokenizer(shared)
    keys = gguf_vocabulary(tokenizer, 49152)
    expected = gguf_metadata(shared)
    for name in ("model", "pre", "tokens", "merges"):
        assert keys[f"tokenizer.ggml.{name}"] == expected[f"tokenizer.ggml.{name}"], name
    types = keys["tokenizer.ggml.token_type"]
    assert types.dtype == np.int32
    assert np.array_equal(types, expected["tokenizer.ggml.token_type"])
    assert keys["tokenizer.ggml.add_bos_token"] is False
    again = Tokenizer.from_gguf(keys)
    for case in GOLDEN:
        assert again.encode(case["text"]) == case["ids"], case["text"]
    assert again.special_tokens == tokenizer.special_tokens


def test_the_keys_of_the_real_file_come_back(real_gguf: Path) -> None:
    from smollm2.formats.gguf import open_gguf

    metadata = open_gguf(real_gguf).metadata
    keys = gguf_vocabulary(Tokenizer.from_gguf(metadata), 49152)
    for key, value in keys.items():
        assert np.array_equal(metadata[key], value), key


@settings(deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_has_the_same_ids(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    tokenizer = byte_tokenizer(tmp_path_factory.getbasetemp() / "bytes")
    again = Tokenizer.from_gguf(gguf_vocabulary(tokenizer, 260))
    for allow in (True, False):
        ids = tokenizer.encode(text + SPECIALS[2], allow_special=allow)
        assert again.encode(text + SPECIALS[2], allow_special=allow) == ids


def test_tokens_are_bytes_and_not_decoded(tmp_path: Path) -> None:
    """cases: T11: half a character stays what it is"""
    tokens = gguf_vocabulary(byte_tokenizer(tmp_path), 260)["tokenizer.ggml.tokens"]
    assert tokens == [*SPECIALS, *byte_alphabet(), "th"]


def test_ids_without_a_token_get_an_unused_one(tmp_path: Path) -> None:
    keys = gguf_vocabulary(byte_tokenizer(tmp_path), 263)
    assert keys["tokenizer.ggml.tokens"][260:] == ["[PAD260]", "[PAD261]", "[PAD262]"]
    assert keys["tokenizer.ggml.token_type"].tolist() == [3] * 3 + [1] * 257 + [5] * 3
    assert Tokenizer.from_gguf(keys).encode("the [PAD261]")[:2] == [259, 3 + ord("e")]


def test_added_tokens_that_are_not_special(tmp_path: Path) -> None:
    def add(declaration: dict[str, Any]) -> None:
        added = {**declaration["added_tokens"][0], "id": 260, "content": "<x>", "special": False}
        declaration["added_tokens"].append(added)

    tokenizer = changed(tmp_path, add)
    keys = gguf_vocabulary(tokenizer, 261)
    assert keys["tokenizer.ggml.tokens"][260] == "<x>"
    assert keys["tokenizer.ggml.token_type"][260] == 4
    assert Tokenizer.from_gguf(keys).encode("a<x>") == tokenizer.encode("a<x>") == [3 + 97, 260]


def test_merges_of_either_style(tmp_path: Path) -> None:
    pairs = gguf_vocabulary(byte_tokenizer(tmp_path / "a"), 260)
    texts = changed(tmp_path / "b", lambda d: d["model"].update(merges=["t h"]))
    assert pairs["tokenizer.ggml.merges"] == ["t h"]
    assert gguf_vocabulary(texts, 260)["tokenizer.ggml.merges"] == ["t h"]


DIGITS = {"type": "Digits", "individual_digits": True}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}


@pytest.mark.parametrize(
    ("pre_tokenizer", "name"),
    [
        (BYTES, "gpt-2"),
        ({**BYTES, "use_regex": True}, "gpt-2"),
        ({"type": "Sequence", "pretokenizers": [DIGITS, BYTES]}, "smollm"),
    ],
)
def test_names_of_pre_tokenizers(tmp_path: Path, pre_tokenizer: Any, name: str) -> None:
    """What does not change the split makes no difference."""
    tokenizer = changed(tmp_path, lambda d: d.update(pre_tokenizer=pre_tokenizer))
    keys = gguf_vocabulary(tokenizer, 260)
    assert keys["tokenizer.ggml.pre"] == name
    again = Tokenizer.from_gguf(keys)
    for text in ("in 2023, the\n\n  7", "  x"):
        assert again.encode(text) == tokenizer.encode(text)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda d: d.update(pre_tokenizer={**BYTES, "add_prefix_space": True}),
            "pre_tokenizer 'ByteLevel' has no name in GGUF that is known: known are smollm",
        ),
        (
            lambda d: d.update(pre_tokenizer={**BYTES, "use_regex": False}),
            "pre_tokenizer 'ByteLevel' has no name",
        ),
        (
            lambda d: d["pre_tokenizer"].update(type="Whitespace"),
            "pre_tokenizer 'Whitespace' has no name",
        ),
        (lambda d: d.update(pre_tokenizer=None), "pre_tokenizer None has no name"),
        (lambda d: d.update(normalizer={"type": "NFC"}), "has a normalizer, which GGUF cannot say"),
        (lambda d: d["model"].update(ignore_merges=True), "has ignore_merges, which GGUF cannot"),
        (lambda d: d["added_tokens"][0].update(lstrip=True), "is lstrip, which GGUF cannot say"),
        (
            lambda d: d["added_tokens"][1].update(single_word=True),
            "added token '<|im_start|>' is single_word, which GGUF",
        ),
    ],
)
def test_what_gguf_cannot_say(tmp_path: Path, change: Change, text: str) -> None:
    """cases: another split gives other ids, and the text only gets a little worse"""
    tokenizer = changed(tmp_path, change)
    with pytest.raises(TokenizerError) as caught:
        gguf_vocabulary(tokenizer, 260)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
