"""Every error that this package raises on purpose.

::

    SmolLM2Error
    ├── InputError (ValueError)        an argument, option or message that the caller can correct
    │   └── ContextLengthError         prompt and answer do not fit the context length
    ├── ModelNotFoundError             no such name, folder or file
    ├── FormatError                    a file is not what its format says it is
    ├── ConfigError                    a config value is missing, wrong or not supported
    ├── CheckpointError                tensors and config do not fit each other
    ├── TokenizerError                 a tokenizer file is broken or of an unsupported kind
    ├── TemplateError                  a chat template cannot be rendered
    ├── DownloadError                  a model could not be fetched
    │   ├── OfflineError               it would need the network, and that is switched off
    │   └── ChecksumError              what arrived is not what was asked for
    ├── CacheError                     a KV cache is too small, of other rows, or closed
    ├── NumericsError                  the model produced something that is not a number
    └── MissingDependencyError         an optional package is not installed, or too old

A message is one line: it names the thing, the value and the way out. The command line prints
it after ``error:`` and exits with 1 (2 for a wrong option).
"""


class SmolLM2Error(Exception):
    """The root of this package's errors."""


class InputError(SmolLM2Error, ValueError):
    """An argument, an option or a message that the caller can correct."""


class ContextLengthError(InputError):
    """Prompt and answer do not fit the model's context length.

    Attributes: ``prompt_tokens``, ``max_tokens`` (asked for), ``context_length``, all in tokens.
    """

    def __init__(self, prompt_tokens: int, max_tokens: int, context_length: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.context_length = context_length
        super().__init__(
            f"the prompt has {prompt_tokens} tokens and {max_tokens} more were asked for, but the "
            f"context length is {context_length}: shorten the prompt or lower max_tokens"
        )


class ModelNotFoundError(SmolLM2Error):
    """No model of this name, folder or file."""


class FormatError(SmolLM2Error):
    """A file is not what its format says it is."""


class ConfigError(SmolLM2Error):
    """A config value is missing, wrong, or changes the maths in a way that is not supported."""


class CheckpointError(SmolLM2Error):
    """The tensors of a checkpoint do not fit its config."""


class TokenizerError(SmolLM2Error):
    """A tokenizer file is broken or of a kind that is not supported."""


class TemplateError(SmolLM2Error):
    """A chat template cannot be parsed or rendered."""


class DownloadError(SmolLM2Error):
    """A model could not be fetched."""


class OfflineError(DownloadError):
    """Something is missing that only the network has, and the network is switched off."""


class ChecksumError(DownloadError):
    """The bytes that arrived are not the bytes that were asked for."""


class CacheError(SmolLM2Error):
    """A KV cache is too small, has other rows than the batch, or was closed."""


class NumericsError(SmolLM2Error):
    """The model produced a value that is not a number."""


class MissingDependencyError(SmolLM2Error):
    """An optional package is needed and not installed, or too old."""
