"""Graph: an entry as a torch module whose shapes are static, to be traced and written elsewhere.

The model's text over torch's operations, with the rectangles of the entry in place of a batch and
a cache that comes in and goes out. Nothing is written in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from smollm2.backends.rotary import frequencies
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


@dataclass(slots=True)
class _Plan:
    """One pass: its tokens, and the cache, which each layer replaces by one that has more.

    ``keys`` and ``values`` [L·slots, K, D] of all layers; layer l begins at slot l·``slots``.
    """

    ids: Tensor
    cos: Tensor
    sin: Tensor
    places: Tensor
    wanted: Tensor
    rectangles: tuple[Rectangle, ...]
    slots: int
    keys: Tensor | None
    values: Tensor | None


class _GraphOps(TorchOps):
    """Torch's operations, over rectangles and a cache that is passed on."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: int, plan: Any) -> Tensor:
        """Attention of each rectangle over tokens of the pass, or over what is stored."""
        first = 0
        if plan.keys is not None:
            first = layer * plan.slots
            plan.keys = plan.keys.index_copy(0, plan.places + first, key)
            plan.values = plan.values.index_copy(0, plan.places + first, value)
        results = []
        for part in plan.rectangles:
            count, queries, _ = part.visible.shape
            shown = query[part.queries].reshape(count, queries, *query.shape[1:])
            keys, values = (plan.keys, plan.values) if part.stored else (key, value)
            start = first if part.stored else 0
            result = attention(
                shown.transpose(1, 2),
                _seen(part, keys, start),
                _seen(part, values, start),
                mask=part.visible[:, None],
                causal=False,
                shares_heads=True,
            )
            results.append(result.transpose(1, 2).flatten(0, 1).flatten(1))
        return torch.cat(results)

    def wanted(self, x: Tensor, plan: Any) -> Tensor:
        """Rows that are wanted; any row in place of those that nobody wants."""
        return x.index_select(0, plan.wanted.clamp(min=0))


def _seen(part: Rectangle, stored: Tensor, first: int) -> Tensor:
    """The keys or values of a rectangle, [N, K, S, D]."""
    count, _, length = part.visible.shape
    if isinstance(part.keys, slice):
        seen = stored[first + part.keys.start : first + part.keys.stop]
    else:
        seen = stored.index_select(0, (part.keys + first).reshape(-1))
    return seen.reshape(count, length, *stored.shape[1:]).transpose(1, 2)


class EntryGraph(nn.Module):
    """An entry with these sizes and weights.

    Called with its inputs, int32 or float32 tensors, and with a cache: ``keys`` and ``values``
    [L, slots, K, D]. Returns the result, of ``generate_until`` the counts too, and the cache.
    Rows without a token are zeros.
    """

    def __init__(self, bound: Bound, weights: Weights[Tensor]) -> None:
        super().__init__()
        self.bound = bound
        self._ops = _GraphOps(bound.config)
        self._frequencies = torch.from_numpy(frequencies(bound.config))
        self._names = weights.map(lambda name, _: name)
        for name, weight in weights.items():
            _register(self, name, nn.Parameter(weight, requires_grad=False))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """One call of the entry."""
        entry, cached = self.bound.entry, self.bound.entry.cache is not None
        given = inputs[:-2] if cached else inputs
        keys, values = (stored.flatten(0, 1) for stored in inputs[-2:]) if cached else (None, None)
        arrays = {
            item.name: array.long() if item.dtype == "int32" else array
            for item, array in zip(entry.inputs, given, strict=True)
        }
        if entry.output == "ids":
            results, keys, values = self._steps(arrays, keys, values)
        else:
            of_builder = [*arrays.values()][: len(arrays) - entry.extra]
            plan = self._plan(self.bound.tokens(torch, of_builder), keys, values)
            results, keys, values = [self._result(plan, arrays)], plan.keys, plan.values
        if keys is None or values is None:
            return tuple(results)
        return (*results, keys.view(inputs[-1].shape), values.view(inputs[-1].shape))

    def _plan(self, tokens: Tokens, keys: Tensor | None, values: Tensor | None) -> _Plan:
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
            slots=self.bound.slots,
            keys=keys,
            values=values,
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
        for part, chosen in zip(states.split(CHUNK), ids.split(CHUNK), strict=True):
            logits = self._ops.head(part, head_of(self.weights))
            found.append(logits.log_softmax(-1).gather(1, chosen)[:, 0])
        return torch.cat(found)

    def _steps(
        self, arrays: dict[str, Tensor], keys: Tensor | None, values: Tensor | None
    ) -> tuple[list[Tensor], Tensor | None, Tensor | None]:
        """Steps of decode, one after the other: ids [Batch, Steps], and the cache."""
        ids = arrays["token"]
        starts = arrays["pos"].expand(len(ids))
        going = torch.ones_like(starts, dtype=torch.bool)
        columns, counts = [], torch.zeros_like(starts)
        for step in range(self.bound.steps):
            places = torch.where(going, starts + step, -1)
            tokens = builders.decode_rows(torch, self.bound.page_size, ids, places)
            plan = self._plan(tokens, keys, values)
            chosen = _chosen(self._logits(plan), places + 1, arrays)
            keys, values = plan.keys, plan.values
            columns.append(torch.where(going, chosen, 0))
            counts = counts + going
            if "eos" in arrays:
                going = going & (chosen != arrays["eos"])
            ids = chosen[:, None]
        results = [torch.stack(columns, 1).int()]
        return results + ([counts.int()] if "eos" in arrays else []), keys, values

    @property
    def weights(self) -> Weights[Tensor]:
        """The weights as the text takes them."""
        return self._names.map(lambda name, _: self.get_parameter(name))


def _register(module: nn.Module, name: str, weight: nn.Parameter) -> None:
    """Add a parameter under a name with dots."""
    *path, last = name.split(".")
    for part in path:
        if not hasattr(module, part):
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    module.register_parameter(last, weight)


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
