"""What a file of the Dart package says of a model: its config and its tokenizer.

The files hold neither the ids of control tokens nor the pre-tokenizer: those are SmolLM2's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smollm2.config import Config, shortest
from smollm2.errors import ConfigError, FormatError
from smollm2.formats.dart import DartFile
from smollm2.tokenizer import Tokenizer
from smollm2.tokenizer.declaration import added_token, declared

CONTROL_TOKENS = frozenset(
    (
        *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        *("<repo_name>", "<reponame>", "<file_sep>", "<filename>", "<gh_stars>"),
        *("<issue_start>", "<issue_comment>", "<issue_closed>"),
        *("<jupyter_start>", "<jupyter_text>", "<jupyter_code>", "<jupyter_output>"),
        *("<jupyter_script>", "<empty_output>"),
    )
)
"""The control tokens of SmolLM2's tokenizer.json."""

_BOS, _EOS = ("<|im_start|>", "<|endoftext|>"), ("<|im_end|>", "<|endoftext|>")


def config_of(file: DartFile) -> Config:
    """The config; a head is always the token embedding. Raises ``ConfigError``."""
    ids = {token: token_id for token_id, token in enumerate(file.tokens)}
    ids |= dict(file.added or ())
    ends = [ids[token] for token in _EOS if token in ids]
    sizes: Mapping[str, Any] = file.sizes
    try:
        return Config(
            **sizes,
            head_dim=file.sizes["hidden_size"] // file.sizes["num_attention_heads"],
            rms_norm_eps=shortest(file.rms_norm_eps),
            rope_theta=shortest(file.rope_theta),
            tie_word_embeddings=True,
            bos_token_id=next((ids[token] for token in _BOS if token in ids), None),
            eos_token_ids=tuple(ends),
            pad_token_id=ends[0] if ends else None,
        )
    except ConfigError as error:
        raise ConfigError(f"{file.path}: {error}") from None


def tokenizer_of(file: DartFile) -> Tokenizer | None:
    """The tokenizer, None where the file has no tokens.

    Where the file does not list added tokens, those of SmolLM2 that it has are control tokens.
    Raises ``TokenizerError``, and ``FormatError`` for a token that is there twice.
    """
    if not file.tokens:
        return None
    vocab = {token: token_id for token_id, token in enumerate(file.tokens)}
    if len(vocab) < len(file.tokens):
        raise FormatError(f"{file.path}: a token is in the vocabulary twice")
    added = file.added
    if added is None:
        added = tuple((token, i) for token, i in vocab.items() if token in CONTROL_TOKENS)
    ids = vocab | dict(added)
    return Tokenizer(
        declared(
            vocab,
            [list(pair) for pair in file.merges],
            [added_token(token, token_id, special=True) for token, token_id in added],
            "smollm",
        ),
        source=str(file.path),
        named={
            "bos": next((ids[token] for token in _BOS if token in ids), None),
            "eos": next((ids[token] for token in _EOS if token in ids), None),
            "pad": next((ids[token] for token in _EOS if token in ids), None),
        },
    )
