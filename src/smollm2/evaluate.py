"""Evaluate: what a format costs, in perplexity, KL divergence and top-1 agreement."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from smollm2.causal_lm import CausalLM
from smollm2.errors import InputError
from smollm2.lane import SCORE_CHUNK, Lane
from smollm2.sampling import log_softmax

Floats = NDArray[np.float32]
Windows = Sequence[Sequence[int]]

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


@dataclass(frozen=True, eq=False, slots=True)
class Recording:
    """What a model says of windows, in a file: [tokens that are scored, V] log-probabilities."""

    parts: Windows
    vocab_size: int
    file: BinaryIO

    def logprobs(self, number: int) -> Iterator[Floats]:
        """What was said of a window, in the same steps in which it is computed."""
        row = 4 * self.vocab_size
        self.file.seek(row * _scored(self.parts[:number]))
        left = _scored([self.parts[number]])
        while left > 0:
            count = min(SCORE_CHUNK, left)
            rows = np.frombuffer(self.file.read(row * count), dtype=np.float32)
            yield rows.reshape(count, self.vocab_size)
            left -= count


@contextmanager
def recorded(lm: CausalLM, parts: Windows) -> Iterator[Recording]:
    """Record what a model says of windows, in a temporary file that goes when the body ends.

    So several models can be held against one reference that need not be in memory with them. The
    file has 4 bytes for each token of the vocabulary and each token that is scored: 201 MB for a
    window of 1,024 tokens and SmolLM2's vocabulary.

    Raises ``InputError`` where there is no room for it, and as ``evaluate`` does.
    """
    _check(parts)
    needed, folder = 4 * lm.config.vocab_size * _scored(parts), tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise InputError(
            f"comparing several kinds on {len(parts)} windows takes {needed / 1e6:.0f} MB of "
            f"temporary space, and {folder} has {free / 1e6:.0f} MB free: choose fewer windows or "
            "one kind, or set TMPDIR to a folder on another disk"
        )
    with tempfile.TemporaryFile() as file:
        for part in parts:
            for logprobs in _logprobs(lm, part):
                file.write(logprobs.data)
        yield Recording(parts, lm.config.vocab_size, file)


def evaluate(
    lm: CausalLM, parts: Windows, reference: CausalLM | Recording | None = None
) -> Quality:
    """Read windows of token ids with a model, and with a reference if one is given.

    A ``Recording`` is one of the same windows. Logits of a few positions are held at a time.
    Raises ``InputError`` for windows without a token to score, and ``NumericsError`` where logits
    are not numbers.
    """
    _check(parts)
    if isinstance(reference, Recording) and reference.parts != parts:
        raise InputError("the recording is of other windows: record the ones that are evaluated")
    nll = reference_nll = divergence = 0.0
    agreed = 0
    for number, part in enumerate(parts):
        ours = _logprobs(lm, part)
        theirs = _reference(reference, number, part)
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
    scored = _scored(parts)
    if reference is None:
        return Quality(scored, _perplexity(nll, scored))
    return Quality(
        tokens=scored,
        perplexity=_perplexity(nll, scored),
        reference_perplexity=_perplexity(reference_nll, scored),
        mean_kl=divergence / scored,
        top1=agreed / scored,
    )


def _check(parts: Windows) -> None:
    if not parts or any(len(part) < 2 for part in parts):
        raise InputError("a window needs at least two tokens, since its first is not scored")


def _scored(parts: Windows) -> int:
    """How many tokens are scored: all but the first of each window."""
    return sum(len(part) - 1 for part in parts)


def _reference(
    reference: CausalLM | Recording | None, number: int, part: Sequence[int]
) -> Iterator[Floats | None]:
    """What a reference says of a window, None at each step where there is none."""
    if reference is None:
        return repeat(None)
    if isinstance(reference, Recording):
        return reference.logprobs(number)
    return _logprobs(reference, part)


def _logprobs(lm: CausalLM, part: Sequence[int]) -> Iterator[Floats]:
    """Log-probabilities after each token of a window but the last, a few rows at a time."""
    lane = Lane(lm, capacity=len(part))
    try:
        for logits in lane.all_logits(part[:-1]):
            yield log_softmax(logits)
    finally:
        lane.close()


def _divergence(expected: Floats, logprobs: Floats) -> float:
    """Sum over rows of KL(expected ‖ logprobs); a token that is impossible in both adds nothing."""
    difference = np.subtract(expected, logprobs, dtype=np.float64)
    weights = np.exp(expected, dtype=np.float64)
    return float(np.sum(weights * difference, where=weights > 0))


def _perplexity(nll: float, tokens: int) -> float:
    """Infinity where nothing that was written is at all likely."""
    with np.errstate(over="ignore"):
        return float(np.exp(nll / tokens))
