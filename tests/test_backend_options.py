"""Options of the frameworks' backends: None is the default of each, and what is wrong says so."""

from __future__ import annotations

from typing import Any

import pytest

from smollm2.backends import OPTIONS, BackendOptions, get_backend, given_options
from smollm2.errors import InputError
from tests.tiny import random_weights, tiny_config

CONFIG = tiny_config()
WEIGHTS = random_weights(CONFIG)
NAMES = ("device", "dtype", "compile", "numerics", "tensor_parallel")


def numbers_of(model: Any) -> list[Any]:
    """What options decide: dtype, device and numerics of torch or JAX."""
    device = getattr(model, "device", None) or model.weights.final_norm.devices()
    return [model.dtype, device, getattr(model, "exact", None) or model.ops]


@pytest.mark.parametrize("backend", ["torch", "jax"])
@pytest.mark.parametrize("options", [dict.fromkeys(NAMES), *({name: None} for name in NAMES)])
def test_none_is_the_default(backend: str, options: dict[str, Any]) -> None:
    pytest.importorskip(backend)
    load = get_backend(backend).load
    assert numbers_of(load(CONFIG, WEIGHTS, **options)) == numbers_of(load(CONFIG, WEIGHTS))


@pytest.mark.parametrize("backend", ["torch", "jax"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [7.5, "", [], {"a": 1}])
def test_values_that_are_none_of_its_kind_are_named(backend: str, name: str, value: Any) -> None:
    pytest.importorskip(backend)
    options: Any = {name: value}
    with pytest.raises(InputError, match=name) as error:
        get_backend(backend).load(CONFIG, WEIGHTS, **options)
    assert "\n" not in str(error.value)


def test_what_is_given() -> None:
    assert given_options("torch", {"dtype": "float16", "device": None}) == {"dtype": "float16"}


@pytest.mark.parametrize(
    ("backend", "name", "whose"),
    [
        ("torch", "quant", ", which is of native"),
        ("native", "device", ", which is of torch and jax"),
        ("numpy", "threads", ", which is of native"),
        ("jax", "colour", ""),
    ],
)
def test_options_of_another_backend_say_whose_they_are(backend: str, name: str, whose: str) -> None:
    """So a ``device`` without a ``backend`` leads to the backends that have one."""
    options: Any = {name: "x"}
    with pytest.raises(InputError) as error:
        get_backend(backend).load(CONFIG, WEIGHTS, **options)
    assert str(error.value) == f"the {backend} backend has no option {name}{whose}: leave it out"


def test_every_option_is_of_some_backend() -> None:
    known = {name for names in OPTIONS.values() for name in names}
    assert known == set(BackendOptions.__annotations__)
