"""Rounding groups of 32 weights to the quantized kinds: the reference of ``native/pack/round.cpp``.

Every step is in float32 and in the same order as there, so that both give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Halves = NDArray[np.float16]
Integers = NDArray[np.int16]

GROUP = 32
_GREATEST = np.float16(65504)
_MOST = {"q8": 127, "q16": 32767}
# The farthest value at q = 0 (-8 steps), at 15 (+7 steps), and cut off a little.
_STEPS = (-8.0, -7.6, -8.3, -8.6, -7.3, -9.0, 7.0, 7.4)
_CUTS = (0.0, 0.02, 0.04, 0.07)
"""Parts of the span that are cut off both ends."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups as they are stored: q [n, 32], scale and minimum [n].

    A value is ``scale · q`` (q8, q16), ``scale · (q - 8)`` (q4) or ``scale · q + minimum`` (q4m).
    """

    q: Integers
    scale: Halves
    minimum: Halves

    def values(self, kind: str) -> Floats:
        """The values [n, 32] that the groups of a kind stand for."""
        scale = self.scale.astype(np.float32)[:, None]
        q = self.q - np.int16(8) if kind == "q4" else self.q
        values = q.astype(np.float32) * scale
        if kind == "q4m":
            values += self.minimum.astype(np.float32)[:, None]
        return values


def round_groups(values: Floats, kind: str, importance: Floats | None = None) -> Groups:
    """Round finite values [n, 32] to ``q8``, ``q16``, ``q4`` or ``q4m``.

    q8 and q16: the greatest magnitude gets 127 or 32767, to nearest by the scale as it is stored.
    q4 and q4m: of some scales (and minimums) near those that span the group, each improved once
    by least squares, the one with the least squared error, in which a value counts ``importance``
    [n, 32] times.
    """
    counts = np.ones_like(values) if importance is None else importance
    with np.errstate(all="ignore"):  # what overflows is cut off
        if kind in _MOST:
            return _by_magnitude(values, np.float32(_MOST[kind]))
        return _symmetric(values, counts) if kind == "q4" else _spanned(values, counts)


def _by_magnitude(values: Floats, most: np.float32) -> Groups:
    magnitude = np.abs(values).max(axis=1)
    scale = _finite_half(magnitude / most)
    widened = np.minimum(scale, _GREATEST)
    small = (scale < _GREATEST) & (scale.astype(np.float32) * (most + np.float32(0.5)) <= magnitude)
    scale = np.where(small, np.nextafter(widened, np.float16(np.inf)), scale)
    scale[magnitude == 0] = 0
    wide = np.where(scale == 0, 1, scale).astype(np.float32)[:, None]
    q = np.rint(np.clip(values / wide, -most, most)).astype(np.int16)
    return Groups(q, scale, np.zeros_like(scale))


def _symmetric(values: Floats, counts: Floats) -> Groups:
    farthest = np.take_along_axis(values, np.abs(values).argmax(axis=1)[:, None], axis=1)[:, 0]
    best = _Best(values, counts, np.float32(8))
    for steps in _STEPS:
        best.offer(farthest / np.float32(steps), np.zeros_like(farthest))
    zero = farthest == 0
    best.q[zero], best.scale[zero] = 8, 0
    return best.groups()


def _spanned(values: Floats, counts: Floats) -> Groups:
    low, high = values.min(axis=1), values.max(axis=1)
    span = high - low
    best = _Best(values, counts, np.float32(0))
    for cut in map(np.float32, _CUTS):
        inside = np.float32(1) - np.float32(2) * cut
        best.offer(span * inside / np.float32(15), low + cut * span)
    return best.groups()


class _Best:
    """Of the scales and minimums offered for each group, those of the least squared error."""

    def __init__(self, values: Floats, counts: Floats, zero: np.float32) -> None:
        self._values = values
        self._counts = counts
        self._total = _folded(counts)
        self._zero = zero
        self._error: Floats | None = None
        count = len(values)
        self.q = np.zeros((count, GROUP), dtype=np.float32)
        self.scale = np.zeros(count, dtype=np.float16)
        self.minimum = np.zeros(count, dtype=np.float16)

    def offer(self, scale: Floats, minimum: Floats) -> None:
        """Try these, then the ones that fit the q so found by least squares."""
        q = self._take(_finite_half(scale), _finite_half(minimum))
        if self._zero > 0:
            zeros = np.zeros_like(scale)
            refitted = _finite_half(self._slope(q, self._zero, zeros))
            self._take(refitted, zeros.astype(np.float16))
            return
        q_mean = _folded(q * self._counts) / self._total
        mean = _folded(self._values * self._counts) / self._total
        refitted = _finite_half(self._slope(q, q_mean[:, None], mean))
        self._take(refitted, _finite_half(mean - refitted.astype(np.float32) * q_mean))

    def groups(self) -> Groups:
        """What was found."""
        return Groups(self.q.astype(np.int16), self.scale, self.minimum)

    def _take(self, scale: Halves, minimum: Halves) -> Floats:
        """Round by these, keep them where they are better, and return the q."""
        wide = scale.astype(np.float32)[:, None]
        low = minimum.astype(np.float32)[:, None] - wide * self._zero
        inverse = np.where(wide == 0, np.float32(0), np.float32(1) / wide)
        steps = (self._values - low) * inverse + np.float32(0.5)
        steps = np.where(steps > 0, steps, np.float32(0))
        q: Floats = np.trunc(np.where(steps < 15, steps, np.float32(15)))
        off = wide * q + low - self._values
        error = _folded(off * off * self._counts)
        # The first one is taken whatever its error, which overflows for weights beyond 1e19.
        better = np.ones(len(q), dtype=bool) if self._error is None else error < self._error
        self._error = error if self._error is None else np.where(better, error, self._error)
        self.q[better], self.scale[better], self.minimum[better] = (
            q[better],
            scale[better],
            minimum[better],
        )
        return q

    def _slope(self, q: Floats, shift: Floats | np.float32, origin: Floats) -> Floats:
        """The slope of the values over ``q - shift``; 0 where q is constant."""
        x = q - shift
        weighted = x * self._counts
        square = _folded(weighted * x)
        product = _folded(weighted * (self._values - origin[:, None]))
        return np.where(square == 0, np.float32(0), product / square)


def _finite_half(values: Floats) -> Halves:
    """The nearest half floats, at most the greatest that is finite."""
    return np.clip(
        np.nan_to_num(values.astype(np.float16), nan=float(_GREATEST)), -_GREATEST, _GREATEST
    )


def _folded(values: Floats) -> Floats:
    """The sums of [n, 32], folded by halves: the order in which vectors add them."""
    halves = values[:, :16] + values[:, 16:]
    quarters = halves[:, :8] + halves[:, 8:]
    eighths = quarters[:, :4] + quarters[:, 4:]
    folded: Floats = (eighths[:, 0] + eighths[:, 2]) + (eighths[:, 1] + eighths[:, 3])
    return folded
