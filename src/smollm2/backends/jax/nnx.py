"""SmolLM2 as a Flax NNX module: the same text over parameters in a tree of named parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import ArrayLike

from smollm2.backends.jax import losses
from smollm2.backends.jax.ops import JaxOps
from smollm2.backends.packed import sequences_of
from smollm2.errors import InputError
from smollm2.weights import Weights


class Tree(nnx.Module):
    """A part of the names of a model's tensors, as ``model.layers.0.mlp``."""


class SmolLM2(nnx.Module):
    """A model whose ``nnx.state`` is its tensors: ``model.embed_tokens.weight`` and so on.

    A tied head is no parameter of its own. Made by ``JaxModel.as_nnx``; what training has made of
    it computes on as ``JaxModel(module.ops, module.weights)``.
    """

    def __init__(self, ops: JaxOps, weights: Weights[jax.Array]) -> None:
        self.ops = ops
        self.tied = weights.head is None
        params = {tuple(name.split(".")): nnx.Param(array) for name, array in weights.items()}
        for name, part in _parts(params).items():
            setattr(self, name, part)

    @property
    def parameters(self) -> dict[str, nnx.Param[jax.Array]]:
        """The parameters under their canonical names, in file order."""
        return dict(self._records().items())

    @property
    def weights(self) -> Weights[jax.Array]:
        """The values of the parameters, as records."""
        return self._records().map(lambda _, param: param[...])

    def __call__(
        self,
        input_ids: ArrayLike,
        attention_mask: ArrayLike | None = None,
        position_ids: ArrayLike | None = None,
    ) -> jax.Array:
        """Logits [B, S, V] float32 of sequences [B, S].

        ``attention_mask`` [B, S] is 0 for padding on either side. ``position_ids`` [B, S] that
        start at 0 again start a new sequence, which sees itself only, and rise within each; without
        them a row is one. Raises ``InputError`` for others, unless JAX traces them.
        """
        ids = _array(input_ids)
        if ids.ndim != 2 or ids.size == 0:
            raise InputError(f"input_ids have shape {list(ids.shape)}: give rows of tokens, [B, S]")
        rows, size = ids.shape
        mask, places = (
            None if given is None else _array(given) for given in (attention_mask, position_ids)
        )
        positions, segments = _sequences((rows, size), mask, places)
        tokens = jnp.reshape(ids, -1)
        logits = losses.logits_packed(
            self.weights, tokens, positions, segments, ops=self.ops, reach=size
        )
        return logits.reshape(rows, size, -1)

    def loss_packed(
        self,
        tokens: ArrayLike,
        positions: ArrayLike,
        segments: ArrayLike,
        targets: ArrayLike,
        weights: ArrayLike,
        *,
        reach: int | None = None,
    ) -> jax.Array:
        """``-Σ weights · log p(target)``, a scalar in float32; see ``log_probs_packed``.

        A target of weight 0 may be anything.
        """
        arrays = map(_array, (tokens, positions, segments, targets, weights))
        return losses.loss_packed(self.weights, *arrays, ops=self.ops, reach=reach)

    def log_probs_packed(
        self,
        tokens: ArrayLike,
        positions: ArrayLike,
        segments: ArrayLike,
        targets: ArrayLike,
        *,
        reach: int | None = None,
    ) -> jax.Array:
        """Log-probability of each target, [P] float32; 0 where it is -100, or padding.

        See ``hidden_packed``. Raises ``InputError`` for targets that are no tokens, unless JAX
        traces them.
        """
        arrays = map(_array, (tokens, positions, segments, targets))
        return losses.log_probs_packed(self.weights, *arrays, ops=self.ops, reach=reach)

    def hidden_packed(
        self,
        tokens: ArrayLike,
        positions: ArrayLike,
        segments: ArrayLike,
        *,
        reach: int | None = None,
    ) -> jax.Array:
        """Hidden states after the final norm, [P, C] float32, of packed sequences [P] each.

        Token p is at ``positions[p]`` and sees the tokens of its segment up to there; segment -1 is
        padding, and gives zeros. ``reach`` makes it faster, see ``losses.hidden_packed``. Raises
        ``InputError`` for other shapes and for ids that are no tokens, unless JAX traces them.
        """
        arrays = map(_array, (tokens, positions, segments))
        return losses.hidden_packed(self.weights, *arrays, ops=self.ops, reach=reach)

    def _records(self) -> Weights[nnx.Param[jax.Array]]:
        def param(name: str) -> nnx.Param[jax.Array]:
            node: Any = self
            for part in name.split("."):
                node = node[int(part)] if part.isdecimal() else getattr(node, part)
            found: nnx.Param[jax.Array] = node
            return found

        return Weights.build(param, num_layers=self.ops.config.num_hidden_layers, tied=self.tied)


def _array(values: ArrayLike) -> jax.Array:
    """Lists as an array; what is one, or is traced, as it is."""
    known: Any = values if isinstance(values, jax.Array | np.ndarray) else np.asarray(values)
    array: jax.Array = known
    return array


def _sequences(
    shape: tuple[int, int], mask: jax.Array | None, position_ids: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Positions and segments, each [B·S], of padded rows; what is known by now is checked."""
    if isinstance(mask, jax.core.Tracer) or isinstance(position_ids, jax.core.Tracer):
        return sequences_of(shape, mask, position_ids, jnp)
    known = (None if array is None else np.asarray(array) for array in (mask, position_ids))
    positions, segments = sequences_of(shape, *known)
    falls = (np.diff(positions) <= 0) & (np.diff(segments) == 0) & (segments[1:] >= 0)
    if falls.any():
        place = int(np.flatnonzero(falls)[0]) + 1
        raise InputError(
            f"position_ids have {positions[place]} behind {positions[place - 1]}: they must rise, "
            "or be 0 where another sequence starts"
        )
    return positions, segments


def _parts(params: Mapping[tuple[str, ...], nnx.Param[jax.Array]]) -> dict[str, Any]:
    """What lies under each first segment of names: a parameter, a tree or a list of trees."""
    below: dict[str, dict[tuple[str, ...], nnx.Param[jax.Array]]] = {}
    for (first, *rest), param in params.items():
        below.setdefault(first, {})[tuple(rest)] = param
    return {name: part.get(()) or _tree(_parts(part)) for name, part in below.items()}


def _tree(parts: dict[str, Any]) -> Any:
    if all(name.isdecimal() for name in parts):
        return nnx.List(parts.values())
    tree = Tree()
    for name, part in parts.items():
        setattr(tree, name, part)
    return tree
