"""Logits processors: the penalties, the temperature, and the filters that keep likely tokens.

Penalties work in place on scores [V] float32 and touch only the tokens that they name. All
filters (top-k, top-p, min-p) together are one limit on the score, so tokens of equal score are
kept or dropped together and the best one is always kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from smollm2.errors import InputError

Scores = NDArray[np.float32]
Ids = NDArray[np.intp]

_FLOAT32 = np.finfo(np.float32)
_BINS_PER_UNIT = 64


def tally(ids: Sequence[int], exempt: Ids, vocab_size: int) -> tuple[Ids, Ids]:
    """Return the distinct tokens of ``ids`` but the exempt ones, and how often each occurs.

    Raises ``InputError`` for an id outside the vocabulary.
    """
    tokens, counts = np.unique(np.asarray(ids, dtype=np.intp), return_counts=True)
    if len(tokens) and not 0 <= tokens[0] <= tokens[-1] < vocab_size:
        wrong = tokens[0] if tokens[0] < 0 else tokens[-1]
        raise InputError(f"token id {wrong} is not in the vocabulary of {vocab_size} tokens")
    counted = np.isin(tokens, exempt, invert=True)
    return tokens[counted], counts[counted].astype(np.intp)


def penalize_repetition(scores: Scores, tokens: Ids, powers: Ids | int, penalty: float) -> None:
    """Divide positive and multiply negative scores of ``tokens`` by ``penalty ** powers``.

    Source: Keskar et al., CTRL (arXiv:1909.05858), in the signed form that transformers uses.
    """
    with np.errstate(over="ignore", under="ignore"):
        # Within these limits a factor times any float32 is a finite float64.
        factor = np.clip(np.power(penalty, np.asarray(powers, dtype=np.float64)), 1e-200, 1e200)
    touched = scores[tokens].astype(np.float64)
    touched = np.where(touched > 0, touched / factor, touched * factor)
    scores[tokens] = np.clip(touched, _FLOAT32.min, _FLOAT32.max)


def penalize_presence(
    scores: Scores, tokens: Ids, counts: Ids, presence: float, frequency: float
) -> None:
    """Subtract ``presence + frequency * count`` from the scores of ``tokens`` (OpenAI's rule)."""
    scores[tokens] -= (presence + frequency * counts).astype(np.float32)


def temper(scores: Scores, temperature: float) -> Scores:
    """Return ``(scores - max(scores)) / temperature``, for a temperature above 0.

    The best score becomes 0, so nothing overflows; the shift changes no probability.
    """
    divisor = np.float32(min(max(temperature, float(_FLOAT32.tiny)), float(_FLOAT32.max)))
    with np.errstate(over="ignore", under="ignore"):
        tempered: Scores = (scores - scores.max()) / divisor
    return tempered


def cutoff(scores: Scores, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> float:
    """Return the smallest tempered score [n] that passes top-k, then top-p, then min-p.

    - top-k: the ``top_k`` largest (0: all)
    - top-p: by falling probability among what is left, as long as the sum of those before is
      below ``top_p`` (1: all)
    - min-p: probability of at least ``min_p`` times the largest (0: all)

    Tokens of this score and above are kept: ties with the last one are kept too.
    """
    limit = -math.inf
    left = scores
    if 0 < top_k < len(scores):
        cut = len(scores) - top_k
        limit = float(np.partition(scores, cut)[cut])
        left = scores[scores >= limit]
    if top_p < 1:
        limit = _top_p_cutoff(left, top_p)
    if min_p > 0:
        # The best score is 0, so a score is the log of the probability over the largest one.
        limit = max(limit, math.log(min_p))
    return limit


def _top_p_cutoff(scores: Scores, top_p: float) -> float:
    """Return the score at which the falling sum of weights reaches ``top_p`` of all.

    Sorts only the scores of one bin of a histogram, the one that the sum ends in.
    """
    weights = np.exp(scores)
    total = float(weights.sum(dtype=np.float64))
    # All tokens lighter than this together weigh less than 1 - top_p, so none of them is kept.
    # The factor is room for rounding.
    heavy = weights >= 0.999 * (1 - top_p) * total / len(scores)
    scores, weights = scores[heavy], weights[heavy]
    bins = (scores * np.float32(-_BINS_PER_UNIT)).astype(np.intp)
    sums = np.bincount(bins, weights=weights).cumsum()
    last = _first_at_least(sums, top_p * total)
    before = sums[last - 1] if last else 0.0
    falling = -np.sort(-scores[bins == last])
    sums = before + np.exp(falling).cumsum(dtype=np.float64)
    return float(falling[_first_at_least(sums, top_p * total)])


def _first_at_least(rising: NDArray[np.float64], limit: float) -> int:
    """Return the first index whose value reaches ``limit``, or the last of all."""
    return min(int(np.searchsorted(rising, limit)), len(rising) - 1)
