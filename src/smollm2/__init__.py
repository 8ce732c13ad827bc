"""Everything a person does with a SmolLM2 model.

>>> import smollm2
>>> model = smollm2.load("smollm2-135m-instruct")
>>> model.generate("The capital of France is", max_tokens=2).text
' Paris.'

Importing this package loads nothing but the standard library; each name below is imported when
it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from smollm2._version import __version__

if TYPE_CHECKING:
    from smollm2.batch import Batch, Span
    from smollm2.chat import ChatSession
    from smollm2.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
    from smollm2.config import Config
    from smollm2.errors import InputError, SmolLM2Error
    from smollm2.generate import SmolLM2, load
    from smollm2.registry import list_models, pull, verify
    from smollm2.results import Generation, Piece, Score, Stats
    from smollm2.sampling import SamplingParams
    from smollm2.state import State
    from smollm2.streaming import Stream
    from smollm2.template import ChatTemplate
    from smollm2.tokenizer import StreamDecoder, Tokenizer

_HOMES = {
    "Batch": "batch",
    "ChatSession": "chat",
    "ChatTemplate": "template",
    "Checkpoint": "checkpoint",
    "Config": "config",
    "Generation": "results",
    "InputError": "errors",
    "Piece": "results",
    "SamplingParams": "sampling",
    "Score": "results",
    "SmolLM2": "generate",
    "SmolLM2Error": "errors",
    "Span": "batch",
    "State": "state",
    "Stats": "results",
    "Stream": "streaming",
    "StreamDecoder": "tokenizer",
    "Tokenizer": "tokenizer",
    "list_models": "registry",
    "load": "generate",
    "load_checkpoint": "checkpoint",
    "pull": "registry",
    "save_checkpoint": "checkpoint",
    "verify": "registry",
}

__all__ = [
    "Batch",
    "ChatSession",
    "ChatTemplate",
    "Checkpoint",
    "Config",
    "Generation",
    "InputError",
    "Piece",
    "SamplingParams",
    "Score",
    "SmolLM2",
    "SmolLM2Error",
    "Span",
    "State",
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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
