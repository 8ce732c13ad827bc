"""Evaluation against float64 on logits that are known."""

from __future__ import annotations

import numpy as np
import pytest

from smollm2.backends.numpy import backend
from smollm2.batch import Batch, Span
from smollm2.errors import InputError
from smollm2.evaluate import Quality, evaluate, recorded, windows
from tests.tiny import random_weights, tiny_config

CONFIG = tiny_config()
IDS = [int(i) for i in np.random.default_rng(2).integers(0, CONFIG.vocab_size, 700)]


@pytest.fixture(scope="module")
def models():
    """A model, and the same with weights that are a little off."""
    exact = random_weights(CONFIG, seed=1)
    rng = np.random.default_rng(3)
    rough = exact.map(lambda _, w: (w + rng.normal(0, 0.01, w.shape)).astype(np.float32))
    return backend.load(CONFIG, rough), backend.load(CONFIG, exact)


def logprobs(lm, part) -> np.ndarray:
    """All log-probabilities in float64 from one pass without a cache."""
    logits = lm.forward(Batch.build([Span(0, 0, part, "all")])).astype(np.float64)[:-1]
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def test_three_numbers_equal_their_definitions(models) -> None:
    """cases: Q6."""
    rough, exact = models
    parts = windows(IDS, size=200)
    assert [len(part) for part in parts] == [200, 200, 200]
    quality = evaluate(rough, parts, exact)
    ours = np.concatenate([logprobs(rough, part) for part in parts])
    theirs = np.concatenate([logprobs(exact, part) for part in parts])
    targets = np.concatenate([part[1:] for part in parts])
    rows = np.arange(len(targets))
    assert quality.tokens == 3 * 199
    assert quality.perplexity == pytest.approx(np.exp(-ours[rows, targets].mean()), rel=1e-5)
    assert quality.reference_perplexity == pytest.approx(
        np.exp(-theirs[rows, targets].mean()), rel=1e-5
    )
    divergence = (np.exp(theirs) * (theirs - ours)).sum(-1).mean()
    assert divergence > 1e-4
    assert quality.mean_kl == pytest.approx(divergence, rel=1e-3)
    assert quality.top1 == (ours.argmax(-1) == theirs.argmax(-1)).mean()
    assert quality.change == pytest.approx(quality.perplexity / quality.reference_perplexity - 1)


def test_a_broken_model_has_no_end_of_perplexity(models) -> None:
    """What is far beyond a float is told as infinity, not as an error of arithmetic."""
    _, exact = models
    weights = random_weights(CONFIG, seed=1)
    loud = backend.load(
        CONFIG, weights.map(lambda name, w: w * np.float32(1e6) if "norm" in name else w)
    )
    quality = evaluate(loud, windows(IDS, size=200), exact)
    assert quality.perplexity == np.inf
    assert quality.change == np.inf
    assert not quality.tolerable


def test_a_model_agrees_with_itself(models) -> None:
    _, exact = models
    quality = evaluate(exact, windows(IDS, size=250), exact)
    assert (quality.mean_kl, quality.top1, quality.change) == (0.0, 1.0, 0.0)


def test_without_a_reference_there_is_perplexity_alone(models) -> None:
    rough, exact = models
    parts = windows(IDS, size=100, choose=[0, 3])
    alone = evaluate(rough, parts)
    assert alone == Quality(198, evaluate(rough, parts, exact).perplexity)
    assert alone.change is None


class Counting:
    """A model that counts the tokens it reads."""

    def __init__(self, lm) -> None:
        self.config, self.new_cache, self._lm = lm.config, lm.new_cache, lm
        self.tokens = 0

    def forward(self, batch, cache=None):
        self.tokens += len(batch.ids)
        return self._lm.forward(batch, cache)


@pytest.mark.parametrize("size", [2, 128, 129, 130, 233])
def test_a_recording_is_as_good_as_the_reference(models, size) -> None:
    """The same bits for windows of any length, in any order, and the reference reads once."""
    rough, exact = models
    parts = windows(IDS, size=size)[:3]
    counting = Counting(exact)
    with recorded(counting, parts) as recording:
        for lm in (rough, exact, rough):
            assert evaluate(lm, parts, recording) == evaluate(lm, parts, exact)
        for number in (2, 0, 1):
            got = np.concatenate(list(recording.logprobs(number)))
            np.testing.assert_allclose(got, logprobs(exact, parts[number]), atol=1e-4)
    assert counting.tokens == 3 * (size - 1)
    assert recording.file.closed


def test_a_recording_of_other_windows_is_refused(models) -> None:
    rough, exact = models
    one, other = windows(IDS, size=100, choose=[0]), windows(IDS, size=100, choose=[1])
    with (
        recorded(exact, one) as recording,
        pytest.raises(InputError, match="of other windows"),
    ):
        evaluate(rough, other, recording)
    with pytest.raises(InputError, match="at least two tokens"), recorded(exact, []):
        pass


def test_a_recording_needs_room(models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    message = r"on 2 windows takes 0 MB of temporary space, and .* has 0 MB free: .* TMPDIR"
    counting = Counting(models[1])
    with (
        pytest.raises(InputError, match=message),
        recorded(counting, windows(IDS, size=100, choose=[0, 1])),
    ):
        pass
    assert counting.tokens == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 701}, "less than a window of 701"),
        ({"size": 100, "choose": [7]}, "no window 7: 700 tokens are 7 windows of 100"),
        ({"size": 100, "choose": [-1]}, "no window -1"),
        ({"size": 100, "choose": []}, "less than a window"),
    ],
)
def test_windows_that_are_not_there(arguments, message) -> None:
    with pytest.raises(InputError, match=message):
        windows(IDS, **arguments)


@pytest.mark.parametrize("parts", [[], [[5]], [[5, 6], [7]]])
def test_nothing_to_score(models, parts) -> None:
    with pytest.raises(InputError, match="at least two tokens"):
        evaluate(models[0], parts)
