"""Bench: what is fed is what is said; the clock itself is not tested."""

from __future__ import annotations

import pytest

from smollm2.bench import WARM_DEPTH, Workload, measure
from smollm2.errors import InputError
from tests.fakes import ScriptedModel
from tests.tiny import tiny_config


def test_what_is_fed() -> None:
    lm = ScriptedModel({}, config=tiny_config(vocab_size=260, max_position_embeddings=4096))
    speed = measure(lm, Workload(prompt=1100, decode=4, depth=600, batch=3, repeats=1))
    prompt = [512, 512, 76]
    depth = [512, 88] * 3
    assert lm.fed == [*prompt, *depth, *[3] * 4]
    assert speed.prefill > 0
    assert speed.decode > 0


def test_the_best_of_all_repeats_and_a_warm_start() -> None:
    lm = ScriptedModel({})
    measure(lm, Workload(prompt=5, decode=2, repeats=2))
    assert lm.fed == [5, 5, *[WARM_DEPTH, 1, 1] * 2]


@pytest.mark.parametrize("name", ["prompt", "decode", "batch", "repeats"])
def test_counts_are_positive(name: str) -> None:
    with pytest.raises(InputError, match=f"{name} is 0: it must be at least 1"):
        Workload(**{name: 0})
    with pytest.raises(InputError, match="depth is -1"):
        Workload(depth=-1)


def test_a_workload_must_fit_the_context() -> None:
    with pytest.raises(
        InputError, match="300 tokens a row are more than the context length of 256"
    ):
        measure(ScriptedModel({}), Workload(prompt=300))
