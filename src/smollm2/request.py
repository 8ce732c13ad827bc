"""Request: a prompt with everything about its completion settled."""

from __future__ import annotations

from dataclasses import dataclass

from smollm2.sampling import SamplingParams

DEFAULT_MAX_TOKENS = 256
"""Tokens generated where no ``max_tokens`` is given, or what is left of the context."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a caller submitted.

    ``prompt`` is its text, where it was one; ``params`` has its seed; ``max_tokens`` fits the
    context length; ``stop_ids`` are all that end the completion.
    """

    prompt: str | None
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int]
