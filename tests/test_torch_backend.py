"""The PyTorch backend: the rules of all backends, and NumPy's numbers."""

from __future__ import annotations

import pytest

from smollm2.backends.torch import TorchBackend, TorchModel
from tests.backend_rules import CONFIG, WEIGHTS, BackendRules

backend = TorchBackend()


@pytest.fixture(scope="module")
def model() -> TorchModel:
    return backend.load(CONFIG, WEIGHTS)


class TestRules(BackendRules):
    """What every backend keeps to."""
