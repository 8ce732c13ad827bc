"""The PyTorch backend: the rules of all backends, and NumPy's numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from smollm2.backends.torch import TorchBackend, TorchModel
from smollm2.batch import Span
from tests.backend_rules import CONFIG, IDS, WEIGHTS, BackendRules, full, spans

backend = TorchBackend()


@pytest.fixture(scope="module")
def model() -> TorchModel:
    return backend.load(CONFIG, WEIGHTS)


class TestRules(BackendRules):
    """What every backend keeps to."""


def test_memory_that_was_never_written_is_not_read(model: TorchModel) -> None:
    """Rows of two lengths decode side by side, while new memory is full of NaN."""
    cache = model.new_cache(2, 64)
    torch.use_deterministic_algorithms(True)  # which fills it
    try:
        model.forward(spans(cache, Span(0, 0, IDS[:9]), Span(1, 0, IDS[:3])), cache)
        logits = model.forward(spans(cache, Span(0, 9, IDS[9:10]), Span(1, 3, IDS[3:4])), cache)
    finally:
        torch.use_deterministic_algorithms(False)
    for row, count in enumerate((10, 4)):
        np.testing.assert_allclose(logits[row], full(model, IDS[:count])[-1], atol=1e-5)
