"""What sampling on the device of the logits keeps to: token for token what NumPy's defines.

A test module subclasses ``SamplingRules`` and gives ``chosen`` and ``mixed``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from numpy.typing import NDArray

from smollm2.errors import InputError, NumericsError
from smollm2.sampling import Choice, Sampler, SamplingParams
from smollm2.sampling.draw import mix

Logits = NDArray[np.float32]

varied = settings(deadline=None, suppress_health_check=[HealthCheck.differing_executors])


def expected(logits: Logits, choices: list[Choice]) -> list[int]:
    """What the definition chooses."""
    return [choice.of(row) for choice, row in zip(choices, logits, strict=True)]


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


def whole_vocabulary() -> tuple[Logits, list[Choice]]:
    """15 rows of 49,152 logits, and parameters of all kinds."""
    options: list[dict[str, Any]] = [
        {"temperature": 0.8},
        {"temperature": 1.0, "top_p": 0.95},
        {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
        {"temperature": 1.2, "min_p": 0.05},
        {},
    ]
    choices = [choice(position, seed=position, **options[position % 5]) for position in range(15)]
    logits = np.random.default_rng(0).standard_normal((15, 49152)) * 4
    return logits.astype(np.float32), choices


class SamplingRules:
    """Tests of a device's sampling."""

    def chosen(self, logits: Logits, choices: list[Choice]) -> list[int]:
        """What is chosen of logits [W, V] for W choices, on the device."""
        raise NotImplementedError

    def mixed(self, words: NDArray[np.uint32]) -> Any:
        """``draw.mix`` of words, on the device."""
        raise NotImplementedError

    @given(
        choices=st.lists(parameters(), min_size=1, max_size=5),
        seed=st.integers(0, 999),
        steps=st.sampled_from([None, 1.0, 8.0]),
    )
    @varied
    def test_equals_the_definition(
        self, choices: list[Choice], seed: int, steps: float | None
    ) -> None:
        """Rows of any parameters side by side; rounded logits have many ties. cases: N14"""
        rng = np.random.default_rng(seed)
        logits = rng.standard_normal((len(choices), 300)) * rng.uniform(0.1, 8)
        logits = logits.astype(np.float32)
        if steps is not None:
            logits = np.round(logits * steps) / np.float32(steps)
        assert self.chosen(logits, choices) == expected(logits, choices)

    def test_a_whole_vocabulary(self) -> None:
        logits, choices = whole_vocabulary()
        assert self.chosen(logits, choices) == expected(logits, choices)

    def test_the_first_of_equal_logits(self) -> None:
        logits = np.zeros((2, 1000), np.float32)
        logits[0, [700, 300]] = 1
        assert self.chosen(logits, [choice(), choice()]) == [300, 0]

    def test_minus_infinity_is_never_chosen(self) -> None:
        logits = np.full((1, 100), -np.inf, np.float32)
        logits[0, 42] = -7
        hot = choice(temperature=1e30, top_p=0.5, top_k=10, seed=1)
        assert self.chosen(logits, [hot]) == [42]

    @pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_what_is_no_number_is_named(self, wrong: float, temperature: float) -> None:
        """The same words as NumPy's. cases: N1"""
        logits = np.zeros((3, 50), np.float32)
        logits[1] = wrong if wrong < 0 else logits[1]
        logits[1, 20] = wrong
        choices = [choice(position=p, temperature=temperature, seed=3) for p in (4, 5, 6)]
        with pytest.raises(NumericsError) as ours:
            self.chosen(logits, choices)
        with pytest.raises(NumericsError) as theirs:
            expected(logits, choices)
        assert str(ours.value) == str(theirs.value)
        assert "position 5" in str(ours.value)

    def test_ids_outside_the_vocabulary_are_refused(self) -> None:
        with pytest.raises(InputError, match="stop_ids names token 60"):
            self.chosen(np.zeros((1, 50), np.float32), [choice(stop_ids=(60,))])

    def test_nothing_wanted(self) -> None:
        assert self.chosen(np.zeros((0, 50), np.float32), []) == []

    @given(words=st.lists(st.integers(0, 2**32 - 1), min_size=20, max_size=20))
    @varied
    def test_mixing_equals_that_of_the_draw(self, words: list[int]) -> None:
        array = np.array(words, np.uint32)
        np.testing.assert_array_equal(self.mixed(array), mix(array))
