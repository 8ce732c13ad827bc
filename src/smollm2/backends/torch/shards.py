"""Shards: the model split over the processes of a device mesh, by where its weights are placed.

Heads, kv heads, the width of the mlp and the vocabulary are split. Between operations every process
has all of ``x``; within one it has its own heads, so attention needs nothing of the others. An
attention and an mlp end in one sum over the processes each, the embedding in one, and the head in
the gathering of its logits. Source: Shoeybi et al. 2019 (Megatron-LM).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - everybody calls it so
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from smollm2.backends.sharding import check_shards
from smollm2.backends.torch.losses import VocabularyPart, log_probs
from smollm2.backends.torch.ops import TorchOps
from smollm2.backends.torch.plan import Plan
from smollm2.config import Config
from smollm2.errors import InputError
from smollm2.weights import Attention, Mlp

R = TypeVar("R", Attention[Tensor], Mlp[Tensor])

_SPLIT = {
    **dict.fromkeys(("embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj"), 0),
    **dict.fromkeys(("gate_proj", "up_proj"), 0),
    **dict.fromkeys(("o_proj", "down_proj"), 1),
}
"""The dimension that a weight is split along, by the last part of its name; others are not."""


def mesh_of(config: Config, tensor_parallel: object, device: str) -> DeviceMesh:
    """The mesh that shares a model's weights.

    ``tensor_parallel`` is a mesh of one dimension, or a number: that of all processes of the
    group that runs. Started by torchrun, a process joins that group here if it has not yet.

    Raises ``InputError`` where the model does not split so, or there is no such group.
    """
    if isinstance(tensor_parallel, DeviceMesh):
        if tensor_parallel.ndim != 1:
            raise InputError(
                f"tensor_parallel is a mesh of {tensor_parallel.ndim} dimensions: give one of "
                "them, mesh[name]"
            )
        if tensor_parallel.device_type != device:
            raise InputError(
                f"device is {device!r}, but the mesh of tensor_parallel is of "
                f"{tensor_parallel.device_type!r}: give that one"
            )
        check_shards(config, tensor_parallel.size())
        return tensor_parallel
    if type(tensor_parallel) is not int:
        raise InputError(
            f"tensor_parallel is {tensor_parallel!r:.80}: give a number of processes, or a "
            "torch.distributed DeviceMesh"
        )
    check_shards(config, tensor_parallel)
    if not dist.is_initialized():
        if not dist.is_torchelastic_launched():
            raise InputError(
                f"tensor_parallel={tensor_parallel} needs as many processes: start the program "
                f"with torchrun --nproc-per-node {tensor_parallel} PROGRAM.py, or join them with "
                "torch.distributed.init_process_group"
            )
        dist.init_process_group()
    if dist.get_world_size() != tensor_parallel:
        raise InputError(
            f"tensor_parallel={tensor_parallel}, but {dist.get_world_size()} processes run: start "
            f"{tensor_parallel}, or give a mesh of {tensor_parallel} of them"
        )
    return init_device_mesh(device, (tensor_parallel,))


def part_of(name: str, weight: NDArray[Any], mesh: DeviceMesh) -> NDArray[Any]:
    """What this process holds of a weight, a view of it."""
    dimension = _SPLIT.get(name.split(".")[-2])
    if dimension is None:
        return weight
    return np.split(weight, mesh.size(), dimension)[mesh.get_local_rank()]


def placed(name: str, part: Tensor, mesh: DeviceMesh) -> DTensor:
    """The weight of which every process of the mesh holds its ``part_of``."""
    dimension = _SPLIT.get(name.split(".")[-2])
    placement = Replicate() if dimension is None else Shard(dimension)
    return _joined(part, mesh, placement)


class ShardedOps(TorchOps):
    """The table over weights that are parts. Each process calls the same, with the same batch."""

    def __init__(self, config: Config, mesh: DeviceMesh) -> None:
        super().__init__(config)
        self._mesh = mesh

    @property
    def kv_heads(self) -> int:
        """Those of this process."""
        return super().kv_heads // self._mesh.size()

    @property
    def writes(self) -> bool:
        """Of all processes, the first one."""
        return self._mesh.get_local_rank() == 0

    def whole(self, weight: Tensor) -> Tensor:
        """All of a weight, gathered from the processes."""
        return weight.full_tensor() if isinstance(weight, DTensor) else weight

    def agree(self, numbers: list[int]) -> list[int]:
        """Those of the first process."""
        sent = torch.tensor(numbers, dtype=torch.int64, device=self._mesh.device_type)
        dist.broadcast(sent, group=self._mesh.get_group(), group_src=0)
        agreed: list[int] = sent.tolist()
        return agreed

    def embed(self, table: Tensor, plan: Plan) -> Tensor:
        """Rows of the embedding, [T, C]: each is of one process, and 0 in the others."""
        local = _local(table)
        ids = plan.ids - self._part(local).start
        inside = (ids >= 0) & (ids < len(local))
        rows = F.embedding(ids.clamp(0, len(local) - 1), local)
        return self._sum(rows * inside[:, None])

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """The same everywhere."""
        return super().rms_norm(x, _local(weight))

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """The product of what this process has of ``x`` and the weight's columns, summed up."""
        return self._sum(super().linear(x, _local(weight)))

    def qkv(self, x: Tensor, attention: Attention[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of this process's heads."""
        return super().qkv(self._fork(x), _map(attention, _local))

    def swiglu(self, x: Tensor, mlp: Mlp[Tensor]) -> Tensor:
        """Gated MLP: a part of its width in each process, summed up."""
        return self._sum(super().swiglu(self._fork(x), _map(mlp, _local)))

    def head(self, x: Tensor, weight: Tensor) -> Tensor:
        """Logits, [W, V] float32, gathered."""
        logits = super().head(self._fork(x), _local(weight))
        return _joined(logits, self._mesh, Shard(1)).full_tensor()

    def log_probs(self, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Log-probabilities of targets [W], of which only sums over the vocabulary are shared."""
        local = _local(weight)
        return log_probs(self._fork(x), local, targets, self._part(local))

    def _part(self, local: Tensor) -> VocabularyPart:
        start = self._mesh.get_local_rank() * len(local)
        return VocabularyPart(start, self._mesh.get_group())

    def _sum(self, x: Tensor) -> Tensor:
        """The sum over the processes, in each of them, whose gradient goes through as it is."""
        return _joined(x, self._mesh, Partial()).full_tensor()

    def _fork(self, x: Tensor) -> Tensor:
        """``x`` itself, whose gradients are then summed over the processes."""
        if not torch.is_grad_enabled():
            return x
        return _joined(x, self._mesh, Replicate()).to_local(grad_placements=[Partial()])


def _joined(part: Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    return DTensor.from_local(part, mesh, [placement], run_check=False)


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _map(record: R, convert: Callable[[Tensor], Tensor]) -> R:
    return type(record)(*(convert(getattr(record, field.name)) for field in fields(record)))
