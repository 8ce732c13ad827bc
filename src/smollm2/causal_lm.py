"""CausalLM: what generation, chat, scoring and the entries need of a model, whoever computes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import index
from typing import Generic, Protocol, SupportsIndex, TypeVar

import numpy as np
from numpy.typing import NDArray

from smollm2.batch import Batch, Ints
from smollm2.cache import PAGE_SIZE, Cache, Layout
from smollm2.config import Config
from smollm2.errors import CacheError, ContextLengthError, InputError
from smollm2.sampling import Choice, log_softmax

C = TypeVar("C", bound=Cache)

MAX_ROWS = 2**24
"""Rows or pages of a cache at most, so that its tables are no burden."""

MAX_SLOTS = 2**31 - 1
"""Places for tokens of a cache at most, since slots have 32 bits."""

NO_TARGET = -100
"""The target of a token that nothing is learned from, as in PyTorch and transformers."""

LOGITS_CHUNK = 128
"""Tokens whose logits are held at a time while log-probabilities are computed."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of memory that a step of decode reads.

    ``weights`` once, however many rows there are; ``token`` for each stored token of each row.
    """

    weights: int
    token: int


class CausalLM(Protocol):
    """A loaded model that runs batches. W tokens are wanted of a batch; V is the vocabulary."""

    @property
    def config(self) -> Config:
        """The architecture's numbers."""

    @property
    def context_length(self) -> int:
        """Tokens of a prompt and its completion together, at most."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Token ids that end a completion, as far as the config says."""

    @property
    def threads(self) -> int | None:
        """Threads that compute, None where a library decides."""

    @property
    def traffic(self) -> Traffic:
        """What decode reads, which bounds its speed."""

    def new_cache(self, rows: int = 1, capacity: int | None = None) -> Cache:
        """An empty cache of ``rows`` sequences of ``capacity`` tokens (the context length)."""

    def new_paged_cache(self, pages: int) -> Cache:
        """An empty cache of ``pages`` pages of 64 tokens, of which page 0 is scratch."""

    def forward(self, batch: Batch, cache: Cache | None = None) -> NDArray[np.float32]:
        """Logits of the wanted tokens, [W, V] float32.

        With a cache, writes the batch's keys and values and advances its lengths once all is
        done: a forward that raised can be repeated. Without one, tokens see their own segment.

        Raises ``CacheError`` where the cache does not fit the batch, and ``InputError`` for ids
        or positions that the model does not have; before any computation.
        """

    def hidden(self, batch: Batch, cache: Cache | None = None) -> NDArray[np.float32]:
        """Hidden states of the wanted tokens after the final norm, [W, C] float32.

        Stores and raises as ``forward`` does.
        """

    def log_probs(self, batch: Batch, targets: Ints) -> NDArray[np.float32]:
        """Log-probability of each target [T] after its token of a batch without a cache, [T].

        0 where the target is ``NO_TARGET``. Logits are held of a few tokens at a time.

        Raises ``InputError`` as ``forward`` does, and for a target that is no token.
        """

    def choose(
        self, batch: Batch, choices: Sequence[Choice], cache: Cache | None = None
    ) -> list[int]:
        """Token ids that follow the wanted tokens, one of each of the ``choices``.

        Computes where the model does, so that ids come back and not logits. Stores and raises as
        ``forward`` does, and raises as ``Sampler.choose`` does: then nothing is stored either.
        """

    def agree(self, numbers: list[int]) -> list[int]:
        """These numbers; where several processes share the model, those of the first one.

        So that all go on with the same seed, though each has drawn one.
        """

    def close(self) -> None:
        """Let go of the weights; closing again is fine."""


