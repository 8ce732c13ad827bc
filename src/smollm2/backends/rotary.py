"""Rotary angles: how far the pairs of a head turn at each position."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from smollm2.config import Config

Floats = NDArray[np.float32]


def frequencies(config: Config) -> Floats:
    """How far each of the D/2 pairs of a head turns from one position to the next, in float32.

    Pair i turns by ``rope_theta^(-2i/D)``. Source: Su et al. 2021 (RoFormer).
    """
    size = config.head_dim
    exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    return (1.0 / np.float32(config.rope_theta) ** exponents).astype(np.float32)


def rotary_tables(config: Config, positions: NDArray[np.integer]) -> tuple[Floats, Floats]:
    """Cosines and sines [T, D/2] of ``positions`` [T]: angles in float32 as transformers has."""
    angles = positions.astype(np.float32)[:, None] * frequencies(config)
    return np.cos(angles), np.sin(angles)
