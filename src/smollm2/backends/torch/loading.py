"""What ``load`` asks of the PyTorch backend: options checked, weights turned into tensors."""

from __future__ import annotations

from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from smollm2.backends import Backend, BackendOptions
from smollm2.backends.torch.model import Compile, TorchModel
from smollm2.backends.torch.numerics import NUMERICS
from smollm2.config import Config
from smollm2.errors import InputError
from smollm2.formats.tensorfile import DENSE_DTYPES
from smollm2.quantize import Weight, as_float32
from smollm2.weights import Weights

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""What ``load(dtype=…)`` knows."""

_BFLOAT16 = DENSE_DTYPES["BF16"]


class TorchBackend:
    """Weights of any kind, made dense in one dtype on one device."""

    def load(
        self, config: Config, weights: Weights[Any], **options: Unpack[BackendOptions]
    ) -> TorchModel:
        """Make tensors of the weights; quantized ones are dequantized.

        - ``device``: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, ``"mps"``
        - ``dtype``: ``"float32"``, ``"bfloat16"`` or ``"float16"``; by default that of the
          checkpoint's matrices where all have the same, else float32
        - ``compile``: ``"inductor"``, layers fused by ``torch.compile``, which takes seconds to
          minutes at the first prompt; ``"cudagraphs"``, decode as one launch a step, on CUDA
        - ``numerics``: ``"exact"`` or ``"fast"``, see ``smollm2.backends.torch.numerics``

        Raises ``InputError`` for another option, or a value that cannot be had here.
        """
        for name in options:
            if name not in ("device", "dtype", "compile", "numerics"):
                raise InputError(f"the torch backend has no option {name}: leave it out")
        device = _device(options.get("device", "cpu"))
        dtype = _choice("dtype", options.get("dtype") or _dtype_of(weights), tuple(DTYPES))
        compile = _compile(options.get("compile"), device)
        numerics = _choice("numerics", options.get("numerics", NUMERICS[0]), NUMERICS)
        tensors = weights.map(lambda _, weight: _tensor(weight).to(device, DTYPES[dtype]))
        return TorchModel(config, tensors, exact=numerics == "exact", compile=compile)


def _choice(name: str, value: object, known: tuple[str, ...]) -> str:
    for choice in known:
        if value == choice:
            return choice
    raise InputError(f"{name} is {value!r}: choose from {', '.join(known)}")


def _compile(name: object, device: torch.device) -> Compile | None:
    if name is None:
        return None
    if name == "inductor":
        return "inductor"
    if name != "cudagraphs":
        raise InputError(f"compile is {name!r}: choose from inductor, cudagraphs and None")
    if device.type != "cuda":
        raise InputError(
            f"compile is 'cudagraphs', which needs device='cuda', not {device.type!r}: "
            "use 'inductor'"
        )
    return "cudagraphs"


def _device(name: str) -> torch.device:
    """The device of this name. Raises ``InputError`` where there is none."""
    kind, _, number = name.partition(":") if isinstance(name, str) else ("", "", "")
    if kind not in ("cpu", "cuda", "mps") or not (number.isdecimal() or name == kind):
        raise InputError(f"device is {name!r}: choose from cpu, cuda, cuda:0 and mps")
    counts = {
        "cpu": 1,
        "cuda": torch.cuda.device_count(),
        "mps": int(torch.backends.mps.is_available()),
    }
    count = counts[kind]
    if count == 0:
        raise InputError(f"device is {name!r}, but torch finds no such device here: use 'cpu'")
    if int(number or 0) >= count:
        raise InputError(f"device is {name!r}, but torch finds {count} here: {kind}:0 is the first")
    return torch.device(name)


def _dtype_of(weights: Weights[Weight]) -> str:
    """The dtype of all dense matrices, or float32."""
    matrices = [weight for _, weight in weights.items() if len(weight.shape) == 2]
    names = {weight.dtype.name if isinstance(weight, np.ndarray) else "" for weight in matrices}
    (name, *others) = names
    return name if name in DTYPES and not others else "float32"


def _tensor(weight: Weight) -> Tensor:
    """A tensor of a weight's values, in memory of its own."""
    if not isinstance(weight, np.ndarray):
        return torch.from_numpy(as_float32(weight))
    if weight.dtype == _BFLOAT16:
        return torch.from_numpy(weight.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(weight.copy())


backend: Backend = TorchBackend()