class LoadedModel(ABC, Generic[C]):
    """What the models of all backends have in common."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __repr__(self) -> str:
        size = self.config.parameter_count / 1e6
        return (
            f"{type(self).__name__}({size:.1f}M parameters, context length {self.context_length})"
        )

    @property
    def context_length(self) -> int:
        """Tokens of a prompt and its completion together, at most."""
        return self.config.max_position_embeddings

    @property
    def stop_ids(self) -> frozenset[int]:
        """Token ids that end a completion, as far as the config says."""
        return frozenset(self.config.eos_token_ids)

    def new_cache(self, rows: int = 1, capacity: int | None = None) -> C:
        """An empty cache of ``rows`` sequences of ``capacity`` tokens (the context length)."""
        return self.make_cache(fixed_layout(self.config, rows, capacity))

    def new_paged_cache(self, pages: int) -> C:
        """An empty cache of ``pages`` pages of 64 tokens, of which page 0 is scratch."""
        return self.make_cache(paged_layout(pages))

    @abstractmethod
    def make_cache(self, layout: Layout) -> C:
        """Storage for keys and values."""

    @abstractmethod
    def forward(self, batch: Batch, cache: Cache | None = None) -> NDArray[np.float32]:
        """Logits of the wanted tokens, [W, V]. See ``CausalLM.forward``."""

    def choose(
        self, batch: Batch, choices: Sequence[Choice], cache: Cache | None = None
    ) -> list[int]:
        """Token ids that follow the wanted tokens. See ``CausalLM.choose``."""
        check_choices(batch, choices)
        logits = self.forward(batch, cache)
        try:
            chosen = [choice.of(row) for choice, row in zip(choices, logits, strict=True)]
        except BaseException:
            if cache is not None:
                cache.forget(batch)
            raise
        return self.agree(chosen)

    def agree(self, numbers: list[int]) -> list[int]:
        """These numbers, where one process computes. See ``CausalLM.agree``."""
        return numbers


def dense_traffic(config: Config, size: int) -> Traffic:
    """What decode reads of weights and a cache whose values have ``size`` bytes each.

    Of an embedding that is not the head, it is next to nothing.
    """
    weights = config.parameter_count
    if not config.tie_word_embeddings:
        weights -= config.vocab_size * config.hidden_size
    stored = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return Traffic(weights=size * weights, token=size * stored)


def whole_number(name: str, value: object) -> int:
    """``value`` as an int. Raises ``InputError`` where it is none; True and False are none."""
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        with suppress(TypeError):  # an array of several
            return index(value)
    shown = repr(value).partition("\n")[0]
    raise InputError(f"{name} is {shown:.80}: give a whole number")


def fixed_layout(config: Config, rows: int, capacity: int | None) -> Layout:
    """The shape of a fixed cache; ``capacity`` None is the context length.

    Raises ``InputError`` where the model cannot fill it, or for a number of rows that cannot be.
    """
    limit = config.max_position_embeddings
    rows = whole_number("rows", rows)
    capacity = limit if capacity is None else whole_number("capacity", capacity)
    if not 1 <= capacity <= limit:
        raise InputError(f"a capacity of {capacity} tokens is not in 1 … {limit}")
    if rows < 1:
        raise InputError(f"a cache needs at least one row, not {rows}")
    if rows > MAX_ROWS:
        raise InputError(f"a cache of {rows} rows is too large: it has at most {MAX_ROWS}")
    if rows * capacity > MAX_SLOTS:
        raise InputError(
            f"a cache of {rows} rows of {capacity} tokens is too large: it has room for at most "
            f"{MAX_SLOTS} tokens"
        )
    return Layout(rows, capacity)


def paged_layout(pages: int) -> Layout:
    """The shape of a paged cache. Raises ``InputError`` for a number of pages that cannot be."""
    pages = whole_number("pages", pages)
    if not 2 <= pages <= MAX_ROWS:
        raise InputError(
            f"a paged cache has 2 … {MAX_ROWS} pages, of which page 0 is scratch, not {pages}"
        )
    return Layout(pages, PAGE_SIZE, paged=True)


def check_batch(config: Config, batch: Batch) -> None:
    """Raise ``InputError`` for ids, positions or wanted tokens that do not exist."""
    ids, positions, wanted = batch.ids.tolist(), batch.positions.tolist(), batch.wanted.tolist()
    vocabulary = config.vocab_size
    if min(ids) < 0 or max(ids) >= vocabulary:
        wrong = next(i for i in ids if not 0 <= i < vocabulary)
        raise InputError(f"token id {wrong} is not in a vocabulary of {vocabulary}")
    check_positions(config, positions)
    if wanted and not 0 <= min(wanted) <= max(wanted) < len(ids):
        wrong = next(i for i in wanted if not 0 <= i < len(ids))
        raise InputError(f"token {wrong} is wanted of a batch of {len(ids)} tokens")


def check_positions(config: Config, positions: Sequence[int]) -> None:
    """Raise ``InputError`` for positions that the model does not have."""
    limit = config.max_position_embeddings
    if max(positions) >= limit:
        raise ContextLengthError(max(positions) + 1, 0, limit)
    if min(positions) < 0:
        raise InputError(f"a token cannot have position {min(positions)}")


def check_choices(batch: Batch, choices: Sequence[Choice]) -> None:
    """Raise ``InputError`` unless each wanted token has a choice."""
    if len(choices) != len(batch.wanted):
        raise InputError(
            f"{len(batch.wanted)} wanted tokens need as many choices, not {len(choices)}"
        )


def learned_tokens(config: Config, batch: Batch, targets: Ints) -> NDArray[np.intp]:
    """The tokens of a batch that have a target, in order.

    Raises ``InputError`` for targets that are neither tokens nor ``NO_TARGET``, or too few.
    """
    if targets.shape != batch.ids.shape:
        raise InputError(f"{len(batch)} tokens need as many targets, not {list(targets.shape)}")
    learned = np.flatnonzero(targets != NO_TARGET)
    chosen = targets[learned]
    outside = chosen[(chosen < 0) | (chosen >= config.vocab_size)]
    if len(outside) > 0:
        raise InputError(
            f"target {outside[0]} is not in a vocabulary of {config.vocab_size}: "
            f"{NO_TARGET} is no target"
        )
    return learned


def log_probs_of(logits: NDArray[np.float32], targets: Ints) -> NDArray[np.float32]:
    """Log-probability of each target [n] by its logits [n, V]."""
    chosen: NDArray[np.float32] = log_softmax(logits)[np.arange(len(targets)), targets]
    return chosen


def checked_cache(kind: type[C], cache: Cache | None) -> C | None:
    """``cache``, if it is of the kind that a backend makes. Raises ``CacheError`` otherwise."""
    if not (cache is None or isinstance(cache, kind)):
        raise CacheError("the KV cache was made by another backend: use new_cache()")
    return cache
