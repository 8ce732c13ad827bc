"""The draw: one token from scores, by a hash of (seed, position, token id) and nothing else.

Gumbel's trick: the largest of ``score - log(-log u)`` is a sample of ``softmax(scores)`` when the
``u`` are uniform and independent. Here u comes from a counter-based hash, so the token drawn at a
position does not depend on the batch, on earlier draws or on the backend. Integers are uint32 and
wrap, floats are float32, so that every framework can repeat it::

    key  = mix(low 32 bits of seed  XOR  mix(high bits of seed))
    bits = mix(mix(key XOR position) XOR token id)
    u    = ((bits >> 9) + 0.5) / 2**23

``mix(0)`` is 0, so for seeds below 2**32 the key is ``mix(seed)``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SEED_LIMIT = 2**63
"""Seeds are 0 <= seed < SEED_LIMIT, so that they fit a signed 64-bit integer."""

UNLIKELY = -20.0
"""A score this far from the best is never drawn: ``-log(-log u)`` lies between -2.82 and 16.64."""

_LOW = 0xFFFFFFFF


def mix(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Scramble 32 bits, one to one: lowbias32 of Chris Wellons' hash-prospector.

    Takes arrays of at least one dimension, because NumPy warns when a scalar wraps.
    """
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def counter(seed: int, position: int) -> NDArray[np.uint32]:
    """Return ``mix(key XOR position)``, [1]: what all tokens of a position have in common."""
    key = mix(_word(seed) ^ mix(_word(seed >> 32)))
    return mix(key ^ _word(position))


def uniforms(ids: NDArray[np.integer], seed: int, position: int) -> NDArray[np.float32]:
    """Return a number in (0, 1) for each token id, [n] float32, all multiples of 2**-24."""
    bits = mix(counter(seed, position) ^ ids.astype(np.uint32))
    uniform: NDArray[np.float32] = (bits >> np.uint32(9)).astype(np.float32)
    uniform += np.float32(0.5)
    uniform *= np.float32(2.0**-23)
    return uniform


def draw(scores: NDArray[np.float32], ids: NDArray[np.integer], seed: int, position: int) -> int:
    """Return the index into ``ids`` of one token drawn from ``softmax(scores)``, first of ties.

    ``scores`` [n] float32 of the tokens ``ids`` [n]; ``position`` is the absolute position of the
    token being chosen. The largest score is a finite number.
    """
    noise = -np.log(-np.log(uniforms(ids, seed, position)))
    return int(np.argmax(scores + noise))


def _word(number: int) -> NDArray[np.uint32]:
    return np.array([number & _LOW], dtype=np.uint32)
