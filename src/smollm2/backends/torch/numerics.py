"""Numerics: how precisely torch multiplies, switched for the time of a forward pass only.

- ``exact``: each product in the full precision of its dtype, summed in float32; rotations in
  float32 whatever the dtype
- ``fast``: products of float32 may be shortened to TF32 (CUDA) or bfloat16 (oneDNN, where the CPU
  is made for it), and sums to the dtype; rotations in the dtype

Norms and softmax are summed in float32 in both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

NUMERICS = ("exact", "fast")
"""What ``load(numerics=…)`` knows, the default first."""

_BACKENDS: Any = torch.backends  # typed in part only
_CUDA, _ONEDNN = _BACKENDS.cuda.matmul, _BACKENDS.mkldnn.matmul

_SWITCHES: tuple[tuple[Any, str, Any, Any], ...] = (
    (_ONEDNN, "fp32_precision", "ieee", "bf16"),
    (_CUDA, "fp32_precision", "ieee", "tf32"),
    (_CUDA, "allow_bf16_reduced_precision_reduction", False, True),
    (_CUDA, "allow_fp16_reduced_precision_reduction", False, True),
)
"""Whose attribute, its name, its value for exact and for fast products."""


@contextmanager
def switched(*, exact: bool) -> Iterator[None]:
    """Set torch's switches, which are those of the process, and put them back after."""
    before = [getattr(owner, name) for owner, name, _, _ in _SWITCHES]
    try:
        for owner, name, precise, quick in _SWITCHES:
            setattr(owner, name, precise if exact else quick)
        yield
    finally:
        for (owner, name, _, _), value in zip(_SWITCHES, before, strict=True):
            setattr(owner, name, value)
