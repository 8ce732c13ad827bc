"""Numerics: how precisely torch multiplies, switched for the time of a forward pass only.

- ``exact``: each product in the full precision of its dtype, summed in float32; rotations in
  float32 whatever the dtype
- ``fast``: products of float32 may be shortened to TF32 (CUDA) or bfloat16 (oneDNN, where the CPU
  is made for it), and sums to the dtype; rotations in the dtype

Norms and softmax are summed in float32 in both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition, Lock
from typing import Any

import torch

NUMERICS = ("exact", "fast")
"""What ``load(numerics=…)`` knows, the default first."""

_BACKENDS: Any = torch.backends  # typed in part only
_CUDA, _ONEDNN = _BACKENDS.cuda.matmul, _BACKENDS.mkldnn.matmul

_SUMS = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")


class _Switches:
    """torch's switches, which are those of the process: whoever needs others waits."""

    def __init__(self) -> None:
        self._door = Lock()  # who waits for other switches holds up those who come after
        self._left = Condition()
        self._inside = 0
        self._exact = True
        self._put_back: Callable[[], None] = lambda: None

    @contextmanager
    def __call__(self, *, exact: bool) -> Iterator[None]:
        """Set the switches; the last one to leave puts them back. A thread must not nest it."""
        with self._door, self._left:
            self._left.wait_for(lambda: self._inside == 0 or self._exact == exact)
            if self._inside == 0:
                self._put_back, self._exact = _set(exact=exact), exact
            self._inside += 1
        try:
            yield
        finally:
            with self._left:
                self._inside -= 1
                if self._inside == 0:
                    self._put_back()
                    self._left.notify_all()


switched = _Switches()


def _set(*, exact: bool) -> Callable[[], None]:
    """Set the switches; returns what puts back all that was there.

    torch has an old switch beside the new ones, and refuses to read it (as its compiler does) where
    they differ. The old one sets all to what ``exact`` or ``fast`` needs.
    """
    owners = _ONEDNN, _CUDA
    products = [_own_precision(owner) for owner in owners]
    sums = [getattr(_CUDA, name) for name in _SUMS]
    for owner in owners:
        owner.fp32_precision = "ieee"  # with which the old one can be read, whatever it is
    old = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest" if exact else "medium")
    for name in _SUMS:
        setattr(_CUDA, name, not exact)

    def put_back() -> None:
        torch.set_float32_matmul_precision(old)
        for owner, product in zip(owners, products, strict=True):
            owner.fp32_precision = product
        for name, value in zip(_SUMS, sums, strict=True):
            setattr(_CUDA, name, value)

    return put_back


def _own_precision(owner: Any) -> str:
    """What a switch is set to, "none" where it is no other than the one that it inherits from.

    It is left at "none": torch gives what holds, its own or not.
    """
    before: str = owner.fp32_precision
    owner.fp32_precision = "none"
    return "none" if owner.fp32_precision == before else before
