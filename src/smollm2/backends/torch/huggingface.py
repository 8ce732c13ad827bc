"""HuggingFaceModule: what transformers' Trainer and TRL ask of a model besides its forward."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from smollm2.backends.torch.ops import TorchOps
from smollm2.config import Config
from smollm2.errors import InputError
from smollm2.files import write_json
from smollm2.formats.tensorfile import DENSE_DTYPES
from smollm2.model import head_of
from smollm2.state import State
from smollm2.weights import Weights


class Output(dict[str, Tensor]):
    """What a forward gives: "loss" where there were labels, "logits" where they were made.

    The Trainer reads it as a mapping; each is an attribute too, None if it is not there.
    """

    @property
    def loss(self) -> Tensor | None:
        """A scalar in float32."""
        return self.get("loss")

    @property
    def logits(self) -> Tensor | None:
        """[B, S, V] float32, 0 for padding."""
        return self.get("logits")


class HuggingFaceModule(nn.Module):
    """A module with the attributes of transformers' causal models that trainers look at."""

    accepts_loss_kwargs = True
    """Says that ``forward`` takes ``num_items_in_batch``."""

    loss_type = "ForCausalLM"
    """Says that labels are shifted by ``forward``, so that only those that are learned count."""

    supports_gradient_checkpointing = True

    def __init__(self, architecture: Config, ops: TorchOps) -> None:
        super().__init__()
        self.architecture = architecture
        self._ops = copy(ops)  # of its own, for what is switched here

    @property
    @abstractmethod
    def weights(self) -> Weights[Tensor]:
        """The parameters as the model's text takes them."""

    @abstractmethod
    def hidden_states(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        **others: object,
    ) -> Tensor:
        """Hidden states [B, S, C] after the final norm."""

    def __getattr__(self, name: str) -> Any:
        """Parameters and modules; says which attributes are missing for want of transformers."""
        if name in ("config", "generation_config") and find_spec("transformers") is None:
            raise AttributeError(
                f"a module's {name} is that of transformers, which is not installed: "
                "pip install transformers"
            )
        return super().__getattr__(name)

    def _get_name(self) -> str:
        """What the Trainer knows causal models by: it shifts labels that it smooths by itself."""
        return "LlamaForCausalLM"

    @cached_property
    def config(self) -> Any:
        """The architecture's numbers as transformers has them, which must be installed."""
        return _transformers().LlamaConfig.from_dict(self.architecture.to_dict())

    @cached_property
    def generation_config(self) -> Any:
        """The ids that begin, end and pad a sequence, as transformers has them."""
        return _transformers().GenerationConfig.from_model_config(self.config)

    @property
    def base_model(self) -> Any:
        """What TRL calls for hidden states, to take the loss of them by itself."""
        return lambda *arguments, **options: SimpleNamespace(
            last_hidden_state=self.hidden_states(*arguments, **options)
        )

    @property
    def is_gradient_checkpointing(self) -> bool:
        """Whether layers are computed once more in the backward pass."""
        return self._ops.recompute_every > 0

    def gradient_checkpointing_enable(
        self,
        gradient_checkpointing_kwargs: Mapping[str, object] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """Keep of every ``every_n_layers``-th layer only what came in, and compute it once more.

        Of the options for torch's function none is looked at: gradients do not depend on them.
        Raises ``InputError`` for ``offload``, which would need a GPU's streams.
        """
        if offload or every_n_layers < 1:
            raise InputError(
                f"checkpointing has no every_n_layers={every_n_layers} with offload={offload}: "
                "give every_n_layers from 1 on, and leave offload out"
            )
        self._ops.recompute_every = every_n_layers

    def gradient_checkpointing_disable(self) -> None:
        """Keep all that the backward pass needs."""
        self._ops.recompute_every = 0

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: Mapping[str, object] | None = None, **options: Any
    ) -> None:
        """What transformers calls ``gradient_checkpointing_enable`` since it renamed that."""
        self.gradient_checkpointing_enable(activation_checkpointing_kwargs, **options)

    activation_checkpointing_disable = gradient_checkpointing_disable
    is_activation_checkpointing = is_gradient_checkpointing

    def get_output_embeddings(self) -> Any:
        """The head: its ``weight`` [V, C] and ``bias``, which is None."""
        return SimpleNamespace(weight=head_of(self.weights), bias=None)

    def add_model_tags(self, tags: list[str]) -> None:
        """Tags are for model cards, which are not written here."""

    def save_pretrained(self, folder: str | Path, **options: object) -> None:
        """Write config.json and model.safetensors, in the parameters' dtype, for transformers.

        Where the model is sharded all processes have to call it, and the first one writes. Of the
        options of transformers' models, none is looked at.
        """
        whole = self._ops.whole
        arrays = [(name, _array(whole(value))) for name, value in self.state_dict().items()]
        if self._ops.writes:
            path = Path(folder)
            path.mkdir(parents=True, exist_ok=True)
            config = replace(self.architecture, dtype=arrays[0][1].dtype.name)
            State(arrays).save(path / "model.safetensors")
            write_json(path / "config.json", config.to_dict())


def _transformers() -> Any:
    """The package. An ``AttributeError`` where it is missing leads to ``__getattr__``."""
    if find_spec("transformers") is None:
        raise AttributeError
    return import_module("transformers")


def _array(value: Tensor) -> NDArray[Any]:
    """The values of a parameter."""
    tensor = value.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(DENSE_DTYPES["BF16"])
    array: NDArray[Any] = tensor.numpy()
    return array
