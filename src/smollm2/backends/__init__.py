"""Backends: chosen once, by name, and imported only then."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol, TypedDict, Unpack

from smollm2.causal_lm import CausalLM
from smollm2.config import Config
from smollm2.errors import InputError, MissingDependencyError
from smollm2.extension import missing
from smollm2.weights import Weights

BACKENDS = {name: f"smollm2.backends.{name}" for name in ("native", "numpy", "torch", "jax")}
"""Names that ``load(backend=…)`` knows, and the modules that hold them."""

_OF_FRAMEWORKS = ("device", "dtype", "compile", "numerics", "tensor_parallel")

OPTIONS = {
    "native": ("quant", "threads", "kv", "mmap"),
    "numpy": (),
    "torch": _OF_FRAMEWORKS,
    "jax": _OF_FRAMEWORKS,
}
"""Which of ``BackendOptions`` each backend has."""

_FRAMEWORKS = {"torch": ("PyTorch", (2, 9)), "jax": ("JAX", (0, 6)), "flax": ("Flax", (0, 12))}
"""What a backend of this name, or a part of one, needs, from which version on."""


class BackendOptions(TypedDict, total=False):
    """What ``load`` passes on to a backend, which refuses what it does not have.

    Of native: ``quant``: kind that weights are converted to; ``threads``: how many compute;
    ``kv``: kind of stored keys and values; ``mmap``: whether weights are used where they lie in a
    file. Of torch and jax: ``device``, ``dtype``, ``compile``, ``numerics`` and
    ``tensor_parallel``, the device mesh, or how many devices, that share the weights; None is the
    default of each.
    """

    quant: str
    threads: int
    kv: str
    mmap: bool
    device: str | None
    dtype: str | None
    compile: str | None
    numerics: str | None
    tensor_parallel: Any


class Backend(Protocol):
    """A way to run the model."""

    def load(
        self, config: Config, weights: Weights[Any], **options: Unpack[BackendOptions]
    ) -> CausalLM:
        """Convert the weights to what this backend computes with.

        Raises ``InputError`` for an option that it does not have.
        """


def given_options(backend: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a framework's backend that are not left to it, which None does.

    Raises ``InputError`` for one that the backend does not have.
    """
    for name in options:
        if name not in OPTIONS[backend]:
            others = " and ".join(other for other, known in OPTIONS.items() if name in known)
            has = f", which is of {others}" if others else ""
            raise InputError(f"the {backend} backend has no option {name}{has}: leave it out")
    return {name: value for name, value in options.items() if value is not None}


def default_backend() -> str:
    """The name of the fastest backend that is here: native, or NumPy with a warning."""
    why = missing()
    if why is None:
        return "native"
    warnings.warn(
        f"the native engine is not here ({why}): NumPy computes instead, many times slower; "
        "install smollm2 again where a C++ compiler is",
        RuntimeWarning,
        stacklevel=2,
    )
    return "numpy"


def get_backend(name: str) -> Backend:
    """The backend of this name, imported now.

    Raises ``InputError`` for an unknown name, and ``MissingDependencyError`` where the native
    backend's extension or the framework of another is missing, or too old.
    """
    if not isinstance(name, str) or name not in BACKENDS:
        raise InputError(f"no backend named {name!r}: choose from {', '.join(BACKENDS)}")
    if name == "native" and (why := missing()):
        raise MissingDependencyError(
            f"backend='native' needs the extension of this package, which is not here ({why}): "
            "install smollm2 again where a C++ compiler is, or give backend='numpy'"
        )
    if name in _FRAMEWORKS:
        check_framework(name, f"backend={name!r}", extra=name)
    module: Any = import_module(BACKENDS[name])
    backend: Backend = module.backend
    return backend


def check_framework(name: str, what: str, *, extra: str) -> None:
    """Raise ``MissingDependencyError`` where ``what`` cannot use torch, jax or flax as it is."""
    title, least = _FRAMEWORKS[name]
    if find_spec(name) is None:
        problem = f"{title}, which is not installed"
    elif (found := _version(name)) is not None and _numbers(found) < least:
        problem = f"{title} {'.'.join(map(str, least))} or later, but {found} is installed"
    else:
        return
    raise MissingDependencyError(f"{what} needs {problem}: pip install 'smollm2[{extra}]'")


def _version(name: str) -> str | None:
    """The version of a package, None where nothing says it."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """The first two numbers of a version: (2, 10) of 2.10.0a0+git1234."""
    return tuple(int(number) for number in re.findall("[0-9]+", version)[:2])
