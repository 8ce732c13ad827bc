"""Sampling on the device of JAX: the shared rules, the search for limits, compilations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

jax = pytest.importorskip("jax")

from smollm2.backends.jax import sampling  # noqa: E402 - JAX may be missing
from smollm2.backends.jax.inputs import fit  # noqa: E402
from smollm2.sampling import Choice  # noqa: E402
from tests.sampling_rules import Logits, SamplingRules, choice  # noqa: E402


class TestRules(SamplingRules):
    """What sampling on a device keeps to."""

    def chosen(self, logits: Logits, choices: list[Choice]) -> list[int]:
        """Beside rows that pad, as a forward gives them, so that few shapes are compiled."""
        padded = np.full((max(fit(len(logits)), 8), logits.shape[1]), np.nan, np.float32)
        padded[: len(logits)] = logits
        return sampling.choose(jax.numpy.asarray(padded), choices)

    def mixed(self, words: NDArray[np.uint32]) -> Any:
        return sampling.mix(jax.numpy.asarray(words))


@jax.jit
def halved(targets: Any, tops: Any) -> Any:
    return sampling._smallest(lambda at: at >= targets, tops)


@given(
    distances=st.lists(st.integers(0, 0x7F800000), min_size=5, max_size=5),
    top=st.integers(0, 0x7F800000),
)
@settings(deadline=None)
def test_halving_finds_the_smallest(distances: list[int], top: int) -> None:
    targets = np.minimum(np.array(distances, np.int32), np.int32(top))
    np.testing.assert_array_equal(halved(targets, np.full(5, top, np.int32)), targets)


def test_one_form_of_sampling_is_compiled_once() -> None:
    """Positions, seeds and parameters are numbers that go in."""
    sampling.pick.clear_cache()
    rng = np.random.default_rng(1)
    for position in range(20):
        logits = rng.standard_normal((2, 64)).astype(np.float32)
        params = {"temperature": rng.uniform(0.1, 2), "top_k": int(rng.integers(1, 60))}
        choices = [choice(position, seed=position, **params), choice()]
        sampling.choose(jax.numpy.asarray(logits), choices)
    assert sampling.pick._cache_size() == 1
