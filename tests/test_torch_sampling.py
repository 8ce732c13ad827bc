"""Sampling on the device of the logits: token for token what NumPy's definition chooses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray

torch = pytest.importorskip("torch")

from smollm2.backends.torch import TorchBackend, sampling  # noqa: E402 - torch may be missing
from smollm2.backends.torch.sampling import choose  # noqa: E402
from smollm2.batch import Span  # noqa: E402
from smollm2.errors import CacheError, InputError, NumericsError  # noqa: E402
from smollm2.sampling import Choice, Sampler, SamplingParams  # noqa: E402
from smollm2.sampling.draw import counter, mix, uniforms  # noqa: E402
from tests.backend_rules import CONFIG, IDS, WEIGHTS, over_pages  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]


def expected(logits: NDArray[np.float32], choices: list[Choice]) -> list[int]:
    return [choice.of(row) for choice, row in zip(choices, logits, strict=True)]


def chosen(logits: NDArray[np.float32], choices: list[Choice], device: str = "cpu") -> list[int]:
    return choose(torch.from_numpy(logits).to(device), choices)


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
    choices=st.lists(parameters(), min_size=1, max_size=5),
    seed=st.integers(0, 999),
    steps=st.sampled_from([None, 1.0, 8.0]),
)
def test_equals_the_definition(choices: list[Choice], seed: int, steps: float | None) -> None:
    """Rows of any parameters side by side; rounded logits have many ties. cases: N14"""
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((len(choices), 300)) * rng.uniform(0.1, 8)).astype(np.float32)
    if steps is not None:
        logits = np.round(logits * steps) / np.float32(steps)
    assert chosen(logits, choices) == expected(logits, choices)


@pytest.mark.parametrize("device", DEVICES)
def test_a_whole_vocabulary(device: str) -> None:
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
    assert chosen(logits, choices, device) == expected(logits, choices)


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


def test_nothing_wanted() -> None:
    assert chosen(np.zeros((0, 50), np.float32), []) == []


@given(words=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20))
def test_mixing_in_64_bits_equals_32(words: list[int]) -> None:
    ours = sampling.mix(torch.tensor(words))
    assert ours.tolist() == mix(np.array(words, np.uint32)).tolist()


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
