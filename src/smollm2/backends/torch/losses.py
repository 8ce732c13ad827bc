"""Losses: log-probabilities of targets, without the logits of all tokens at any time.

Tokens are taken in chunks, so that only a chunk's logits are there; one number a token is kept,
and the backward pass makes the logits of each chunk once more. Sums are in float32 or wider.

T tokens, C hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from smollm2.errors import InputError

CHUNK_BYTES = 2**27
"""Logits that are there at a time, in float32."""


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """The rows of a head that one process of a group holds, of which ``start`` is the first."""

    start: int
    group: dist.ProcessGroup


def log_probs(
    hidden: Tensor, head: Tensor, targets: Tensor, part: VocabularyPart | None = None
) -> Tensor:
    """Log-probability of each target [T] after ``hidden`` [T, C], float32; can be differentiated.

    ``head`` is [V, C], or the rows of it that ``part`` tells of. Then every process of its group
    gets the same result, and only its share of the gradient of ``hidden``: the sum over the group
    is the gradient. A target that is not in the vocabulary has no meaning, but does no harm.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, head = hidden.to(dtype), head.to(dtype)
    with torch.autocast(device, enabled=False):
        return _apply(hidden, head, targets, part)


class _LogProbs(torch.autograd.Function):
    """Saves the inputs and the logarithm of each token's sum over the vocabulary."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, part: VocabularyPart | None
    ) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        local, inside = _local(targets, len(head), part)
        # The largest logit, the sum of exp(logit - largest) and the target's logit
        largest, total, chosen = hidden.new_empty((3, len(hidden)), dtype=wide)
        for chunk in _chunks(hidden, head):
            logits = torch.mm(hidden[chunk], head.T).to(wide)
            chosen[chunk] = logits.gather(1, local[chunk, None])[:, 0]
            torch.amax(logits, 1, out=largest[chunk])
            torch.sum(logits.sub_(largest[chunk, None]).exp_(), 1, out=total[chunk])
        chosen *= inside
        if part is not None:
            own = largest.clone()
            dist.all_reduce(largest, dist.ReduceOp.MAX, part.group)
            sums = torch.stack([total * (own - largest).exp(), chosen])
            dist.all_reduce(sums, dist.ReduceOp.SUM, part.group)
            total, chosen = sums
        normalizer: Tensor = total.log() + largest
        ctx.part = part
        ctx.save_for_backward(hidden, head, targets, normalizer)
        result: Tensor = chosen - normalizer
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        if torch.is_grad_enabled():
            raise InputError("log_probs can be differentiated once: leave create_graph out")
        hidden, head, targets, normalizer = ctx.saved_tensors
        of_hidden, of_head = ctx.needs_input_grad[:2]
        gradient = gradients[0]
        local, inside = _local(targets, len(head), ctx.part)
        to_hidden = torch.empty_like(hidden) if of_hidden else None
        to_head = torch.zeros_like(head, dtype=gradient.dtype) if of_head else None
        for chunk in _chunks(hidden, head):
            to_logits = torch.mm(hidden[chunk], head.T).to(gradient.dtype)
            to_logits.sub_(normalizer[chunk, None]).exp_().mul_(-gradient[chunk, None])
            to_logits.scatter_add_(1, local[chunk, None], (gradient * inside)[chunk, None])
            to_logits = to_logits.to(hidden.dtype)
            if to_hidden is not None:
                torch.mm(to_logits, head, out=to_hidden[chunk])
            if to_head is not None:
                _add_product(to_head, to_logits.T, hidden[chunk])
        return to_hidden, None if to_head is None else to_head.to(head.dtype), None, None


_apply: Callable[..., Tensor] = _LogProbs.apply


def _local(targets: Tensor, rows: int, part: VocabularyPart | None) -> tuple[Tensor, Tensor]:
    """Each target's row among ``rows`` of the head, and whether it is there at all."""
    local = targets.long() - (0 if part is None else part.start)
    return local.clamp(0, rows - 1), (local >= 0) & (local < rows)


def _chunks(hidden: Tensor, head: Tensor) -> Iterator[slice]:
    size = max(1, CHUNK_BYTES // (4 * len(head)))
    return (slice(start, start + size) for start in range(0, len(hidden), size))


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:  # of 16 bits: only the sum over chunks is wider
        total += torch.mm(a, b)
