"""A writer of the Dart package's .smol files, versions 1 and 2, from their description."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from smollm2.config import Config
from tests.tiny import Arrays

QUANT_IDS = {"q8": 1, "q16": 2, "bf16": 4}
MOST = {"q8": 127, "q16": 32767}
LAYOUTS = ("joined merges", "paired merges", "added tokens")


def u32(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def text(value: str) -> bytes:
    raw = value.encode()
    return u32(len(raw)) + raw


@dataclass(frozen=True)
class Vocabulary:
    tokens: Sequence[str]
    merges: Sequence[tuple[str, str]]
    added: Sequence[tuple[str, int]] = ()

    def packed(self, layout: str) -> bytes:
        out = u32(len(self.tokens), len(self.merges)) + b"".join(map(text, self.tokens))
        for left, right in self.merges:
            joined = layout == "joined merges"
            out += text(f"{left} {right}") if joined else text(left) + text(right)
        if layout == "added tokens":
            out += u32(len(self.added))
            out += b"".join(text(token) + u32(token_id) for token, token_id in self.added)
        return out


def quantized(values: NDArray[Any], quant: str) -> tuple[NDArray[Any], np.float32]:
    """Round half away from zero by one scale for the whole tensor."""
    most = MOST[quant]
    greatest = float(np.abs(values).max())
    scale = greatest / most if greatest else 1.0
    steps = values.astype(np.float64) / scale
    q = np.clip(np.sign(steps) * np.floor(np.abs(steps) + 0.5), -most, most)
    return q.astype({"q8": np.int8, "q16": "<i2"}[quant]), np.float32(scale)


def hashed(values: Sequence[int]) -> tuple[int, int]:
    """The hashes of q8 and q16, one element of each direction at a time."""
    h1, h2 = 2166136261, 2166136261 ^ 0x9E3779B9
    for i in range(len(values)):
        f, r = values[i], values[len(values) - 1 - i]
        h1 = ((h1 ^ (f % 2**64)) * 16777619) % 2**64
        h2 = ((h2 ^ ((r ^ (r << 5)) & 0xFF)) * 2246822519) % 2**64
        h2 = ((h2 << 13) % 2**64) | (h2 >> 19)
    return h1 % 2**32, h2 % 2**32


def hashed_bf16(values: Sequence[int]) -> tuple[int, int]:
    h1 = h2 = 2166136261
    for v in values:
        h1 = ((h1 ^ v) * 16777619) % 2**32
        h2 = ((h2 ^ (v >> 1)) * 2246822519) % 2**32
    return h1, h2


def tensor(values: NDArray[Any], quant: str) -> bytes:
    if values.ndim == 1:
        return values.astype("<f4").tobytes()
    if quant == "bf16":
        bits = (values.astype("<f4").view("<u4") >> 16).astype("<u2")
        return bits.tobytes() + u32(*hashed_bf16(bits.reshape(-1).tolist()))
    q, scale = quantized(values, quant)
    return struct.pack("<f", scale) + u32(*hashed(q.reshape(-1).tolist())) + q.tobytes()


def stored(values: NDArray[Any], quant: str) -> NDArray[Any]:
    """The float32 values that a tensor of a file stands for."""
    if values.ndim == 1:
        return values.astype(np.float32)
    if quant == "bf16":
        bits = (values.astype("<f4").view("<u4") >> 16).astype("<u2")
        return bits.view(ml_dtypes.bfloat16).astype(np.float32)
    q, scale = quantized(values, quant)
    return q.astype(np.float32) * scale


def header(config: Config, quant: str, version: int = 2) -> bytes:
    out = b"SMOL" + u32(version) + (u32(QUANT_IDS[quant], 0) if version == 2 else b"")
    out += u32(
        config.hidden_size,
        config.intermediate_size,
        config.num_hidden_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.vocab_size,
        config.max_position_embeddings,
    )
    return out + struct.pack("<2f", config.rope_theta, config.rms_norm_eps)


def write_dart(
    path: Path,
    config: Config,
    weights: Arrays,
    quant: str,
    vocabulary: Vocabulary,
    *,
    layout: str = "added tokens",
    version: int = 2,
) -> Path:
    raw = header(config, quant, version) + vocabulary.packed(layout)
    for _, values in weights.items():
        raw += tensor(values, quant)
    path.write_bytes(raw)
    return path
