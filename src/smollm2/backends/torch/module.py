"""SmolLM2Module: the model as an ``nn.Module`` that is trained, under Hugging Face's names.

The text is the same that answers prompts; only who asks differs. Batches are made on the host, so
ids, masks and positions are read from the device once a forward. B rows of S places, P places.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from smollm2 import model
from smollm2.backends.packed import Indices, next_labels, packed, sequences_of
from smollm2.backends.torch.huggingface import HuggingFaceModule, Output
from smollm2.backends.torch.ops import TorchOps
from smollm2.backends.torch.plan import Planner
from smollm2.batch import Batch
from smollm2.causal_lm import NO_TARGET, check_batch
from smollm2.config import Config
from smollm2.errors import InputError
from smollm2.weights import Weights

IntsLike = Tensor | NDArray[np.integer[Any]]
"""Integers: a tensor of any device, or an array."""


class SmolLM2Module(HuggingFaceModule):
    """The model with parameters, which share the memory of the tensors that it is made of.

    So what is trained is at once what the model that it came from computes with, until ``to``
    moves or converts the parameters. A tied head is no parameter of its own, in ``state_dict``
    as in files.

    ``return_logits``: whether a forward with labels makes logits; None: without gradients only,
    since evaluation reads them, and training does not.
    """

    def __init__(
        self,
        config: Config,
        weights: Weights[Tensor],
        ops: TorchOps,
        *,
        return_logits: bool | None = None,
    ) -> None:
        super().__init__(config, ops)
        self.return_logits = return_logits
        self._planners: dict[tuple[torch.device, bool], Planner] = {}
        self._head_name = model.head_of(weights.map(lambda name, _: name))
        for name, weight in weights.items():
            place(self, name, nn.Parameter(weight))

    @property
    def weights(self) -> Weights[Tensor]:
        """The parameters as the model's text takes them."""
        return Weights.build(
            lambda name: attrgetter(name)(self),
            num_layers=self.architecture.num_hidden_layers,
            tied=self.architecture.tie_word_embeddings,
        )

    @property
    def _head(self) -> Tensor:
        head: Tensor = self.get_parameter(self._head_name)
        return head

    def forward(
        self,
        input_ids: IntsLike,
        attention_mask: IntsLike | None = None,
        position_ids: IntsLike | None = None,
        labels: IntsLike | None = None,
        num_items_in_batch: Tensor | int | None = None,
        return_logits: bool | None = None,
        **others: object,
    ) -> Output:
        """Loss and logits of rows of tokens [B, S], as transformers' causal models give them.

        ``attention_mask`` [B, S] is 0 for padding on either side. ``position_ids`` [B, S] that
        start at 0 again start a new sequence, which sees itself only; without them a row is one.

        ``labels`` [B, S] are the tokens themselves, or -100 where they are not learned; a token
        learns the label of the next one of its sequence, and of the first one nobody does (in
        transformers, the padding to its left). ``loss`` is the mean of -log p over what
        is learned, or its sum divided by ``num_items_in_batch``; 0 where nothing is.

        Logits are made without ``labels``, and with them as ``return_logits`` says here or in the
        module. Raises ``InputError`` for what cannot be computed, before anything is.
        """
        _refuse(others)
        ids, positions, segments = _rows(input_ids, attention_mask, position_ids)
        shape = ids.shape
        targets = np.full(ids.size, NO_TARGET)
        if labels is not None:
            targets = next_labels(_host("labels", labels, 2, shape), segments)
        with_logits = labels is None or self._makes_logits(return_logits)
        learned = targets != NO_TARGET
        part = packed(ids.reshape(-1), positions, segments, learned | with_logits)
        hidden = self._hidden(part.batch)
        output = Output()
        if labels is not None:
            rows = np.flatnonzero(learned[part.places])
            learners = hidden if len(rows) == len(hidden) else hidden[self._send(rows)]
            log_probs = self._log_probs(learners, targets[part.places[rows]])
            output["loss"] = -log_probs.sum() / _divisor(num_items_in_batch, log_probs)
        if with_logits:
            logits = self._ops.head(hidden, self._head)
            output["logits"] = self._spread(logits, part.places, ids.size).view(*shape, -1)
        return output

    def hidden_states(
        self,
        input_ids: IntsLike,
        attention_mask: IntsLike | None = None,
        position_ids: IntsLike | None = None,
        **others: object,
    ) -> Tensor:
        """Hidden states [B, S, C] after the final norm, 0 for padding; arguments of ``forward``."""
        _refuse(others)
        ids, positions, segments = _rows(input_ids, attention_mask, position_ids)
        part = packed(ids.reshape(-1), positions, segments, segments >= 0)
        states = self._spread(self._hidden(part.batch), part.places, ids.size)
        return states.view(*ids.shape, -1)

    def hidden_packed(self, tokens: IntsLike, positions: IntsLike, segments: IntsLike) -> Tensor:
        """Hidden states after the final norm [P, C] of sequences that lie side by side [P].

        A token sees those of its own segment up to its own position. Negative segments are
        padding, whose results are 0.
        """
        sequences = _sequences(tokens, positions, segments)
        part = packed(*sequences, sequences[2] >= 0)
        return self._spread(self._hidden(part.batch), part.places, len(sequences[0]))

    def log_probs_packed(
        self, tokens: IntsLike, positions: IntsLike, segments: IntsLike, targets: IntsLike
    ) -> Tensor:
        """Log-probability of each target [P], float32; 0 where the target is -100, or padding."""
        sequences = _sequences(tokens, positions, segments)
        chosen = _host("targets", targets, 1, sequences[0].shape)
        part = packed(*sequences, (sequences[2] >= 0) & (chosen != NO_TARGET))
        log_probs = self._log_probs(self._hidden(part.batch), chosen[part.places])
        return self._spread(log_probs, part.places, len(chosen))

    def loss_packed(
        self,
        tokens: IntsLike,
        positions: IntsLike,
        segments: IntsLike,
        targets: IntsLike,
        weights: Tensor | NDArray[np.floating[Any]],
    ) -> Tensor:
        """``-Σ weights · log p(target)``, a scalar in float32.

        Of a token whose weight [P] is 0 the target is not looked at, nor is anything computed.
        """
        sequences = _sequences(tokens, positions, segments)
        chosen = _host("targets", targets, 1, sequences[0].shape)
        weighed = np.asarray(_on_host(torch.as_tensor(weights).float()))
        if weighed.shape != chosen.shape:
            raise InputError(
                f"weights have shape {list(weighed.shape)}, targets {list(chosen.shape)}: they "
                "must be the same"
            )
        part = packed(*sequences, (sequences[2] >= 0) & (weighed != 0))
        log_probs = self._log_probs(self._hidden(part.batch), chosen[part.places])
        return -(self._send(weighed[part.places]) * log_probs).sum()

    def _makes_logits(self, asked: bool | None) -> bool:
        chosen = self.return_logits if asked is None else asked
        return not torch.is_grad_enabled() if chosen is None else chosen

    def _hidden(self, batch: Batch) -> Tensor:
        """Hidden states of the wanted tokens, [W, C]."""
        check_batch(self.architecture, batch)
        weights = self.weights
        # What is made in inference mode cannot be saved for a backward pass
        key = weights.token_embedding.device, torch.is_inference_mode_enabled()
        planner = self._planners.get(key)
        if planner is None:
            made = Planner(self.architecture, key[0], torch.float32)
            planner = self._planners.setdefault(key, made)
        return model.hidden(weights, self._ops, planner.plan(batch, None))

    def _log_probs(self, hidden: Tensor, targets: Indices) -> Tensor:
        size = self.architecture.vocab_size
        wrong = targets[(targets < 0) | (targets >= size)]
        if len(wrong) > 0:
            raise InputError(
                f"target {wrong[0]} is not in a vocabulary of {size}: {NO_TARGET} as a label, or "
                "a weight of 0, leaves a token out"
            )
        return self._ops.log_probs(hidden, self._head, self._send(targets))

    def _spread(self, values: Tensor, places: Indices, count: int) -> Tensor:
        """``values`` [W, …] in their places among ``count``, and zeros between them."""
        if len(places) == count:
            return values
        whole = values.new_zeros((count, *values.shape[1:]))
        return whole.index_copy(0, self._send(places), values)

    def _send(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(next(self.parameters()).device)


def place(root: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Register a parameter under a name with dots, making the modules on the way to it."""
    *path, last = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    root.register_parameter(last, parameter)


def _refuse(others: Mapping[str, object]) -> None:
    """Raise ``InputError`` for an argument of transformers' models that asks for something."""
    for name, value in others.items():
        asks = value is not None and value is not False
        if asks and not (name == "return_dict" and value is True):
            raise InputError(f"forward has no {name}={value!r:.80}: leave it out")


def _on_host(value: object) -> object:
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else value


def _host(name: str, value: object, dims: int, shape: tuple[int, ...] | None = None) -> Indices:
    """Integers as an array of so many dimensions, and of this shape if there is one."""
    array = np.asarray(_on_host(value))
    if array.dtype.kind not in "iub":
        raise InputError(f"{name} must be integers, not {array.dtype}")
    if array.ndim != dims or array.size == 0 or shape not in (None, array.shape):
        wanted = f"{dims} dimensions, none of them 0" if shape is None else f"shape {list(shape)}"
        raise InputError(f"{name} have shape {list(array.shape)}, but must have {wanted}")
    return array.astype(np.int64)


def _rows(
    input_ids: object, attention_mask: object, position_ids: object
) -> tuple[Indices, Indices, Indices]:
    """Ids [B, S] with positions and segments [B·S]."""
    ids = _host("input_ids", input_ids, 2)
    mask = None if attention_mask is None else _host("attention_mask", attention_mask, 2)
    places = None if position_ids is None else _host("position_ids", position_ids, 2)
    return ids, *sequences_of((ids.shape[0], ids.shape[1]), mask, places)


def _sequences(
    tokens: object, positions: object, segments: object
) -> tuple[Indices, Indices, Indices]:
    ids = _host("tokens", tokens, 1)
    return (
        ids,
        _host("positions", positions, 1, ids.shape),
        _host("segments", segments, 1, ids.shape),
    )


def _divisor(count: Tensor | int | None, log_probs: Tensor) -> Tensor | int:
    """What the sum is divided by: ``count``, or how many tokens are learned."""
    if isinstance(count, Tensor):
        return count.to(log_probs.device)
    return max(len(log_probs), 1) if count is None else count
