"""The real vocabulary, for tests: as a tokenizer, as GGUF metadata, and small ones made up."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from hypothesis import settings

from smollm2.template import SMOLLM2_TEMPLATE
from smollm2.tokenizer import Tokenizer

GOLDEN: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data" / "tokens.json").read_text(encoding="utf-8")
)


unhurried = settings(deadline=None)  # the first example loads the vocabulary


@functools.cache
def golden_tokenizer(shared: Path) -> Tokenizer:
    return Tokenizer.from_file(shared / "golden" / "tokenizer.json")


@functools.cache
def golden_library(shared: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(shared / "golden" / "tokenizer.json"))


@functools.cache
def golden_declaration(shared: Path) -> dict[str, Any]:
    text = (shared / "golden" / "tokenizer.json").read_text(encoding="utf-8")
    declaration: dict[str, Any] = json.loads(text)
    return declaration


def gguf_metadata(shared: Path) -> dict[str, Any]:
    """What a GGUF file of SmolLM2 says about its tokenizer."""
    declaration = golden_declaration(shared)
    vocab = declaration["model"]["vocab"]
    types = np.ones(len(vocab), dtype=np.int32)
    types[[token["id"] for token in declaration["added_tokens"]]] = 3
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": sorted(vocab, key=vocab.__getitem__),
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in declaration["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": SMOLLM2_TEMPLATE,
    }


def small_declaration(**changes: Any) -> dict[str, Any]:
    """A tokenizer.json over all bytes with one merge and one control token."""
    alphabet = [chr(b) for b in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))]
    alphabet += [chr(0x100 + i) for i in range(256 - len(alphabet))]
    vocab = {"<|end|>": 0} | {character: i + 1 for i, character in enumerate(alphabet)}
    vocab["ab"] = len(vocab)
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    declaration = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added(0, "<|end|>")],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": [["a", "b"]]},
    }
    return declaration | changes


def small_model(**changes: Any) -> dict[str, Any]:
    """The model of ``small_declaration``, changed."""
    model: dict[str, Any] = small_declaration()["model"]
    return model | changes


def added(token_id: int, content: str, **changes: Any) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": content, "special": True} | flags | changes
