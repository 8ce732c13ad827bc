"""Fakes: a model that says what it is told to, and a tokenizer of bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smollm2.batch import Batch, Ints
from smollm2.cache import Cache, Layout
from smollm2.causal_lm import NO_TARGET, LoadedModel, Traffic, log_probs_of
from smollm2.config import Config
from smollm2.tokenizer import Tokenizer
from tests.tiny import tiny_config

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def byte_alphabet() -> list[str]:
    """The printable stand-ins for bytes 0 … 255 of GPT-2's byte-level BPE."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


def write_byte_tokenizer(folder: Path, chat_template: str | None = None) -> Path:
    """tokenizer.json and tokenizer_config.json: three control tokens, 256 bytes, one merge."""
    letters = byte_alphabet()
    vocabulary = {token: i for i, token in enumerate([*SPECIALS, *letters, "th"])}
    byte_level = {"add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    value = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": i,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for i, token in enumerate(SPECIALS)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", **byte_level},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", **byte_level},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [["t", "h"]]},
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(value), encoding="utf-8")
    config: dict[str, Any] = {"bos_token": SPECIALS[1], "eos_token": SPECIALS[2]}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def byte_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of ``write_byte_tokenizer``: byte b is id 3 + b."""
    write_byte_tokenizer(folder)
    return Tokenizer.from_folder(folder)


class ScriptedModel(LoadedModel[Cache]):
    """A model whose next token is looked up by position: ``script[position]`` comes there.

    Positions that are not in the script get ``otherwise``. Records how many tokens each forward
    pass had, and can fail at a chosen pass.
    """

    threads = 2
    traffic = Traffic(weights=1000, token=10)

    def __init__(
        self, script: Mapping[int, int], *, otherwise: int = 2, config: Config | None = None
    ) -> None:
        super().__init__(config or tiny_config(vocab_size=260))
        self.script = script
        self.otherwise = otherwise
        self.fed: list[int] = []
        self.fail_at: int | None = None

    def make_cache(self, layout: Layout) -> Cache:
        return Cache(layout)

    def hidden(self, batch: Batch, cache: Cache | None = None) -> NDArray[np.float32]:
        raise NotImplementedError("a script has no hidden states")

    def log_probs(self, batch: Batch, targets: Ints) -> NDArray[np.float32]:
        logits = self.forward(replace(batch, wanted=np.arange(len(batch), dtype=np.int32)))
        learned = targets != NO_TARGET
        out = np.zeros(len(batch), np.float32)
        out[learned] = log_probs_of(logits[learned], targets[learned])
        return out

    def close(self) -> None:
        pass

    def forward(self, batch: Batch, cache: Cache | None = None) -> NDArray[np.float32]:
        if self.fail_at is not None and len(self.fed) >= self.fail_at:
            raise RuntimeError("scripted failure")
        if cache is not None:
            cache.check(batch)
        logits = np.zeros((len(batch.wanted), self.config.vocab_size), dtype=np.float32)
        for row, token in enumerate(batch.wanted):
            following = int(batch.positions[token]) + 1
            logits[row, self.script.get(following, self.otherwise)] = 10.0
        if cache is not None:
            cache.advance(batch)
        self.fed.append(len(batch))
        return logits


def say(text: str, start: int, *, end: int | None = 2) -> dict[int, int]:
    """A script that spells ``text`` in bytes from position ``start``, then token ``end``."""
    ids = [3 + byte for byte in text.encode()]
    if end is not None:
        ids.append(end)
    return {start + i: token for i, token in enumerate(ids)}
