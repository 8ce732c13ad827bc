"""Entries without a cache: logits of whole sequences, and what training and scoring ask for."""

from __future__ import annotations

import numpy as np

from smollm2.causal_lm import NO_TARGET, CausalLM
from smollm2.entries import builders
from smollm2.entries.inputs import FloatsLike, IntsLike, checked, floats, mask_of, places_of
from smollm2.entries.passes import Floats, pass_of, run


def forward(
    lm: CausalLM,
    tokens: IntsLike,
    *,
    attention_mask: IntsLike | None = None,
    position_ids: IntsLike | None = None,
) -> Floats:
    """Logits after every token of B sequences [B, S], [B, S, V] float32.

    ``attention_mask`` [B, S] (1: a token, 0: padding) may pad them left, right or anywhere: what is
    padded is dropped and gives zeros, all else is as if it were not there. ``position_ids`` [S] or
    [B, S] may begin anywhere and rise by one from token to token.

    Raises ``InputError`` for inputs of a wrong shape or value.
    """
    (ids,) = checked("forward", None, tokens)
    mask, _ = mask_of(attention_mask, ids, np.zeros((), np.int32))
    parts = builders.forward(np, 0, ids, mask, places_of(position_ids, ids))
    logits = run(lm.forward, lm.config.vocab_size, parts)
    return logits.reshape(*ids.shape, -1)


def next_token(
    lm: CausalLM,
    tokens: IntsLike,
    *,
    attention_mask: IntsLike | None = None,
    position_ids: IntsLike | None = None,
) -> Floats:
    """Logits after each of B sequences [B, S], [B, V] float32; see ``forward``."""
    (ids,) = checked("next_token", None, tokens)
    mask, _ = mask_of(attention_mask, ids, np.zeros((), np.int32))
    parts = builders.next_token(np, 0, ids, mask, places_of(position_ids, ids))
    return run(lm.forward, lm.config.vocab_size, parts)


def log_probs_packed(
    lm: CausalLM, tokens: IntsLike, positions: IntsLike, segments: IntsLike, targets: IntsLike
) -> Floats:
    """Log-probability of each target after its token, [P] float32, of packed sequences [P] each.

    Token p is at ``positions[p]`` and sees the tokens of its segment up to there; positions rise by
    one within a segment. 0 where the target is -100, or the segment -1, which is padding. Logits
    are held of a few tokens at a time.

    Raises ``InputError`` for inputs of a wrong shape or value.
    """
    arrays = checked("log_probs_packed", None, tokens, positions, segments, targets)
    log_probs = np.zeros(len(arrays[0]), np.float32)
    made = pass_of(builders.packed(np, 0, *arrays[:3]), None)
    if made is not None:
        log_probs[made.order] = lm.log_probs(made.batch, arrays[3][made.order])
    return log_probs


def loss_packed(
    lm: CausalLM,
    tokens: IntsLike,
    positions: IntsLike,
    segments: IntsLike,
    targets: IntsLike,
    weights: FloatsLike,
) -> float:
    """Sum of ``weights`` [P] · -log p(target), in nats, of packed sequences; summed in float64.

    See ``log_probs_packed``. A target of weight 0 may be anything.
    """
    arrays = checked("loss_packed", None, tokens, positions, segments, targets)
    factors = floats("weights", weights, arrays[0].shape)
    learned = np.where(factors == 0, NO_TARGET, arrays[3])
    log_probs = log_probs_packed(lm, arrays[0], arrays[1], arrays[2], learned)
    return -float(np.dot(factors.astype(np.float64), log_probs.astype(np.float64)))


def hidden_packed(
    lm: CausalLM, tokens: IntsLike, positions: IntsLike, segments: IntsLike
) -> Floats:
    """Hidden states after the final norm, [P, C] float32, of packed sequences [P] each.

    See ``log_probs_packed``.
    """
    arrays = checked("hidden_packed", None, tokens, positions, segments)
    return run(lm.hidden, lm.config.hidden_size, builders.packed(np, 0, *arrays))
