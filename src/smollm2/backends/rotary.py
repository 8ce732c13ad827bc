"""Rotary angles: how far the pairs of a head turn at each position."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from smollm2.config import Config

Floats = NDArray[np.float32]


def rotary_tables(config: Config, positions: NDArray[np.integer]) -> tuple[Floats, Floats]:
    """Cosines and sines [T, D/2] of ``positions`` [T].

    Pair i turns by ``position · rope_theta^(-2i/D)``, with angles in float32 as transformers has
    them. Source: Su et al. 2021 (RoFormer).
    """
    size = config.head_dim
    exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    inverse = (1.0 / np.float32(config.rope_theta) ** exponents).astype(np.float32)
    angles = positions.astype(np.float32)[:, None] * inverse
    return np.cos(angles), np.sin(angles)
