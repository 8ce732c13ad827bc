"""Everything a person does with a SmolLM2 model.

>>> import smollm2
>>> model = smollm2.load("smollm2-135m-instruct")
>>> model.generate("The capital of France is", max_tokens=2).text
' Paris.'

- ``load`` gives a ``SmolLM2``, which writes: ``generate``, ``stream``, ``chat``, ``score``
- ``pull``, ``list_models``, ``verify``: the models on this machine
- ``load_checkpoint``, ``save_checkpoint``: config, weights and tokenizer as they are
- ``SamplingParams``: how to choose tokens; ``Generation``, ``Piece``, ``Stats``, ``Score``: results
- ``Tokenizer``, ``StreamDecoder``, ``ChatTemplate``: usable alone
- ``smollm2.entries``: every way to call ``model.lm`` with integers, for work on the model itself
- errors: all under ``SmolLM2Error``, listed in ``smollm2.errors``

Importing this package loads nothing but the standard library; each name is imported when it is
first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from smollm2._version import __version__

if TYPE_CHECKING:
    from smollm2.chat import ChatSession
    from smollm2.checkpoint import Checkpoint, load_checkpoint
    from smollm2.config import Config
    from smollm2.errors import (
        ContextLengthError,
        DownloadError,
        InputError,
        ModelNotFoundError,
        SmolLM2Error,
    )
    from smollm2.export import save_checkpoint
    from smollm2.generate import SmolLM2, load
    from smollm2.prepared import pull, verify
    from smollm2.registry import list_models
    from smollm2.results import Generation, Piece, Score, Stats
    from smollm2.sampling import SamplingParams
    from smollm2.streaming import Stream
    from smollm2.template import ChatTemplate
    from smollm2.tokenizer import StreamDecoder, Tokenizer

_HOMES = {
    "ChatSession": "chat",
    "ChatTemplate": "template",
    "Checkpoint": "checkpoint",
    "Config": "config",
    "ContextLengthError": "errors",
    "DownloadError": "errors",
    "Generation": "results",
    "InputError": "errors",
    "ModelNotFoundError": "errors",
    "Piece": "results",
    "SamplingParams": "sampling",
    "Score": "results",
    "SmolLM2": "generate",
    "SmolLM2Error": "errors",
    "Stats": "results",
    "Stream": "streaming",
    "StreamDecoder": "tokenizer",
    "Tokenizer": "tokenizer",
    "list_models": "registry",
    "load": "generate",
    "load_checkpoint": "checkpoint",
    "pull": "prepared",
    "save_checkpoint": "export",
    "verify": "prepared",
}

__all__ = [
    "ChatSession",
    "ChatTemplate",
    "Checkpoint",
    "Config",
    "ContextLengthError",
    "DownloadError",
    "Generation",
    "InputError",
    "ModelNotFoundError",
    "Piece",
    "SamplingParams",
    "Score",
    "SmolLM2",
    "SmolLM2Error",
    "Stats",
    "Stream",
    "StreamDecoder",
    "Tokenizer",
    "__version__",
    "list_models",
    "load",
    "load_checkpoint",
    "pull",
    "save_checkpoint",
    "verify",
]


_MODULES = ("entries", "errors")
"""Modules that are named above, and so are there without an import of their own."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
