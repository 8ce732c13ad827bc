"""The JAX backend: the shared rules, dtypes against NumPy, compilations, memory in place."""

from __future__ import annotations

import pytest

pytest.importorskip("jax")

from smollm2.backends.jax import backend
from smollm2.backends.jax.model import JaxModel
from tests.backend_rules import CONFIG, WEIGHTS, BackendRules


@pytest.fixture(scope="session")
def model() -> JaxModel:
    return backend.load(CONFIG, WEIGHTS, device="cpu")


class TestRules(BackendRules):
    """What every backend keeps to."""
