"""GGUF keys: the ``tokenizer.ggml.*`` metadata that say what a tokenizer.json declares.

The inverse of ``declaration.declared_by_gguf``. What GGUF has no key for is an error where it
would change ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from smollm2.errors import TokenizerError
from smollm2.files import parse_json
from smollm2.tokenizer.declaration import CONTROL, GGUF_PRE_TOKENIZERS, USER_DEFINED
from smollm2.tokenizer.tokenizer import Tokenizer

_NORMAL, _UNUSED = 1, 5  # GGUF token types
_FLAGS = ("single_word", "lstrip", "rstrip")


def gguf_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    """Return the keys of a vocabulary of ``vocab_size`` tokens.

    Ids without a token get an unused one, as llama.cpp's converter names them. Tokens are spelled
    as in tokenizer.json, bytes in the alphabet of byte-level BPE.

    Raises ``TokenizerError`` for a pre-tokenizer that has no name in GGUF, a normalizer, and added
    tokens that take the space beside them or stand alone.
    """
    declaration = parse_json(tokenizer.to_json().encode(), "tokenizer.json")
    model = declaration["model"]
    if declaration.get("normalizer") is not None or model.get("ignore_merges"):
        what = "ignore_merges" if model.get("ignore_merges") else "a normalizer"
        raise TokenizerError(f"the tokenizer has {what}, which GGUF cannot say")
    tokens = [f"[PAD{token_id}]" for token_id in range(vocab_size)]
    types = np.full(vocab_size, _UNUSED, dtype=np.int32)
    for token, token_id in model["vocab"].items():
        tokens[token_id], types[token_id] = token, _NORMAL
    for token in declaration.get("added_tokens") or ():
        if chosen := [flag for flag in _FLAGS if token.get(flag)]:
            raise TokenizerError(
                f"added token {token['content']!r} is {chosen[0]}, which GGUF cannot say"
            )
        tokens[token["id"]] = token["content"]
        types[token["id"]] = CONTROL if token.get("special") else USER_DEFINED
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _pre_tokenizer(declaration.get("pre_tokenizer")),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
    }


def _pre_tokenizer(declared: Any) -> str:
    """Return the name of the pre-tokenizer that splits texts in the same way."""
    for name, known in GGUF_PRE_TOKENIZERS.items():
        if _splitting(declared) == _splitting(known):
            return name
    kind = declared.get("type") if isinstance(declared, Mapping) else declared
    known_names = ", ".join(GGUF_PRE_TOKENIZERS)
    raise TokenizerError(
        f"pre_tokenizer {kind!r:.80} has no name in GGUF that is known: known are {known_names}"
    )


def _splitting(value: Any) -> Any:
    """Return what of a pre-tokenizer decides where texts are split, with its defaults."""
    if isinstance(value, list):
        return [_splitting(part) for part in value]
    if not isinstance(value, Mapping):
        return value
    kept = {key: _splitting(part) for key, part in value.items() if key != "trim_offsets"}
    return {"use_regex": True, **kept} if value.get("type") == "ByteLevel" else kept
