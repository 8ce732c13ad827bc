"""Losses: what packed sequences are worth to a model, as pure functions that can be differentiated.

P tokens, C hidden, V vocabulary. Neither P × V logits nor P × P scores are ever held, nor the
activations of more than one layer: a derivative makes them again, a part at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from smollm2.backends.jax.inputs import Inputs, fit_reach, fit_tokens
from smollm2.backends.jax.layers import is_stacked
from smollm2.backends.jax.ops import JaxOps, Plan
from smollm2.causal_lm import NO_TARGET, check_positions
from smollm2.errors import InputError
from smollm2.model import forward, head_of, hidden
from smollm2.weights import Block, Weights

LOGITS_CHUNK = 128
"""Tokens whose logits are held at a time."""

JaxWeights: TypeAlias = Weights[jax.Array]


@dataclass(frozen=True, slots=True)
class TrainingOps(JaxOps):
    """The same operations where a derivative is wanted.

    Layers are steps of a loop, and stacked for it where they are not: XLA for CPUs finds the layers
    that a derivative makes again to be those that were there, and keeps everything, but does not
    look across the steps of a loop.
    """

    def blocks(
        self,
        x: jax.Array,
        blocks: Sequence[Block[jax.Array]],
        plan: Plan,
        block: Callable[[jax.Array, Block[jax.Array], int, Plan], jax.Array],
    ) -> jax.Array:
        """One layer after the other, each made again for a derivative."""

        @jax.checkpoint
        def step(x: jax.Array, weights: Block[jax.Array]) -> tuple[jax.Array, None]:
            return block(x, weights, 0, plan), None  # a layer's number is its place in a cache

        whole = is_stacked(blocks)
        stack = blocks[0] if whole else jax.tree.map(lambda *layers: jnp.stack(layers), *blocks)
        result: jax.Array = lax.scan(step, x, stack)[0]
        return result


def training(ops: JaxOps) -> TrainingOps:
    """The operations with those of ``TrainingOps`` among them."""
    return TrainingOps(ops.config, ops.numerics)


def log_probs(
    states: jax.Array, head: jax.Array, targets: jax.Array, precision: lax.Precision
) -> jax.Array:
    """Log-probability of each target [P] by hidden states [P, C] and a head [V, C], [P] float32.

    0 where a target is negative. Of a head that is split over its rows each device makes its own
    part of the logits, and only sums over them are exchanged.
    """

    @jax.checkpoint
    def part(each: tuple[jax.Array, jax.Array]) -> jax.Array:
        states, targets = each
        logits = lax.dot_general(
            states,
            head,
            (((1,), (1,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        chosen = lax.broadcasted_iota(jnp.int32, logits.shape, 1) == targets[:, None]
        return jnp.where(chosen, logits, 0).sum(-1) - jax.nn.logsumexp(logits, axis=-1)

    count = len(targets)
    size = min(LOGITS_CHUNK, count)
    missing = -count % size
    parts = (
        jnp.pad(states, ((0, missing), (0, 0))).reshape(-1, size, states.shape[1]),
        jnp.pad(targets, (0, missing)).reshape(-1, size),
    )
    found = lax.map(part, parts).reshape(-1)[:count]
    return jnp.where(targets < 0, 0, found)


@partial(jax.jit, static_argnames="ops")
def wanted_log_probs(
    weights: JaxWeights, inputs: Inputs, targets: jax.Array, *, ops: JaxOps
) -> jax.Array:
    """Log-probability of the target of each wanted token, [W] float32; 0 where it is negative."""
    states = hidden(weights, ops, ops.plan(inputs))
    return log_probs(states, head_of(weights), targets, ops.precision)


@partial(jax.jit, static_argnames=("text", "ops"))
def _run(
    weights: JaxWeights,
    inputs: Inputs,
    *,
    text: Callable[[JaxWeights, JaxOps, Plan], jax.Array],
    ops: JaxOps,
) -> jax.Array:
    return text(weights, ops, ops.plan(inputs)).astype(jnp.float32)


def hidden_packed(
    weights: JaxWeights,
    tokens: jax.Array,
    positions: jax.Array,
    segments: jax.Array,
    *,
    ops: JaxOps,
    reach: int | None = None,
) -> jax.Array:
    """Hidden states after the final norm of packed sequences [P] each, [P, C] float32.

    Token p is at ``positions[p]`` and sees the tokens of its segment up to there; segment -1 is
    padding, and gives zeros. ``reach`` makes it faster, where it is known that no token sees one
    that lies more than so many before it, and that each segment lies in one, in rising order.
    """
    _check(ops, tokens, positions, segments)
    inputs = _inputs(tokens, positions, segments, reach)
    states: jax.Array = _run(weights, inputs, text=hidden, ops=training(ops))
    return jnp.where(jnp.asarray(segments)[:, None] < 0, 0, states[: len(tokens)])


def logits_packed(
    weights: JaxWeights,
    tokens: jax.Array,
    positions: jax.Array,
    segments: jax.Array,
    *,
    ops: JaxOps,
    reach: int | None = None,
) -> jax.Array:
    """Logits of all tokens of packed sequences, [P, V] float32; see ``hidden_packed``."""
    _check(ops, tokens, positions, segments)
    inputs = _inputs(tokens, positions, segments, reach)
    logits: jax.Array = _run(weights, inputs, text=forward, ops=training(ops))
    return logits[: len(tokens)]


def log_probs_packed(
    weights: JaxWeights,
    tokens: jax.Array,
    positions: jax.Array,
    segments: jax.Array,
    targets: jax.Array,
    *,
    ops: JaxOps,
    reach: int | None = None,
) -> jax.Array:
    """Log-probability of each target after its token, [P] float32; see ``hidden_packed``.

    0 where the target is -100 or the token is padding. Raises ``InputError`` for another target
    that is not in the vocabulary, where it is known: not while JAX traces the arrays.
    """
    _check(ops, tokens, positions, segments, targets)
    _check_targets(ops, segments, targets)
    inputs = _inputs(tokens, positions, segments, reach)
    learned = jnp.where(jnp.asarray(segments) < 0, -1, jnp.asarray(targets, jnp.int32))
    padded = _padded(learned, len(inputs.ids), -1)
    found: jax.Array = wanted_log_probs(weights, inputs, padded, ops=training(ops))
    return found[: len(tokens)]


def loss_packed(
    weights: JaxWeights,
    tokens: jax.Array,
    positions: jax.Array,
    segments: jax.Array,
    targets: jax.Array,
    factors: jax.Array,
    *,
    ops: JaxOps,
    reach: int | None = None,
) -> jax.Array:
    """Sum of ``factors`` [P] · -log p(target), float32; see ``log_probs_packed``.

    ``jax.grad`` gives its gradient by the weights. A target of factor 0 may be anything.
    """
    _check(ops, tokens, positions, segments, targets, factors=factors)
    learned = jnp.where(jnp.asarray(factors) == 0, NO_TARGET, jnp.asarray(targets, jnp.int32))
    found = log_probs_packed(weights, tokens, positions, segments, learned, ops=ops, reach=reach)
    return -jnp.sum(factors * found)


def _check(ops: JaxOps, *ints: jax.Array, factors: jax.Array | None = None) -> None:
    """Raise ``InputError`` for arrays of other shapes or kinds; for numbers that are known, too."""
    shapes = [jnp.shape(array) for array in (*ints, *([] if factors is None else [factors]))]
    if len(shapes[0]) != 1 or shapes[0] == (0,) or len(set(shapes)) > 1:
        raise InputError(
            f"packed sequences are arrays [P] of the same P > 0, not {', '.join(map(str, shapes))}"
        )
    for array in ints:
        if not jnp.issubdtype(dtype := jnp.asarray(array).dtype, jnp.integer):
            raise InputError(f"packed sequences are whole numbers, not {dtype}: factors come last")
    tokens, positions, segments, *_ = ints
    if isinstance(segments, jax.core.Tracer):
        return
    real = np.asarray(segments) >= 0
    if not isinstance(tokens, jax.core.Tracer):
        wrong = _outside(ops, tokens, real)
        if len(wrong) > 0:
            size = ops.config.vocab_size
            raise InputError(f"token id {wrong[0]} is not in a vocabulary of {size}")
    if real.any() and not isinstance(positions, jax.core.Tracer):
        check_positions(ops.config, np.asarray(positions)[real].tolist())


def _check_targets(ops: JaxOps, segments: jax.Array, targets: jax.Array) -> None:
    """Raise ``InputError`` for targets that are no tokens, where they are known by now."""
    if isinstance(targets, jax.core.Tracer) or isinstance(segments, jax.core.Tracer):
        return
    learned = (np.asarray(segments) >= 0) & (np.asarray(targets) != NO_TARGET)
    wrong = _outside(ops, targets, learned)
    if len(wrong) > 0:
        raise InputError(
            f"target {wrong[0]} is not in a vocabulary of {ops.config.vocab_size}: {NO_TARGET}, or "
            "a factor of 0, leaves a token out"
        )


def _outside(ops: JaxOps, ids: jax.Array, read: NDArray[np.bool_]) -> NDArray[np.integer]:
    """Those ids that are read and are not in the vocabulary."""
    known = np.asarray(ids)
    return known[read & ((known < 0) | (known >= ops.config.vocab_size))]


def _inputs(
    tokens: jax.Array, positions: jax.Array, segments: jax.Array, reach: int | None
) -> Inputs:
    """Packed sequences, padded to a number of tokens and with a reach that are compiled once."""
    count = fit_tokens(len(tokens))
    return Inputs(
        ids=_padded(tokens, count, 0),
        positions=_padded(positions, count, 0),
        wanted=None,
        segments=_padded(segments, count, -1),
        reach=count if reach is None else fit_reach(reach, count),
    )


def _padded(values: jax.Array, count: int, fill: int) -> jax.Array:
    values = jnp.asarray(values, jnp.int32)
    return jnp.pad(values, (0, count - len(values)), constant_values=fill)
