"""What a tokenizer.json declares: made from GGUF metadata, checked, and built with the library.

The layout is that of the ``tokenizers`` library (https://github.com/huggingface/tokenizers); the
GGUF keys are those of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from smollm2.errors import TokenizerError

if TYPE_CHECKING:
    import tokenizers

_BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}
_DIGITS = {"type": "Digits", "individual_digits": True}

GGUF_PRE_TOKENIZERS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "smollm": {"type": "Sequence", "pretokenizers": [_DIGITS, _BYTE_LEVEL]},
        "gpt-2": _BYTE_LEVEL,
        "default": _BYTE_LEVEL,
    }
)
"""``tokenizer.ggml.pre`` → what tokenizer.json says for the same split."""

CONTROL, USER_DEFINED = 3, 4  # GGUF token types that are matched before the text is split

_MODEL_OPTIONS = (
    "unk_token",
    "fuse_unk",
    "byte_fallback",
    "ignore_merges",
)


def _byte_alphabet() -> dict[str, int]:
    """Return the characters that byte-level BPE writes bytes with.

    Printable Latin-1 characters stand for themselves, the other bytes are written with U+0100
    and on (``bytes_to_unicode`` of GPT-2's encoder.py).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + place): byte for place, byte in enumerate(rest)
    }


BYTE_OF = _byte_alphabet()
"""The byte that each character of a token stands for."""


@dataclass(frozen=True, slots=True)
class Libraries:
    """The same tokenizer twice over one vocabulary of ids below ``vocab_size``.

    ``plain`` encodes the text of special tokens like any other text, ``parsing`` makes them their
    ids. There are two because the library keeps the choice as a setting of the object, and a
    setting that changes between calls is not safe with threads.
    """

    plain: tokenizers.Tokenizer
    parsing: tokenizers.Tokenizer
    vocab_size: int


def declared_by_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Write the tokenizer.json of the ``tokenizer.ggml.*`` metadata of a GGUF file.

    Raises ``TokenizerError`` for a tokenizer that is not byte-level BPE, and for a pre-tokenizer
    that is not known: another split gives other ids, and the text only gets a little worse.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise TokenizerError(f"tokenizer.ggml.model is {model!r}: only 'gpt2' is supported")
    pre = metadata.get("tokenizer.ggml.pre")
    if not isinstance(pre, str) or pre not in GGUF_PRE_TOKENIZERS:
        known = ", ".join(GGUF_PRE_TOKENIZERS)
        raise TokenizerError(f"tokenizer.ggml.pre is {pre!r}: supported are {known}")
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(token for index, token in enumerate(tokens) if vocab[token] != index)
        raise TokenizerError(f"tokenizer.ggml.tokens lists {twice!r} twice")
    added = [
        added_token(tokens[index], index, special=kind == CONTROL)
        for index, kind in enumerate(_token_types(metadata, len(tokens)))
        if kind in (CONTROL, USER_DEFINED)
    ]
    return declared(vocab, _strings(metadata, "tokenizer.ggml.merges"), added, pre)


def declared(
    vocab: Mapping[str, int], merges: Sequence[Any], added: Sequence[Mapping[str, Any]], pre: str
) -> dict[str, Any]:
    """Write the tokenizer.json of a byte-level BPE with one of ``GGUF_PRE_TOKENIZERS``.

    ``merges`` are of either style, ``added`` made by ``added_token``.
    """
    return {
        "version": "1.0",
        "added_tokens": list(added),
        "normalizer": None,
        "pre_tokenizer": GGUF_PRE_TOKENIZERS[pre],
        "decoder": _BYTE_LEVEL,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }


def added_token(content: str, token_id: int, *, special: bool) -> dict[str, Any]:
    """Write a token that is matched before the text is split, as tokenizer.json does."""
    return {
        "id": token_id,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }


def build(declaration: Mapping[str, Any], source: str) -> Libraries:
    """Build the tokenizer that ``declaration`` describes; ``source`` names it in errors.

    Truncation, padding and the post-processor are not taken over: they belong to training, and
    nothing is ever cut from a text or added to it here. Raises ``TokenizerError``.
    """
    from tokenizers import Tokenizer, models

    model = _checked_model(declaration, source)
    merges = _pairs(model["merges"], source)
    added = _added_tokens(declaration, source)
    parts = {name: declaration.get(name) for name in ("normalizer", "pre_tokenizer", "decoder")}
    empty = {"type": "BPE", "vocab": {}, "merges": []}
    options = {name: model[name] for name in _MODEL_OPTIONS if model.get(name) is not None}
    try:
        frame = Tokenizer.from_str(json.dumps({"version": "1.0", **parts, "model": empty}))
        bpe = models.BPE(vocab=model["vocab"], merges=merges, **options)
    except Exception as error:  # the library has no narrower class
        raise TokenizerError(f"{source}: {' '.join(str(error).split())}") from None
    return Libraries(
        plain=_assemble(frame, bpe, added, source, encode_special=True),
        parsing=_assemble(frame, bpe, added, source, encode_special=False),
        vocab_size=max(*model["vocab"].values(), *added) + 1,
    )


