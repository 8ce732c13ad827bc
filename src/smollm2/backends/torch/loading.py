"""What ``load`` asks of the PyTorch backend: options checked, weights turned into tensors."""

from __future__ import annotations

from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from smollm2.backends import Backend, BackendOptions, given_options
from smollm2.backends.dtypes import DTYPES, check_room, own_dtype
from smollm2.backends.torch.model import TorchModel
from smollm2.backends.torch.numerics import NUMERICS
from smollm2.backends.torch.ops import TorchOps
from smollm2.config import Config
from smollm2.errors import InputError
from smollm2.formats.tensorfile import DENSE_DTYPES
from smollm2.quantize import Weight, as_float32
from smollm2.weights import Weights

_BFLOAT16 = DENSE_DTYPES["BF16"]


class TorchBackend:
    """Weights of any kind, made dense in one dtype on one device."""

    @torch.inference_mode(mode=False)  # or what is loaded in it could never be trained
    def load(
        self, config: Config, weights: Weights[Any], **options: Unpack[BackendOptions]
    ) -> TorchModel:
        """Make tensors of the weights; quantized ones are dequantized.

        - ``device``: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, ``"mps"``
        - ``dtype``: ``"float32"``, ``"bfloat16"`` or ``"float16"``; by default that of the
          checkpoint's matrices where all have the same, else float32
        - ``compile``: ``"inductor"``, layers fused by ``torch.compile``, which takes seconds to
          minutes at the first prompt; ``"cudagraphs"``, decode as one launch a step, on CUDA:
          graphs belong to a cache, so that each ``generate`` captures its own, a chat once; the
          first step of each power of two of keys, and after a cache has grown, is run four times
        - ``tensor_parallel``: how many processes share the weights, or a device mesh of them, see
          ``smollm2.backends.torch.shards``
        - ``numerics``: ``"exact"`` or ``"fast"``, see ``smollm2.backends.torch.numerics``

        None is the same as leaving an option out. Raises ``InputError`` for another option, or a
        value that cannot be had here.
        """
        given = given_options("torch", options)
        device = _device(given.get("device", "cpu"))
        dtype = _choice("dtype", given["dtype"], DTYPES) if "dtype" in given else own_dtype(weights)
        check_room(weights, dtype)
        numerics = _choice("numerics", given.get("numerics", NUMERICS[0]), NUMERICS)
        compiled = _compile(given.get("compile"), device)
        exact = numerics == "exact"
        shared = given.get("tensor_parallel", 1)
        if shared is True or shared != 1:
            if compiled is not None:
                raise InputError(
                    f"compile={compiled!r} and tensor_parallel={shared!r:.80} do not go together: "
                    "leave one out"
                )
            return _sharded(config, weights, shared, device, getattr(torch, dtype), exact=exact)
        tensors = weights.map(lambda _, weight: _tensor(weight).to(device, getattr(torch, dtype)))
        ops = _compiled_ops(config) if compiled == "inductor" else None
        graphs = compiled == "cudagraphs"
        return TorchModel(config, tensors, exact=exact, ops=ops, graphs=graphs)


def _compiled_ops(config: Config) -> TorchOps:
    from smollm2.backends.torch.compiled import CompiledOps  # takes a second to import

    return CompiledOps(config)


def _sharded(
    config: Config,
    weights: Weights[Any],
    tensor_parallel: object,
    device: torch.device,
    dtype: torch.dtype,
    *,
    exact: bool,
) -> TorchModel:
    """A model of whose weights this process holds a part."""
    from smollm2.backends.torch import shards  # takes half a second to import

    mesh = shards.mesh_of(config, tensor_parallel, device.type)

    def place(name: str, weight: Weight) -> Tensor:
        dense = weight if isinstance(weight, np.ndarray) else as_float32(weight)
        return shards.placed(
            name, _tensor(shards.part_of(name, dense, mesh)).to(device, dtype), mesh
        )

    ops = shards.ShardedOps(config, mesh)
    return TorchModel(config, weights.map(place), exact=exact, ops=ops)


def _choice(name: str, value: object, known: tuple[str, ...]) -> str:
    for choice in known:
        if value == choice:
            return choice
    raise InputError(f"{name} is {value!r}: choose from {', '.join(known)}")


def _compile(name: object, device: torch.device) -> str | None:
    if name is None:
        return None
    mode = _choice("compile", name, ("inductor", "cudagraphs"))
    if mode == "cudagraphs" and device.type != "cuda":
        raise InputError(
            f"compile='cudagraphs' is for device='cuda', not {device.type!r}: use 'inductor'"
        )
    return mode


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


def _tensor(weight: Weight) -> Tensor:
    """A tensor of a weight's values, in memory of its own."""
    if not isinstance(weight, np.ndarray):
        return torch.from_numpy(as_float32(weight))
    if weight.dtype == _BFLOAT16:
        return torch.from_numpy(weight.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(weight.copy())


backend: Backend = TorchBackend()
