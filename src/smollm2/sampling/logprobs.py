"""Logprobs: what the model itself gave to tokens, before any logits processor.

A logprob is the natural logarithm of a token's probability: log-softmax of the raw logits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from smollm2.errors import NumericsError


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its logprob, and the most likely tokens at its place.

    ``rank`` counts from 1 in the order of ``top``: falling logprob, then rising id. ``top`` holds
    as many (token id, logprob) as were asked for, whether or not the token is among them.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


def log_softmax(logits: NDArray[np.floating]) -> NDArray[np.float32]:
    """Log-softmax over the last axis: [..., V] → [..., V] float32, summed in float64.

    Raises ``NumericsError`` where a row holds NaN or +inf, or nothing but -inf.
    """
    rows: NDArray[np.float32] = np.asarray(logits, dtype=np.float32)
    peak = rows.max(axis=-1, keepdims=True)
    if not np.isfinite(peak).all():
        raise NumericsError(f"the logits hold {_oddity(peak)}: the weights may be damaged")
    with np.errstate(over="ignore"):
        logprobs: NDArray[np.float32] = rows - peak
    total = np.exp(logprobs).sum(axis=-1, keepdims=True, dtype=np.float64)
    logprobs -= np.log(total).astype(np.float32)
    return logprobs


def logprob_of(logits: NDArray[np.floating], token_id: int, top: int = 0) -> TokenLogprob:
    """Return the logprob of ``token_id`` by raw logits [V], with the ``top`` most likely tokens.

    Raises ``NumericsError`` as ``log_softmax`` does.
    """
    logprobs = log_softmax(logits)
    own = logprobs[token_id]
    rank = 1 + np.count_nonzero(logprobs > own) + np.count_nonzero(logprobs[:token_id] == own)
    return TokenLogprob(token_id, float(own), int(rank), _most_likely(logprobs, top))


def check_logits(best: np.floating, position: int) -> None:
    """Raise ``NumericsError`` unless the largest logit of a position is a finite number.

    NumPy's ``max`` and ``argmax`` pick NaN over +inf over any number, so the largest alone tells
    whether logits hold NaN or +inf, or nothing but -inf.
    """
    if not math.isfinite(best):
        raise NumericsError(
            f"the logits at position {position} hold {_oddity(best)}: the weights may be damaged, "
            "or overflow in this dtype"
        )


def _oddity(peak: NDArray[np.floating] | np.floating) -> str:
    if np.isnan(peak).any():
        return "NaN"
    return "+inf" if np.isposinf(peak).any() else "nothing but -inf"


def _most_likely(logprobs: NDArray[np.float32], top: int) -> tuple[tuple[int, float], ...]:
    if top <= 0:
        return ()
    cut = max(len(logprobs) - top, 0)
    ids = np.flatnonzero(logprobs >= np.partition(logprobs, cut)[cut])
    # The ids rise already, and a stable sort leaves those of equal logprob so.
    order = np.argsort(-logprobs[ids], kind="stable")[:top]
    return tuple((int(i), float(logprobs[i])) for i in ids[order])
