"""Loading for JAX: options checked, weights converted and placed on a device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from numpy.typing import NDArray

from smollm2.backends import BackendOptions, given_options
from smollm2.backends.dtypes import DTYPES, check_room, own_dtype
from smollm2.backends.jax.layers import stacked
from smollm2.backends.jax.model import JaxModel
from smollm2.backends.jax.ops import JaxOps, Numerics
from smollm2.backends.jax.sharding import tensor_mesh, weight_sharding
from smollm2.config import Config
from smollm2.errors import InputError
from smollm2.quantize import as_float32
from smollm2.weights import Weights

_PLATFORMS = ("cpu", "gpu", "tpu")


class JaxBackend:
    """Weights of any kind, computed with on a device of JAX."""

    def load(
        self, config: Config, weights: Weights[Any], **options: Unpack[BackendOptions]
    ) -> JaxModel:
        """Convert the weights to ``dtype`` and place them on ``device``.

        - ``device``: "cpu", "gpu" or "tpu", the first of its kind, or one of a number, as "gpu:1";
          JAX's default where it is not given
        - ``dtype``: of weights, activations and cache: "float32", "bfloat16" or "float16"; where
          it is not given, that of the checkpoint's matrices if all have the same, else float32
        - ``compile``: None, where the layers are steps of a loop, or "xla", where XLA sees them
          all at once: it compiles a shape in five times as long, and decodes a tenth faster
        - ``numerics``: "exact" multiplies in full precision, "fast" as the device likes best
        - ``tensor_parallel``: a ``jax.sharding.Mesh`` of devices that share the weights, split over
          its only axis or the one named "tensor"; or how many devices, of the platform of
          ``device``

        Raises ``InputError`` for other options and values.
        """
        given = given_options("jax", options)
        compiler = given.get("compile")
        if not (compiler is None or compiler == "xla"):
            raise InputError(f"compile={compiler!r} is not of jax: give 'xla' or None")
        dtype = _dtype(given["dtype"]) if "dtype" in given else jnp.dtype(own_dtype(weights))
        check_room(weights, dtype.name)
        place_of = _places(config, given.get("tensor_parallel"), given.get("device"))

        def read(weight: Any) -> NDArray[Any]:
            values = weight if getattr(weight, "dtype", None) == dtype else as_float32(weight)
            converted: NDArray[Any] = values.astype(dtype, copy=False)
            return converted

        def place(name: str, values: NDArray[Any]) -> jax.Array:
            placed: jax.Array = jax.device_put(values, place_of(name, values.ndim))
            return placed

        ops = JaxOps(config, _numerics(given.get("numerics", "exact")))
        if compiler is None:
            return JaxModel(ops, stacked(weights, read, place))
        return JaxModel(ops, weights.map(lambda name, weight: place(name, read(weight))))


def _numerics(name: object) -> Numerics:
    match name:
        case "exact" | "fast":
            return name
    raise InputError(f"numerics={name!r} is not known: give 'exact' or 'fast'")


def _dtype(name: object) -> np.dtype[Any]:
    if not (isinstance(name, str) and name in DTYPES):
        raise InputError(f"dtype={name!r} is not of jax: choose from {', '.join(DTYPES)}")
    return jnp.dtype(name)


def _places(
    config: Config, tensor_parallel: Any, name: object
) -> Callable[[str, int], jax.Device | NamedSharding | None]:
    """Where the weight of a name lies, or the stack of it, which has a dimension more.

    None is JAX's default device, which the weights are then not committed to: beside those that
    are, an optimizer's counter is committed by its first step, and the second is compiled again.
    """
    if tensor_parallel is None and name is None:
        return lambda *_: None
    device = _device(name)
    if tensor_parallel is None:
        return lambda *_: device
    if name is not None and (isinstance(tensor_parallel, Mesh) or ":" in str(name)):
        raise InputError(
            f"device={name!r} and tensor_parallel={tensor_parallel!r:.80} both say where weights "
            "lie: leave device out"
        )
    mesh = tensor_mesh(config, tensor_parallel, jax.devices(device.platform))
    return partial(weight_sharding, mesh)


def _device(name: object) -> jax.Device:
    if name is None:
        return jax.devices()[0]
    platform, _, number = name.partition(":") if isinstance(name, str) else ("", "", "")
    if platform not in _PLATFORMS or not (number or "0").isdecimal():
        kinds = ", ".join(_PLATFORMS)
        raise InputError(f"device={name!r} is not of jax: give {kinds}, or one's number as gpu:1")
    try:
        devices = jax.devices(platform)
    except RuntimeError:
        raise InputError(f"device={name!r}: JAX finds no {platform} here: use 'cpu'") from None
    if int(number or 0) >= len(devices):
        raise InputError(
            f"device={name!r}: JAX finds {len(devices)} of {platform}: {platform}:0 is the first"
        )
    return devices[int(number or 0)]
