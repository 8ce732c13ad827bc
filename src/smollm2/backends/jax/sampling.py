"""Sampling on the device of the logits, so that ids come back and nothing else.

The same steps as ``smollm2.sampling.sampler`` from the temperature on, for all rows at once. Rows
with penalties, biases or allowed ids go to the definition itself, on the host. Exponentials,
logarithms and sums are XLA's, so ids can differ from NumPy's where two scores are equal but for
the last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf, log
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from smollm2.sampling import Choice, SamplingParams
from smollm2.sampling.draw import UNLIKELY, counter
from smollm2.sampling.logprobs import check_logits

_FLOAT32 = np.finfo(np.float32)
_INFINITE = 0x7F800000
"""The bits of an infinite float32, above those of all finite ones."""


class Settings(NamedTuple):
    """How each of W rows is drawn from: arrays [W], the counters uint32, the others float32.

    ``temperatures`` are 0 where the best is taken; ``floors`` are the smallest tempered scores
    that min-p lets pass.
    """

    temperatures: Any
    top_k: Any
    top_p: Any
    floors: Any
    counters: Any


def choose(logits: jax.Array, choices: Sequence[Choice]) -> list[int]:
    """Ids that follow by logits [at least W, V] float32, one of each of W ``choices``.

    Raises as ``Sampler.choose`` does.
    """
    for choice in choices:
        choice.sampler.params.check_ids(logits.shape[1])
    params = [choice.sampler.params for choice in choices]
    settings = None
    if any(p.temperature > 0 for p in params):
        settings = _settings(choices, len(logits))
    filtered = any(p.top_k > 0 or p.top_p < 1 for p in params)
    ids, bits = np.asarray(pick(logits, settings, filtered=filtered))
    for best, choice in zip(bits.view(np.float32), choices, strict=False):
        check_logits(best, choice.position)
    chosen: list[int] = ids[: len(choices)].tolist()
    if any(p.changes_scores for p in params):
        rows = np.asarray(logits)
        for row, choice in enumerate(choices):
            if params[row].changes_scores:
                chosen[row] = choice.of(rows[row])
    return chosen


@partial(jax.jit, static_argnames="filtered")
def pick(logits: jax.Array, settings: Settings | None, *, filtered: bool) -> jax.Array:
    """Ids by logits [W, V], and the bits of the largest logits: [2, W] int32.

    Without ``settings`` the first of the largest logits; ``filtered``: whether any row has a top-k
    or a top-p.
    """
    best = jnp.max(logits, axis=-1)
    ids = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if settings is not None:
        drawn = _draw(logits - best[:, None], settings, filtered).astype(jnp.int32)
        ids = jnp.where(settings.temperatures > 0, drawn, ids)
    return jnp.stack([ids, lax.bitcast_convert_type(best, jnp.int32)])


def _settings(choices: Sequence[Choice], rows: int) -> Settings:
    """The settings of the choices, and of rows that pad."""

    def column(dtype: type, numbers: Sequence[float]) -> NDArray[Any]:
        return np.array([*numbers, *[1] * (rows - len(choices))], dtype)

    params = [choice.sampler.params for choice in choices]
    counters = [int(counter(c.sampler.params.seed or 0, c.position)[0]) for c in choices]
    return Settings(
        temperatures=column(np.float32, [_temperature(p) for p in params]),
        top_k=column(np.int32, [min(p.top_k, 2**31 - 1) for p in params]),
        top_p=column(np.float32, [p.top_p for p in params]),
        floors=column(np.float32, [max(log(p.min_p or 1e-300), UNLIKELY) for p in params]),
        counters=column(np.uint32, counters),
    )


def _temperature(params: SamplingParams) -> float:
    """What scores are divided by, as ``processors.temper`` has it; 0 where nothing is drawn."""
    if params.temperature == 0:
        return 0.0
    return min(max(params.temperature, float(_FLOAT32.tiny)), float(_FLOAT32.max))


def _draw(scores: jax.Array, settings: Settings, filtered: bool) -> jax.Array:
    """Draw by scores [W, V] whose best is 0: ids [W]."""
    temperatures = jnp.where(settings.temperatures > 0, settings.temperatures, 1)
    scores = scores / temperatures[:, None]
    kept = scores >= settings.floors[:, None]
    if filtered:
        kept &= _passing(scores, settings.top_k, settings.top_p)
    ids = jnp.arange(scores.shape[1], dtype=jnp.uint32)
    bits = mix(settings.counters[:, None] ^ ids) >> 9
    uniform = (bits.astype(jnp.float32) + 0.5) * np.float32(2.0**-23)
    noise = -jnp.log(-jnp.log(uniform))
    return jnp.argmax(jnp.where(kept, scores + noise, -inf), axis=-1)


def mix(x: jax.Array) -> jax.Array:
    """``draw.mix``."""
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _passing(scores: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Which scores [W, V], at most 0, pass top-k and then top-p: see ``processors.cutoff``.

    The bits of floats from 0 on are in their order, so limits are found among the bits by halving:
    31 sums over the vocabulary are many times faster than a sort of it.
    """
    below = lax.bitcast_convert_type(jnp.abs(scores), jnp.int32)  # 0 is the best
    size = scores.shape[1]
    needed = jnp.where((top_k > 0) & (top_k < size), top_k, size)
    top = jnp.full_like(needed, _INFINITE)
    limit = _smallest(lambda at: jnp.sum(below <= at[:, None], axis=-1) >= needed, top)
    weights = jnp.where(below <= limit[:, None], jnp.exp(scores), 0)

    def weight(at: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(below <= at[:, None], weights, 0), axis=-1)

    share = top_p * weight(limit)
    limit = jnp.where(top_p < 1, _smallest(lambda at: weight(at) >= share, limit), limit)
    return below <= limit[:, None]


def _smallest(reached: Callable[[jax.Array], jax.Array], top: jax.Array) -> jax.Array:
    """The smallest numbers [W] from 0 to ``top`` where what is reached at ``top`` is so already."""

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        enough = reached(middle)
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    found: jax.Array = lax.fori_loop(0, 31, halve, (jnp.zeros_like(top), top))[1]
    return found
