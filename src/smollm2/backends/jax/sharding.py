"""Sharding: which part of each weight and cache lies on which device; XLA does the rest.

Rows of the query, key, value, gate and up matrices, columns of output and down, rows of the
embedding and the head (the vocabulary) are split over one axis of a mesh; norms are everywhere.
So each device has heads, kv heads with their cache, and a part of the mlp of its own, and partial
sums are added up once after each attention and each mlp; once more for the embedding, of which each
device has only some rows. Logits stay split until they are read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from smollm2.backends.sharding import check_shards
from smollm2.config import Config
from smollm2.errors import InputError

AXIS = "tensor"
"""The axis of a mesh that weights are split over, where it has several."""

_spec: Callable[..., PartitionSpec] = PartitionSpec  # which has no types of its own

_ROWS = ("embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_COLUMNS = ("o_proj", "down_proj")


def tensor_mesh(config: Config, tensor_parallel: Any, devices: list[jax.Device]) -> Mesh:
    """The devices that share the weights: a mesh, or so many of ``devices``.

    Raises ``InputError`` for what is neither, for a number that the model does not split into or
    that is not there, and for a mesh of several axes of which none is ``AXIS``.
    """
    if isinstance(tensor_parallel, Mesh):
        axis = _axis_of(tensor_parallel)
        check_shards(config, tensor_parallel.shape[axis])
        # With axes that XLA may split over as it likes, whatever those of the given mesh are.
        return Mesh(tensor_parallel.devices, tensor_parallel.axis_names)
    if type(tensor_parallel) is not int:
        raise InputError(
            f"tensor_parallel={tensor_parallel!r:.80} is not of jax: give a jax.sharding.Mesh or "
            "a number of devices"
        )
    check_shards(config, tensor_parallel)
    if tensor_parallel > len(devices):
        platform = devices[0].platform
        more = f"start with JAX_NUM_CPU_DEVICES={tensor_parallel}, or " if platform == "cpu" else ""
        raise InputError(
            f"tensor_parallel={tensor_parallel}, but JAX finds {len(devices)} of {platform}: "
            f"{more}give {len(devices)} at most"
        )
    return Mesh(np.array(devices[:tensor_parallel]), (AXIS,))


def weight_sharding(mesh: Mesh, name: str, dims: int) -> NamedSharding:
    """Where the parts of the weight of this canonical name lie, or of a stack of it: 3 ``dims``."""
    axis, part = _axis_of(mesh), name.split(".")[-2]
    if part in _ROWS:
        return NamedSharding(mesh, _spec(*[None] * (dims - 2), axis, None))
    return NamedSharding(mesh, _spec(*[None] * (dims - 1), axis) if part in _COLUMNS else _spec())


def cache_sharding(key: jax.Array) -> Sharding:
    """Where the parts of a cache [L, pages, K, …] lie, beside the rows of the key matrix."""
    if not isinstance(key.sharding, NamedSharding):
        return key.sharding
    # What JAX has computed has no entries for the last dimensions, where they are not split.
    spec = (*key.sharding.spec, *[None] * key.ndim)
    return NamedSharding(key.sharding.mesh, _spec(None, None, spec[key.ndim - 2]))


def _axis_of(mesh: Mesh) -> str:
    names = tuple(map(str, mesh.axis_names))
    if len(names) == 1:
        return names[0]
    if AXIS not in names:
        raise InputError(
            f"the axes of the mesh are {', '.join(names)}: name the one that weights are split "
            f"over {AXIS!r}"
        )
    return AXIS
