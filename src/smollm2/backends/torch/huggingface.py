"""HuggingFaceModule: what transformers' Trainer and TRL ask of a model besides its forward."""

from __future__ import annotations

from abc import abstractmethod
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

    def __init__(self, architecture: Config, ops: TorchOps) -> None:
        super().__init__()
        self.architecture = architecture
        self._ops = ops

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
    if find_spec("transformers") is None:
        raise AttributeError("transformers is not installed")
    return import_module("transformers")


def _array(value: Tensor) -> NDArray[Any]:
    """The values of a parameter."""
    tensor = value.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(DENSE_DTYPES["BF16"])
    array: NDArray[Any] = tensor.numpy()
    return array
