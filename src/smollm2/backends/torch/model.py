"""TorchModel: the model's text over torch, for all who want NumPy arrays and token ids of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from smollm2.backends.torch import sampling
from smollm2.backends.torch.cache import TorchCache
from smollm2.backends.torch.graphs import Graphs
from smollm2.backends.torch.module import SmolLM2Module
from smollm2.backends.torch.numerics import switched
from smollm2.backends.torch.ops import TorchOps
from smollm2.backends.torch.plan import Plan, Planner
from smollm2.batch import Batch, Ints
from smollm2.cache import Cache, Layout
from smollm2.causal_lm import (
    LoadedModel,
    Traffic,
    check_batch,
    check_choices,
    checked_cache,
    dense_traffic,
    learned_tokens,
)
from smollm2.config import Config
from smollm2.errors import InputError
from smollm2.model import forward, head_of, hidden
from smollm2.sampling import Choice
from smollm2.weights import Weights

Text = Callable[[Weights[Tensor], TorchOps, Plan], Tensor]
R = TypeVar("R")


class TorchModel(LoadedModel[TorchCache]):
    """A model whose weights are tensors of one dtype on one device.

    ``weights``, ``ops`` and ``plan`` are for those who work on the model: with no cache, what the
    text of ``smollm2.model`` makes of them can be differentiated. ``graphs``: steps of decode are
    captured as CUDA graphs.
    """

    threads: None = None

    def __init__(
        self,
        config: Config,
        weights: Weights[Tensor],
        *,
        exact: bool = True,
        ops: TorchOps | None = None,
        graphs: bool = False,
    ) -> None:
        super().__init__(config)
        self.dtype = weights.token_embedding.dtype
        self.device = weights.token_embedding.device
        self.exact = exact
        self.ops = ops or TorchOps(config)
        self._weights: Weights[Tensor] | None = weights
        self._planner = Planner(config, self.device, torch.float32 if exact else self.dtype)
        self._graphs = Graphs(self._planner, self.context_length) if graphs else None

    @property
    def weights(self) -> Weights[Tensor]:
        """The tensors. Raises ``InputError`` where the model is closed."""
        if self._weights is None:
            raise InputError("the model is closed: load it again")
        return self._weights

    @property
    def traffic(self) -> Traffic:
        """Every value in the model's dtype; of an embedding beside the head, next to none."""
        return dense_traffic(self.config, self.dtype.itemsize)

    def make_cache(self, layout: Layout) -> TorchCache:
        """Storage in the model's dtype, on its device."""
        return TorchCache(
            layout,
            layers=self.config.num_hidden_layers,
            heads=self.ops.kv_heads,
            size=self.config.head_dim,
            dtype=self.dtype,
            device=self.device,
        )

    def plan(self, batch: Batch, cache: Cache | None = None) -> Plan:
        """What the text needs of a batch. Raises as ``CausalLM.forward`` does."""
        return self._planner.plan(batch, self._checked(batch, cache))

    def forward(self, batch: Batch, cache: Cache | None = None) -> NDArray[np.float32]:
        """Logits of the wanted tokens, [W, V]. See ``CausalLM.forward``."""
        return self._run(forward, batch, cache, _on_host)

    def hidden(self, batch: Batch, cache: Cache | None = None) -> NDArray[np.float32]:
        """Hidden states of the wanted tokens, [W, C]. See ``CausalLM.hidden``."""
        return self._run(hidden, batch, cache, _on_host)

    def log_probs(self, batch: Batch, targets: Ints) -> NDArray[np.float32]:
        """Log-probability of each target, [T]. See ``CausalLM.log_probs``."""
        learned = learned_tokens(self.config, batch, targets)
        chosen = torch.from_numpy(targets[learned]).to(self.device)

        def text(weights: Weights[Tensor], ops: TorchOps, plan: Plan) -> Tensor:
            return ops.log_probs(hidden(weights, ops, plan), head_of(weights), chosen)

        log_probs = np.zeros(len(batch), np.float32)
        wanted = replace(batch, wanted=learned.astype(np.int32))
        log_probs[learned] = self._run(text, wanted, None, _on_host)
        return log_probs

    def choose(
        self, batch: Batch, choices: Sequence[Choice], cache: Cache | None = None
    ) -> list[int]:
        """Token ids that follow the wanted tokens. See ``CausalLM.choose``.

        On a GPU they are chosen there; on the CPU, by NumPy.
        """
        if self.device.type == "cpu":
            return super().choose(batch, choices, cache)
        check_choices(batch, choices)

        def finish(logits: Tensor) -> list[int]:
            return sampling.choose(logits, choices)

        return self.agree(self._run(forward, batch, cache, finish))

    def agree(self, numbers: list[int]) -> list[int]:
        """The numbers of the first process that shares the model. See ``CausalLM.agree``."""
        return self.ops.agree(numbers)

    def as_module(self, *, return_logits: bool | None = None) -> SmolLM2Module:
        """The model as an ``nn.Module`` to train, whose parameters are these very tensors."""
        return SmolLM2Module(self.config, self.weights, self.ops, return_logits=return_logits)

    def close(self) -> None:
        """Let go of the weights."""
        self._weights = None
        if self._graphs is not None:
            self._graphs.clear()

    def _checked(self, batch: Batch, cache: Cache | None) -> TorchCache | None:
        """The cache, with room for a batch that has been checked."""
        stored = checked_cache(TorchCache, cache)
        check_batch(self.config, batch)
        if stored is not None:
            stored.prepare(batch)
        return stored

    def _run(
        self, text: Text, batch: Batch, cache: Cache | None, finish: Callable[[Tensor], R]
    ) -> R:
        """What ``finish`` makes of the text's result; what was stored counts once that is done."""
        weights, ops = self.weights, self.ops
        stored = self._checked(batch, cache)
        own_dtype = torch.autocast(self.device.type, enabled=False)
        with torch.inference_mode(), own_dtype, switched(exact=self.exact):
            if self._graphs is None or stored is None or not _is_decode(batch):
                result = text(weights, ops, self._planner.plan(batch, stored))
            else:
                result = self._graphs(
                    lambda plan: text(weights, ops, plan), text.__name__, batch, stored
                )
            finished = finish(result)
        if stored is not None:
            stored.advance(batch)
        return finished


def _on_host(result: Tensor) -> NDArray[np.float32]:
    array: NDArray[np.float32] = result.float().cpu().numpy()
    return array


def _is_decode(batch: Batch) -> bool:
    """Whether each row has one token."""
    return len(set(batch.rows.tolist())) == len(batch)