def _assemble(
    frame: tokenizers.Tokenizer,
    model: tokenizers.models.Model,
    added: Mapping[int, tokenizers.AddedToken],
    source: str,
    *,
    encode_special: bool,
) -> tokenizers.Tokenizer:
    """Make one tokenizer around a shared model, with the pieces of ``frame``."""
    from tokenizers import Tokenizer

    library = Tokenizer(model)
    if frame.normalizer is not None:
        library.normalizer = frame.normalizer
    if frame.pre_tokenizer is not None:
        library.pre_tokenizer = frame.pre_tokenizer
    library.decoder = frame.decoder
    library.add_tokens(list(added.values()))
    library.encode_special_tokens = encode_special
    for token_id, token in added.items():
        got = library.token_to_id(token.content)
        if got != token_id:
            raise TokenizerError(
                f"{source}: added token {token.content!r} has id {token_id}, but its place in "
                f"the vocabulary is {got}"
            )
    return library


def _checked_model(declaration: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    decoder = declaration.get("decoder")
    kind = decoder.get("type") if isinstance(decoder, Mapping) else decoder
    if kind != "ByteLevel":
        raise TokenizerError(f"{source}: decoder is {kind!r}: only 'ByteLevel' is supported")
    model = declaration.get("model")
    if not isinstance(model, Mapping) or model.get("type", "BPE") != "BPE":
        kind = model.get("type") if isinstance(model, Mapping) else model
        raise TokenizerError(f"{source}: model is {kind!r}: only 'BPE' is supported")
    if model.get("dropout"):
        raise TokenizerError(
            f"{source}: model.dropout is {model['dropout']}, which makes ids random: set it to null"
        )
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise TokenizerError(f"{source}: model.{name} has no place in byte-level BPE")
    vocab = model.get("vocab")
    if not isinstance(vocab, Mapping) or not vocab:
        raise TokenizerError(f"{source}: model.vocab is missing or empty")
    ids = vocab.values()
    if set(map(type, ids)) != {int} or not 0 <= min(ids) <= max(ids) < 2**32:
        raise TokenizerError(
            f"{source}: model.vocab has an id that is not a whole number (below 2**32)"
        )
    if len(set(ids)) != len(vocab):
        raise TokenizerError(f"{source}: model.vocab gives two tokens the same id")
    if not isinstance(model.get("merges"), list | tuple) or not model["merges"]:
        raise TokenizerError(
            f"{source}: model.merges is missing or empty, so every text would be split into bytes"
        )
    return model


def _pairs(merges: Sequence[Any], source: str) -> Sequence[tuple[str, str]]:
    """Read merges in either style: ``["a", "b"]`` (since tokenizers 0.20) or ``"a b"``.

    A tuple of pairs is what ``expand_form`` makes, and taken as it is.
    """
    if isinstance(merges, tuple):
        return merges
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
    # A set of what occurs, since a call for each of 50,000 merges takes as long as to parse them.
    lists = set(map(type, pairs)) == {list} and set(map(len, pairs)) == {2}
    if not lists or set(map(type, chain.from_iterable(pairs))) != {str}:
        rank = next(rank for rank, pair in enumerate(pairs) if not _is_pair(pair))
        raise TokenizerError(f"{source}: merge {rank} is not a pair: {merges[rank]!r:.80}")
    return list(map(tuple, pairs))


def _is_pair(pair: Any) -> bool:
    return type(pair) is list and [type(part) for part in pair] == [str, str]


def _added_tokens(declaration: Mapping[str, Any], source: str) -> dict[int, tokenizers.AddedToken]:
    from tokenizers import AddedToken

    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    added: dict[int, tokenizers.AddedToken] = {}
    entries = declaration.get("added_tokens") or []
    if not isinstance(entries, list):
        raise TokenizerError(f"{source}: added_tokens is not a list")
    for place, entry in enumerate(entries):
        try:
            content, token_id = entry["content"], entry["id"]
            chosen = {flag: bool(entry[flag]) for flag in flags if flag in entry}
            token = AddedToken(content, **chosen)
        except (KeyError, TypeError, ValueError):
            raise TokenizerError(
                f"{source}: added_tokens[{place}] needs a text as content and an id"
            ) from None
        if not content or type(token_id) is not int:
            raise TokenizerError(f"{source}: added_tokens[{place}] has no usable content or id")
        if token_id in added:
            raise TokenizerError(f"{source}: two added tokens have the id {token_id}")
        added[token_id] = token
    return added


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not value or not all(isinstance(x, str) for x in value):
        raise TokenizerError(f"{key} is missing or not a list of strings")
    return value


def _token_types(metadata: Mapping[str, Any], count: int) -> list[int]:
    key = "tokenizer.ggml.token_type"
    types = np.asarray(metadata.get(key))
    if types.dtype.kind not in "iu" or types.shape != (count,):
        raise TokenizerError(f"{key} is missing or does not have one number for each token")
    return [int(kind) for kind in types]
