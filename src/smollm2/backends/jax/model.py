"""JaxModel: weights on a device, and forwards that are compiled once a form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from smollm2.backends import check_framework
from smollm2.backends.jax import losses, sampling
from smollm2.backends.jax.cache import JaxCache
from smollm2.backends.jax.inputs import Form, inputs_of, joined, parted
from smollm2.backends.jax.layers import unstacked
from smollm2.backends.jax.ops import JaxOps, Storage
from smollm2.backends.jax.sharding import cache_sharding
from smollm2.batch import Batch, Ints
from smollm2.cache import Cache, Layout
from smollm2.causal_lm import (
    NO_TARGET,
    LoadedModel,
    Traffic,
    check_batch,
    check_choices,
    checked_cache,
    dense_traffic,
    learned_tokens,
)
from smollm2.errors import InputError
from smollm2.model import forward, hidden
from smollm2.sampling import Choice
from smollm2.weights import Weights

if TYPE_CHECKING:
    from smollm2.backends.jax.nnx import SmolLM2

R = TypeVar("R")

Floats = NDArray[np.float32]
Output = Literal["logits", "hidden"]
_TEXTS = {"logits": forward, "hidden": hidden}


@partial(jax.jit, static_argnames=("ops", "form", "output"), donate_argnames="storage")
def run(
    weights: Weights[jax.Array],
    ints: jax.Array,
    storage: Storage | None,
    *,
    ops: JaxOps,
    form: Form,
    output: Output,
) -> tuple[jax.Array, Storage | None]:
    """Logits or hidden states of the wanted tokens, float32, and the storage as it is then."""
    plan = ops.plan(parted(ints, form), None if storage is None else list(storage))
    result = _TEXTS[output](weights, ops, plan)
    return result.astype(jnp.float32), plan.storage


class JaxModel(LoadedModel[JaxCache]):
    """A model whose weights are on a device, in ``dtype``."""

    threads: None = None

    def __init__(self, ops: JaxOps, weights: Weights[jax.Array]) -> None:
        super().__init__(ops.config)
        self.ops = ops
        self._weights: Weights[jax.Array] | None = weights
        self.dtype = weights.token_embedding.dtype
        self._sharding = cache_sharding(weights.blocks[0].attention.key)

    @property
    def weights(self) -> Weights[jax.Array]:
        """The weights, a pytree. Raises ``InputError`` where the model is closed."""
        if self._weights is None:
            raise InputError("the model is closed: load it again")
        return self._weights

    @property
    def traffic(self) -> Traffic:
        """Every value in ``dtype``; of an embedding that is not the head, next to nothing."""
        return dense_traffic(self.config, self.dtype.itemsize)

    def make_cache(self, layout: Layout) -> JaxCache:
        """Storage in ``dtype``."""
        parts = len(self.weights.blocks)
        return JaxCache(
            layout,
            layers=[self.config.num_hidden_layers // parts] * parts,
            heads=self.config.num_key_value_heads,
            size=self.config.head_dim,
            dtype=self.dtype,
            sharding=self._sharding,
        )

    def forward(self, batch: Batch, cache: Cache | None = None) -> Floats:
        """Logits of the wanted tokens, [W, V]. See ``CausalLM.forward``.

        One that fails before it computes can be repeated; one that fails while it does (memory ran
        out) takes the cache along, which is empty then: see ``JaxCache.recover``.
        """
        return self._wanted("logits", batch, cache)

    def hidden(self, batch: Batch, cache: Cache | None = None) -> Floats:
        """Hidden states of the wanted tokens, [W, C]. See ``CausalLM.hidden``."""
        return self._wanted("hidden", batch, cache)

    def choose(
        self, batch: Batch, choices: Sequence[Choice], cache: Cache | None = None
    ) -> list[int]:
        """Token ids that follow, chosen on the device. See ``CausalLM.choose``."""
        check_choices(batch, choices)
        return self._run("logits", batch, cache, lambda logits: sampling.choose(logits, choices))

    def _wanted(self, output: Output, batch: Batch, cache: Cache | None) -> Floats:
        # Cut in NumPy: an operation of its own on the device takes a millisecond.
        count = len(batch.wanted)
        return self._run(output, batch, cache, lambda found: np.asarray(found)[:count].copy())

    def log_probs(self, batch: Batch, targets: Ints) -> Floats:
        """Log-probability of each target, [T]. See ``CausalLM.log_probs``."""
        check_batch(self.config, batch)
        learned = learned_tokens(self.config, batch, targets)
        inputs = inputs_of(replace(batch, wanted=learned.astype(np.int32)), num_pages=None)
        chosen = np.full(len(inputs.wanted), NO_TARGET, np.int32)
        chosen[: len(learned)] = targets[learned]
        found = losses.wanted_log_probs(self.weights, inputs, chosen, ops=self.ops)
        log_probs = np.zeros(len(batch), np.float32)
        log_probs[learned] = np.asarray(found)[: len(learned)]
        return log_probs

    def as_nnx(self) -> SmolLM2:
        """The model as a Flax NNX module to train; a copy of the weights, if they are stacked.

        Raises ``MissingDependencyError`` where Flax is not installed, or too old.
        """
        check_framework("flax", "as_nnx()", extra="jax")
        from smollm2.backends.jax.nnx import SmolLM2

        return SmolLM2(self.ops, unstacked(self.weights))

    def _run(
        self, output: Output, batch: Batch, cache: Cache | None, finish: Callable[[jax.Array], R]
    ) -> R:
        """What ``finish`` makes of the result on the host; only then is anything stored.

        JAX computes meanwhile: a failure may show when the result is read, and not before.
        """
        weights = self.weights
        stored = checked_cache(JaxCache, cache)
        check_batch(self.config, batch)
        if stored is not None:
            stored.prepare(batch)
        num_pages = None if stored is None else stored.layout.pages
        ints, form = joined(inputs_of(batch, num_pages=num_pages))
        compiled = partial(run, ops=self.ops, form=form, output=output)
        if stored is None:
            return finish(compiled(weights, ints, None)[0])
        try:
            result, stored.storage = compiled(weights, ints, stored.storage)
            finished = finish(result)
        except BaseException as error:
            stored.recover(error)
            raise
        stored.advance(batch)
        return finished

    def close(self) -> None:
        """Let go of the weights."""
        self._weights = None
