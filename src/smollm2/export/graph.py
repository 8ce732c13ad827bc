"""Graph: an entry as a torch module whose shapes are static, to be traced and written elsewhere.

The model's text over torch's operations, with the rectangles of the entry in place of a batch and
a cache that comes in and goes out. Nothing is written in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - everybody calls it so
from torch import Tensor, nn

from smollm2.backends.rotary import frequencies
from smollm2.backends.torch.module import place
from smollm2.backends.torch.ops import TorchOps, attention
from smollm2.backends.torch.sampling import mix, noise
from smollm2.causal_lm import NO_TARGET
from smollm2.entries import builders
from smollm2.entries.builders import Tokens
from smollm2.entries.rectangles import Rectangle
from smollm2.export.binding import Bound
from smollm2.model import forward, head_of, hidden
from smollm2.sampling.draw import UNLIKELY
from smollm2.weights import Weights

CHUNK = 256
"""Tokens whose logits are there at a time, of entries that give log-probabilities."""


Cache = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer, [slots, K, D]; empty where there is no cache."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """One pass: its tokens, and the cache of each layer, which the layer replaces by its own."""

    ids: Tensor
    cos: Tensor
    sin: Tensor
    places: Tensor
    wanted: Tensor
    rectangles: tuple[Rectangle, ...]
    cache: Cache


class _GraphOps(TorchOps):
    """Torch's operations, over rectangles and a cache that is passed on."""

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Nothing that is for one device."""
        return F.linear(x, weight)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: int, plan: Any) -> Tensor:
        """Attention of each rectangle over tokens of the pass, or over what is stored."""
        own = stored = key, value
        if plan.cache:
            # Not index_copy, around which the exporter transposes the whole cache.
            places = plan.places[:, None, None].expand_as(key)
            keys, values = plan.cache[layer]
            stored = keys.scatter(0, places, key), values.scatter(0, places, value)
            plan.cache[layer] = stored
        results = []
        for part in plan.rectangles:
            count, queries, _ = part.visible.shape
            shown = query[part.queries].reshape(count, queries, *query.shape[1:])
            keys, values = stored if part.stored else own
            result = attention(
                shown.transpose(1, 2),
                _seen(part, keys),
                _seen(part, values),
                mask=part.visible[:, None],
                causal=False,
                shares_heads=True,
            )
            results.append(result.transpose(1, 2).flatten(0, 1).flatten(1))
        return torch.cat(results)

    def wanted(self, x: Tensor, plan: Any) -> Tensor:
        """Rows that are wanted; any row in place of those that nobody wants."""
        return x.index_select(0, plan.wanted.clamp(min=0))


def _seen(part: Rectangle, stored: Tensor) -> Tensor:
    """The keys or values of a rectangle, [N, K, S, D]."""
    count, _, length = part.visible.shape
    if isinstance(part.keys, slice):
        seen = stored[part.keys]
    else:
        seen = stored.index_select(0, part.keys.reshape(-1))
    return seen.reshape(count, length, *stored.shape[1:]).transpose(1, 2)


class EntryGraph(nn.Module):
    """An entry with these sizes and weights.

    Called with its inputs, int32 or float32 tensors, and with the cache: keys, then values of the
    first layer, [slots, K, D], of the next one, and so on. Returns the result, of
    ``generate_until`` the counts too, and the cache. Rows without a token are zeros.
    """

    def __init__(self, bound: Bound, weights: Weights[Tensor]) -> None:
        super().__init__()
        self.bound = bound
        self._ops: Any = _GraphOps(bound.config)
        self._frequencies = torch.from_numpy(frequencies(bound.config))
        self._names = weights.map(lambda name, _: name)
        for name, weight in weights.items():
            place(self, name, nn.Parameter(weight, requires_grad=False))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """One call of the entry."""
        entry = self.bound.entry
        arrays = {
            item.name: array.long() if item.dtype == "int32" else array
            for item, array in zip(entry.inputs, inputs, strict=False)
        }
        stored = inputs[len(arrays) :]
        cache = [*zip(stored[::2], stored[1::2], strict=True)]
        if entry.output == "ids":
            results = self._steps(arrays, cache)
        else:
            of_builder = [*arrays.values()][: len(arrays) - entry.extra]
            plan = self._plan(self.bound.tokens(torch, of_builder), cache)
            results = [self._result(plan, arrays)]
        return (*results, *(part for layer in cache for part in layer))

    @property
    def weights(self) -> Weights[Tensor]:
        """The weights as the text takes them."""
        return self._names.map(lambda name, _: self.get_parameter(name))

    def _plan(self, tokens: Tokens, cache: Cache) -> _Plan:
        """One pass over these tokens, which replaces what is in ``cache``."""
        angles = tokens.positions[:, None].float() * self._frequencies
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        scratch = self.bound.slots - 1  # of a fixed cache, the only one that has slot -1
        return _Plan(
            ids=tokens.ids,
            cos=torch.cat([cos, cos], -1),
            sin=torch.cat([-sin, sin], -1),
            places=torch.where(tokens.slots < 0, scratch, tokens.slots),
            wanted=tokens.wanted,
            rectangles=self.bound.rectangles(torch, tokens),
            cache=cache,
        )

    def _result(self, plan: _Plan, arrays: dict[str, Tensor]) -> Tensor:
        """What the entry gives of one pass."""
        output, shape = self.bound.entry.output, self.bound.result
        if output == "logits":
            return self._logits(plan).view(shape)
        states = _kept(plan, hidden(self.weights, self._ops, plan))
        if output == "hidden":
            return states.float()
        learned = (plan.wanted >= 0) & (arrays["targets"] != NO_TARGET)
        if output == "loss":
            learned = learned & (arrays["weights"] != 0)
        log_probs = torch.where(learned, self._log_probs(states, arrays["targets"]), 0.0)
        return log_probs if output == "log_probs" else -(log_probs * arrays["weights"]).sum()

    def _logits(self, plan: _Plan) -> Tensor:
        return _kept(plan, forward(self.weights, self._ops, plan))

    def _log_probs(self, states: Tensor, targets: Tensor) -> Tensor:
        """Log-probabilities of targets [T]; of those that are no tokens, any."""
        ids = targets.clamp(0, self.bound.config.vocab_size - 1)[:, None]
        found = []
        parts = torch.split(states, CHUNK), torch.split(ids, CHUNK)
        for part, chosen in zip(*parts, strict=True):
            logits = self._ops.head(part, head_of(self.weights))
            found.append(logits.log_softmax(-1).gather(1, chosen)[:, 0])
        return torch.cat(found)

    def _steps(self, arrays: dict[str, Tensor], cache: Cache) -> list[Tensor]:
        """Steps of decode, one after the other: ids [Batch, Steps]; until ``eos``, counts too."""
        ids = arrays["token"]
        starts = arrays["pos"].expand(len(ids))
        going = torch.ones_like(starts, dtype=torch.bool)
        columns, counts = [], torch.zeros_like(starts)
        for step in range(self.bound.steps):
            places = torch.where(going, starts + step, -1)
            tokens = builders.decode_rows(torch, self.bound.page_size, ids, places)
            chosen = _chosen(self._logits(self._plan(tokens, cache)), places + 1, arrays)
            columns.append(torch.where(going, chosen, 0))
            counts = counts + going
            if "eos" in arrays:
                going = going & (chosen != arrays["eos"])
            ids = chosen[:, None]
        results = [torch.stack(columns, 1).int()]
        return [*results, counts.int()] if "eos" in arrays else results


def _kept(plan: _Plan, rows: Tensor) -> Tensor:
    """Rows [W, n], zeros in place of those that nobody wants."""
    return torch.where(plan.wanted[:, None] >= 0, rows, 0.0)


def _chosen(logits: Tensor, positions: Tensor, arrays: dict[str, Tensor]) -> Tensor:
    """Ids [Batch] by logits: the likeliest, or drawn with ``key`` + row and ``temperature``.

    See ``smollm2.sampling.draw``: a key has 31 bits, so that a row's seed has 32.
    """
    best, likeliest = logits.max(-1, keepdim=True)
    if "key" not in arrays:
        return likeliest[:, 0]
    limits = torch.finfo(torch.float32)
    scores = (logits - best) / arrays["temperature"].clamp(limits.tiny, limits.max)
    keys = arrays["key"] + torch.arange(len(logits))
    drawn = scores + noise(mix(mix(keys) ^ positions)[:, None], logits.shape[1])
    drawn = torch.where(scores >= UNLIKELY, drawn, -torch.inf).argmax(-1)
    return torch.where(arrays["temperature"] > 0, drawn, likeliest[:, 0])
