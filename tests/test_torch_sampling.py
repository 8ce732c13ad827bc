"""Sampling on the device of torch: the shared rules, the noise, and choices that fail."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray

torch = pytest.importorskip("torch")

from smollm2.backends.torch import TorchBackend, sampling  # noqa: E402 - torch may be missing
from smollm2.batch import Span  # noqa: E402
from smollm2.errors import CacheError, InputError  # noqa: E402
from smollm2.sampling import Choice  # noqa: E402
from smollm2.sampling.draw import counter, uniforms  # noqa: E402
from tests.backend_rules import CONFIG, IDS, WEIGHTS, over_pages  # noqa: E402
from tests.sampling_rules import (  # noqa: E402
    Logits,
    SamplingRules,
    choice,
    expected,
    whole_vocabulary,
)

pytestmark = pytest.mark.usefixtures("one_thread")


class TestRules(SamplingRules):
    """What sampling on a device keeps to; mixing is of 32 bits in 64."""

    def chosen(self, logits: Logits, choices: list[Choice]) -> list[int]:
        return sampling.choose(torch.from_numpy(logits), choices)

    def mixed(self, words: NDArray[np.uint32]) -> Any:
        return sampling.mix(torch.tensor(words.tolist()))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_whole_vocabulary_on_a_gpu() -> None:
    logits, choices = whole_vocabulary()
    found = sampling.choose(torch.from_numpy(logits).cuda(), choices)
    assert found == expected(logits, choices)


@given(seed=st.integers(0, 2**63 - 1), position=st.integers(0, 2**31))
def test_noise_is_that_of_the_draw(seed: int, position: int) -> None:
    counters = torch.tensor([[int(counter(seed, position)[0])]])
    exact = -np.log(-np.log(uniforms(np.arange(500), seed, position).astype(np.float64)))
    np.testing.assert_allclose(
        sampling.noise(counters, 500)[0].numpy(), exact, rtol=2e-5, atol=1e-6
    )


def test_a_choice_on_the_device_that_failed_stored_nothing(monkeypatch: Any) -> None:
    """Where ids are chosen before the pass counts as stored; on any device, were it not told."""
    model = TorchBackend().load(CONFIG, WEIGHTS)
    cache, table = model.new_paged_cache(3), [[2, 1]]
    model.forward(over_pages(table, Span(0, 0, IDS[:100])), cache)
    monkeypatch.setattr(model, "device", torch.device("cuda"))
    again = over_pages(table, Span(0, 80, IDS[80:82]))
    for wrong in ([], [choice(logit_bias={96: 1.0})]):
        with pytest.raises(InputError):
            model.choose(again, wrong, cache)
    with pytest.raises(CacheError, match="page 1 of row 0 holds 16 tokens"):
        model.forward(over_pages(table, Span(0, 100, [1])), cache)
    assert model.choose(again, [choice()], cache) == model.choose(again, [choice()], cache)
