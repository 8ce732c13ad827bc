"""Evaluate: what a format costs, in perplexity, KL divergence and top-1 agreement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp

import numpy as np
from numpy.typing import NDArray

from smollm2.backends import CausalLM
from smollm2.errors import InputError
from smollm2.lane import Lane
from smollm2.sampling import log_softmax

WINDOW = 1024
"""Tokens that are read together; the first of each window is not scored."""


TOLERATED = 0.05
"""Change of perplexity beyond which a format is not for everyday use (and never a default)."""


@dataclass(frozen=True, slots=True)
class Quality:
    """How a model reads a text, beside a reference that reads the same.

    ``mean_kl`` is the mean over positions of KL(reference ‖ model) in nats, ``top1`` the share of
    positions where both find the same token likeliest. Without a reference they are None.
    """

    tokens: int
    perplexity: float
    reference_perplexity: float | None = None
    mean_kl: float | None = None
    top1: float | None = None

    @property
    def change(self) -> float | None:
        """Perplexity over the reference's, minus 1."""
        if self.reference_perplexity is None:
            return None
        return self.perplexity / self.reference_perplexity - 1

    @property
    def tolerable(self) -> bool:
        """Whether perplexity is changed by no more than ``TOLERATED``, as far as is known."""
        return self.change is None or abs(self.change) <= TOLERATED


def windows(
    ids: Sequence[int], *, size: int = WINDOW, choose: Sequence[int] | None = None
) -> list[Sequence[int]]:
    """Cut ids into windows of ``size`` tokens without overlap; a rest that is shorter is left out.

    ``choose`` picks windows by number. Raises ``InputError`` where there is no such window.
    """
    count = len(ids) // size
    chosen = range(count) if choose is None else choose
    for number in chosen:
        if not 0 <= number < count:
            raise InputError(
                f"there is no window {number}: {len(ids)} tokens are {count} windows of {size}"
            )
    if not chosen:
        raise InputError(f"the text has {len(ids)} tokens, less than a window of {size}")
    return [ids[number * size : (number + 1) * size] for number in chosen]


def evaluate(
    lm: CausalLM, parts: Sequence[Sequence[int]], reference: CausalLM | None = None
) -> Quality:
    """Read windows of token ids with a model, and with a reference if one is given.

    Logits of a few positions are held at a time. Raises ``InputError`` for windows without a
    token to score, and ``NumericsError`` where logits are not numbers.
    """
    if not parts or any(len(part) < 2 for part in parts):
        raise InputError("a window needs at least two tokens, since its first is not scored")
    nll = reference_nll = divergence = 0.0
    agreed = scored = 0
    for part in parts:
        ours = _logprobs(lm, part)
        theirs: Iterator[NDArray[np.float32] | None]
        theirs = _logprobs(reference, part) if reference is not None else _nothing()
        place = 1
        for logprobs, expected in zip(ours, theirs, strict=False):
            count = len(logprobs)
            rows = np.arange(count), np.asarray(part[place : place + count])
            nll -= float(logprobs[rows].sum(dtype=np.float64))
            if expected is not None:
                reference_nll -= float(expected[rows].sum(dtype=np.float64))
                divergence += _divergence(expected, logprobs)
                agreed += int((expected.argmax(-1) == logprobs.argmax(-1)).sum())
            place += count
        scored += len(part) - 1
    if reference is None:
        return Quality(scored, exp(nll / scored))
    return Quality(
        tokens=scored,
        perplexity=exp(nll / scored),
        reference_perplexity=exp(reference_nll / scored),
        mean_kl=divergence / scored,
        top1=agreed / scored,
    )


def _logprobs(lm: CausalLM, part: Sequence[int]) -> Iterator[NDArray[np.float32]]:
    """Log-probabilities after each token of a window but the last, a few rows at a time."""
    lane = Lane(lm, capacity=len(part))
    try:
        for logits in lane.all_logits(part[:-1]):
            yield log_softmax(logits)
    finally:
        lane.close()


def _nothing() -> Iterator[None]:
    while True:
        yield None


def _divergence(expected: NDArray[np.float32], logprobs: NDArray[np.float32]) -> float:
    """Sum over rows of KL(expected ‖ logprobs); a token that is impossible in both adds nothing."""
    difference = np.subtract(expected, logprobs, dtype=np.float64)
    weights = np.exp(expected, dtype=np.float64)
    return float(np.sum(weights * difference, where=weights > 0))
