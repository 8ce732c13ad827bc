"""Sampling on the device of the logits: token for token what NumPy's definition chooses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

jax = pytest.importorskip("jax")

from smollm2.backends.jax import sampling  # noqa: E402 - JAX may be missing
from smollm2.backends.jax.sampling import choose  # noqa: E402
from smollm2.sampling import Choice  # noqa: E402
from smollm2.sampling.draw import mix  # noqa: E402
from tests.draw_rules import DrawRules, choice  # noqa: E402


class TestRules(DrawRules):
    """What every device keeps to."""

    def choose(self, logits: NDArray[np.float32], choices: Sequence[Choice]) -> list[int]:
        return choose(jax.numpy.asarray(logits), choices)


@given(words=st.lists(st.integers(0, 2**32 - 1), min_size=20, max_size=20))
@settings(deadline=None)
def test_mixing_equals_that_of_the_draw(words: list[int]) -> None:
    array = np.array(words, np.uint32)
    np.testing.assert_array_equal(sampling.mix(jax.numpy.asarray(array)), mix(array))


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
        choose(jax.numpy.asarray(logits), [choice(position, seed=position, **params), choice()])
    assert sampling.pick._cache_size() == 1
