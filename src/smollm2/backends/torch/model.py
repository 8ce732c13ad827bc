"""TorchModel: the model's text over torch, for all who want NumPy arrays and token ids of it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from smollm2.backends.torch.cache import TorchCache
from smollm2.backends.torch.numerics import switched
from smollm2.backends.torch.ops import TorchOps
from smollm2.backends.torch.plan import Plan, Planner
from smollm2.batch import Batch
from smollm2.cache import Cache, Layout
from smollm2.causal_lm import LoadedModel, Traffic, check_batch, checked_cache, dense_traffic
from smollm2.config import Config
from smollm2.errors import InputError
from smollm2.model import forward, hidden
from smollm2.weights import Weights

Text = Callable[[Weights[Tensor], TorchOps, Plan], Tensor]


class TorchModel(LoadedModel[TorchCache]):
    """A model whose weights are tensors of one dtype on one device.

    ``weights``, ``ops`` and ``plan`` are for those who work on the model: with no cache, what the
    text of ``smollm2.model`` makes of them can be differentiated.
    """

    threads: None = None

    def __init__(self, config: Config, weights: Weights[Tensor], *, exact: bool = True) -> None:
        super().__init__(config)
        self.dtype = weights.token_embedding.dtype
        self.device = weights.token_embedding.device
        self.exact = exact
        self.ops = TorchOps(config, exact=exact)
        angles = torch.float32 if exact else self.dtype
        self._planner = Planner(config, self.device, angles)
        self._weights: Weights[Tensor] | None = weights

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
        stored = checked_cache(TorchCache, cache)
        check_batch(self.config, batch)
        if stored is not None:
            stored.prepare(batch)
        return self._planner.plan(batch, stored)

    def forward(self, batch: Batch, cache: Cache | None = None) -> NDArray[np.float32]:
        """Logits of the wanted tokens, [W, V]. See ``CausalLM.forward``."""
        return self._run(forward, batch, cache)

    def hidden(self, batch: Batch, cache: Cache | None = None) -> NDArray[np.float32]:
        """Hidden states of the wanted tokens, [W, C]. See ``CausalLM.hidden``."""
        return self._run(hidden, batch, cache)

    def _run(self, text: Text, batch: Batch, cache: Cache | None) -> NDArray[np.float32]:
        weights = self.weights
        plan = self.plan(batch, cache)
        with torch.inference_mode(), switched(exact=self.exact):
            result: NDArray[np.float32] = text(weights, self.ops, plan).float().cpu().numpy()
        if plan.cache is not None:
            plan.cache.advance(batch)
        return result

    def close(self) -> None:
        """Let go of the weights."""
        self._weights = None
