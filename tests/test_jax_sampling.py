"""Sampling on the device of the logits: token for token what NumPy's definition chooses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

jax = pytest.importorskip("jax")

from smollm2.backends.jax import sampling  # noqa: E402 - JAX may be missing
from smollm2.backends.jax.sampling import choose  # noqa: E402
from smollm2.errors import InputError, NumericsError  # noqa: E402
from smollm2.sampling import Choice, Sampler, SamplingParams  # noqa: E402
from smollm2.sampling.draw import mix  # noqa: E402

SIZE = 300
ROWS = 4
"""Rows of logits, of which some pad: one shape is compiled."""


def expected(logits: NDArray[np.float32], choices: list[Choice]) -> list[int]:
    return [choice.of(row) for choice, row in zip(choices, logits, strict=True)]


def chosen(logits: NDArray[np.float32], choices: list[Choice]) -> list[int]:
    return choose(jax.numpy.asarray(logits), choices)


def choice(position: int = 5, output: tuple[int, ...] = (), **options: Any) -> Choice:
    return Choice(Sampler(SamplingParams(**options), (2,)), position, (1, 3), output)


@st.composite
def parameters(draw: st.DrawFn) -> Choice:
    options: dict[str, Any] = {
        "temperature": draw(st.sampled_from([0.0, 1e-30, 0.1, 0.8, 1.5, 100.0, 1e30])),
        "top_k": draw(st.sampled_from([0, 1, 3, 40, 10**6])),
        "top_p": draw(st.sampled_from([1.0, 1e-6, 0.3, 0.9, 0.99999])),
        "min_p": draw(st.sampled_from([0.0, 0.02, 0.5, 1.0])),
        "seed": draw(st.integers(0, 2**63 - 1)),
    }
    if draw(st.booleans()) and draw(st.booleans()):
        changes = {"repetition_penalty": 1.3, "logit_bias": {7: 5.0}, "allowed_ids": (4, 9, 20)}
        name = draw(st.sampled_from(sorted(changes)))
        options[name] = changes[name]
    return choice(draw(st.integers(0, 8191)), (7, 9), **options)


@given(
    choices=st.lists(parameters(), min_size=1, max_size=ROWS),
    seed=st.integers(0, 999),
    steps=st.sampled_from([None, 1.0, 8.0]),
)
@settings(deadline=None)
def test_equals_the_definition(choices: list[Choice], seed: int, steps: float | None) -> None:
    """Rows of any parameters side by side; rounded logits have many ties. cases: N14"""
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((ROWS, SIZE)) * rng.uniform(0.1, 8)).astype(np.float32)
    if steps is not None:
        logits = np.round(logits * steps) / np.float32(steps)
    assert chosen(logits, choices) == expected(logits[: len(choices)], choices)


def test_a_whole_vocabulary() -> None:
    rng = np.random.default_rng(0)
    options: list[dict[str, Any]] = [
        {"temperature": 0.8},
        {"temperature": 1.0, "top_p": 0.95},
        {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
        {"temperature": 1.2, "min_p": 0.05},
        {},
    ]
    choices = [choice(position, seed=position, **options[position % 5]) for position in range(15)]
    logits = (rng.standard_normal((15, 49152)) * 4).astype(np.float32)
    assert chosen(logits, choices) == expected(logits, choices)


def test_the_first_of_equal_logits() -> None:
    logits = np.zeros((2, 1000), np.float32)
    logits[0, [700, 300]] = 1
    assert chosen(logits, [choice(), choice()]) == [300, 0]


def test_minus_infinity_is_never_chosen() -> None:
    logits = np.full((1, 100), -np.inf, np.float32)
    logits[0, 42] = -7
    hot = choice(temperature=1e30, top_p=0.5, top_k=10, seed=1)
    assert chosen(logits, [hot]) == [42]


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_no_number_is_named(wrong: float, temperature: float) -> None:
    """The same words as NumPy's. cases: N1"""
    logits = np.zeros((3, 50), np.float32)
    logits[1] = wrong if wrong < 0 else logits[1]
    logits[1, 20] = wrong
    choices = [choice(position=p, temperature=temperature, seed=3) for p in (4, 5, 6)]
    with pytest.raises(NumericsError) as ours:
        chosen(logits, choices)
    with pytest.raises(NumericsError) as theirs:
        expected(logits, choices)
    assert str(ours.value) == str(theirs.value)
    assert "position 5" in str(ours.value)


def test_ids_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(InputError, match="stop_ids names token 60"):
        chosen(np.zeros((1, 50), np.float32), [choice(stop_ids=(60,))])


@given(words=st.lists(st.integers(0, 2**32 - 1), min_size=20, max_size=20))
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
        chosen(logits, [choice(position, seed=position, **params), choice()])
    assert sampling.pick._cache_size() == 1
