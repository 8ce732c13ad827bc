"""Dtypes: what the weights of a framework's model can be, and what they are if nobody says so."""

from __future__ import annotations

from typing import Any

import numpy as np

from smollm2.errors import InputError
from smollm2.quantize import as_dense
from smollm2.weights import Weights

DTYPES = ("float32", "bfloat16", "float16")
"""What ``load(dtype=…)`` knows."""


def own_dtype(weights: Weights[Any]) -> str:
    """The dtype of all matrices where they have the same of ``DTYPES``, or float32.

    So nothing is rounded of a checkpoint that has quantized matrices, or several dtypes.
    """
    matrices = [weight for _, weight in weights.items() if len(weight.shape) == 2]
    names = {weight.dtype.name if isinstance(weight, np.ndarray) else "" for weight in matrices}
    (name, *others) = names
    return name if name in DTYPES and not others else "float32"


def check_room(weights: Weights[Any], dtype: str) -> None:
    """Raise ``InputError`` where float16 would make an infinity of a weight; others do not."""
    for name, weight in weights.items() if dtype == "float16" else ():
        try:
            as_dense(weight, "F16")
        except InputError as error:
            raise InputError(f"{name}: {error}: choose dtype='bfloat16'") from None
