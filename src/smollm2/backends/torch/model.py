"""TorchModel: the model's text over torch, for all who want NumPy arrays and token ids of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from smollm2.backends.torch import sampling
from smollm2.backends.torch.cache import TorchCache
from smollm2.backends.torch.compiled import CompiledOps
from smollm2.backends.torch.graphs import Graphs
from smollm2.backends.torch.numerics import switched
from smollm2.backends.torch.ops import TorchOps
from smollm2.backends.torch.plan import Plan, Planner, flatten
from smollm2.batch import Batch
from smollm2.cache import Cache, Layout
from smollm2.causal_lm import LoadedModel, Traffic, check_batch, checked_cache, dense_traffic
from smollm2.config import Config
from smollm2.errors import InputError
from smollm2.model import forward, hidden
from smollm2.sampling import Choice
from smollm2.weights import Weights

Text = Callable[[Weights[Tensor], TorchOps, Plan], Tensor]
Compile = Literal["inductor", "cudagraphs"]
R = TypeVar("R")


class TorchModel(LoadedModel[TorchCache]):
    """A model whose weights are tensors of one dtype on one device.

    ``weights``, ``ops`` and ``plan`` are for those who work on the model: with no cache, what the
    text of ``smollm2.model`` makes of them can be differentiated.
    """

    threads: None = None

    def __init__(
        self,
        config: Config,
        weights: Weights[Tensor],
        *,
        exact: bool = True,
        compile: Compile | None = None,  # noqa: A002 - the name of the option
    ) -> None:
        super().__init__(config)
        self.dtype = weights.token_embedding.dtype
        self.device = weights.token_embedding.device
        self.exact = exact
        self.ops = TorchOps(config, exact=exact)
        self._weights: Weights[Tensor] | None = weights
        self._planner = Planner(config, self.device, torch.float32 if exact else self.dtype)
        self._step_ops = CompiledOps(config, exact=exact) if compile == "inductor" else self.ops
        self._graphs: Graphs | None = None
        if compile == "cudagraphs":
            self._graphs = Graphs(self._planner, self.context_length)

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
            heads=self.config.num_key_value_heads,
            size=self.config.head_dim,
            dtype=self.dtype,
            device=self.device,
        )

    def plan(self, batch: Batch, cache: Cache | None = None) -> Plan:
        """What the text needs of a batch. Raises as ``CausalLM.forward`` does."""
        return self._plan(batch, self._checked(batch, cache))

    def forward(self, batch: Batch, cache: Cache | None = None) -> NDArray[np.float32]:
        """Logits of the wanted tokens, [W, V]. See ``CausalLM.forward``."""
        return self._run(forward, batch, cache, _on_host)

    def hidden(self, batch: Batch, cache: Cache | None = None) -> NDArray[np.float32]:
        """Hidden states of the wanted tokens, [W, C]. See ``CausalLM.hidden``."""
        return self._run(hidden, batch, cache, _on_host)

    def choose(
        self, batch: Batch, choices: Sequence[Choice], cache: Cache | None = None
    ) -> list[int]:
        """Token ids that follow the wanted tokens. See ``CausalLM.choose``.

        On a GPU they are chosen there; on the CPU, by NumPy.
        """
        if self.device.type == "cpu":
            return super().choose(batch, choices, cache)
        return self._run(forward, batch, cache, lambda logits: sampling.choose(logits, choices))

    def close(self) -> None:
        """Let go of the weights."""
        self._weights = None
        if self._graphs is not None:
            self._graphs.clear()

    def _checked(self, batch: Batch, cache: Cache | None) -> TorchCache | None:
        """The cache, with room for a batch that has been checked; angles for its positions."""
        stored = checked_cache(TorchCache, cache)
        check_batch(self.config, batch)
        if stored is not None:
            stored.prepare(batch)
        self._planner.reserve(int(batch.positions.max()) + 1)
        return stored

    def _plan(self, batch: Batch, cache: TorchCache | None) -> Plan:
        form, numbers = flatten(batch, cache)
        return self._planner.plan(form, torch.from_numpy(numbers).to(self.device), cache)

    def _run(
        self, text: Text, batch: Batch, cache: Cache | None, finish: Callable[[Tensor], R]
    ) -> R:
        """What ``finish`` makes of the text's result; what was stored counts once that is done."""
        weights, ops = self.weights, self._step_ops
        stored = self._checked(batch, cache)
        with torch.inference_mode(), switched(exact=self.exact):
            if self._graphs is None or stored is None or not _is_decode(batch):
                result = text(weights, ops, self._plan(batch, stored))
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
