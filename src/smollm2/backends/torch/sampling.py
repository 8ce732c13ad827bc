"""Sampling on the device of the logits, so that ids come back in one copy and nothing else.

The same steps as ``smollm2.sampling.sampler`` from the temperature on, for many rows at a time.
Rows with penalties, biases or allowed ids go to the definition itself, on the host. Exponentials
and logarithms are torch's, so ids can differ from NumPy's where two scores are equal but for the
last bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, log

import numpy as np
import torch
from torch import Tensor

from smollm2.sampling import Choice, SamplingParams
from smollm2.sampling.draw import UNLIKELY, counter
from smollm2.sampling.logprobs import check_logits

_LOW = 0xFFFFFFFF
_FLOAT32 = np.finfo(np.float32)


def choose(logits: Tensor, choices: Sequence[Choice]) -> list[int]:
    """Ids that follow by logits [W, V] float32, one of each of W ``choices``.

    Raises as ``Sampler.choose`` does.
    """
    ids: dict[int, int] = {}
    rows = []
    for row, choice in enumerate(choices):
        if choice.sampler.params.changes_scores:
            ids[row] = choice.of(logits[row].cpu().numpy())
        else:
            rows.append(row)
    if rows:
        plain = logits if len(rows) == len(logits) else logits[_tensor(rows, logits)]
        ids.update(zip(rows, _choose_plain(plain, [choices[row] for row in rows]), strict=True))
    return [ids[row] for row in range(len(logits))]


def _choose_plain(logits: Tensor, choices: Sequence[Choice]) -> list[int]:
    """Choose by temperature, filters and the draw alone."""
    for choice in choices:
        choice.sampler.params.check_ids(logits.shape[1])
    ids = logits.argmax(-1)
    best = logits.gather(1, ids[:, None])
    drawn = [row for row, c in enumerate(choices) if c.sampler.params.temperature != 0]
    if drawn:
        rows = _tensor(drawn, logits)
        scores = logits[rows] - best[rows]
        ids[rows] = _draw(scores, [choices[row] for row in drawn])
    # One copy to the host: the bits of the best logits beside the ids.
    both = torch.stack([ids, best[:, 0].view(torch.int32).long()]).cpu().numpy()
    for value, choice in zip(both[1].astype(np.int32).view(np.float32), choices, strict=True):
        check_logits(value, choice.position)
    chosen: list[int] = both[0].tolist()
    return chosen


def _draw(scores: Tensor, choices: Sequence[Choice]) -> Tensor:
    """Draw by scores [n, V] whose best is 0, each row with its own parameters; ids [n]."""
    params = [choice.sampler.params for choice in choices]
    tiny, huge = float(_FLOAT32.tiny), float(_FLOAT32.max)
    temperatures = [min(max(p.temperature, tiny), huge) for p in params]
    scores = scores / _column(temperatures, scores)
    limits = _column([max(log(p.min_p) if p.min_p > 0 else -inf, UNLIKELY) for p in params], scores)
    if any(p.top_k > 0 or p.top_p < 1 for p in params):
        limits = torch.maximum(limits, _cutoffs(scores, params))
    counters = [int(counter(c.sampler.params.seed or 0, c.position)[0]) for c in choices]
    drawn = scores + noise(_tensor(counters, scores)[:, None], scores.shape[1])
    return torch.where(scores >= limits, drawn, -inf).argmax(-1)


def _cutoffs(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The smallest score [n, 1] that passes top-k, then top-p: see ``processors.cutoff``."""
    size = scores.shape[1]
    falling = scores.sort(-1, descending=True).values
    ranks = [min(p.top_k or size, size) - 1 for p in params]
    limits = falling.gather(1, _tensor(ranks, scores)[:, None])
    left = falling >= limits
    # In float64, which Metal does not have.
    exact = torch.float32 if scores.device.type == "mps" else torch.float64
    sums = torch.where(left, falling.exp(), 0).to(exact).cumsum(-1)
    shares = _column([p.top_p for p in params], scores, exact)
    first = (sums < shares * sums[:, -1:]).sum(-1, keepdim=True)
    reached = torch.minimum(first, left.sum(-1, keepdim=True) - 1)
    return torch.where(shares < 1, falling.gather(1, reached), limits)


def noise(counters: Tensor, size: int) -> Tensor:
    """``-log(-log u)`` [n, V] float32, with the u of ``smollm2.sampling.draw``."""
    ids = torch.arange(size, device=counters.device)
    uniform = ((mix(counters ^ ids) >> 9).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


def mix(x: Tensor) -> Tensor:
    """``draw.mix`` with 32 bits in int64, whose products wrap above them."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _LOW
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _LOW
    return x ^ (x >> 16)


def _tensor(numbers: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=like.device)


def _column(numbers: Sequence[float], like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(numbers, dtype=dtype, device=like.device)[:, None]
