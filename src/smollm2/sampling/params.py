"""Sampling parameters: what a request may ask of sampling and stopping, checked when made."""

from __future__ import annotations

import dataclasses
import difflib
import math
import random
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict, Unpack

import numpy as np

from smollm2.errors import InputError
from smollm2.sampling.draw import SEED_LIMIT

GENERATED_SEED_LIMIT = 2**31 - 1
"""Seeds that nobody gave are 0 <= seed < 2**31 - 1: every client can hold and repeat them."""

MAX_STOPS = 16
"""Stop strings a request may have."""

MAX_LOGPROBS = 20
"""Alternatives a token's logprob may come with."""


class SamplingOptions(TypedDict, total=False):
    """The fields of ``SamplingParams`` as keyword options, each optional."""

    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    repetition_counts: bool
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    allowed_ids: Sequence[int] | None
    seed: int | None
    stop: str | Sequence[str]
    stop_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to stop. Raises ``InputError`` naming a wrong option.

    - ``max_tokens``: tokens of the output; 0 only reads the prompt, None leaves it to the caller
    - ``temperature``: 0 is greedy
    - ``top_k`` (0: all), ``top_p`` (1: all), ``min_p`` (0: all): see ``processors.cutoff``
    - ``repetition_penalty``: 1 changes nothing; applied once per distinct token, or to the power
      of its occurrences with ``repetition_counts``
    - ``presence_penalty``, ``frequency_penalty``: -2 to 2, subtracted once, and per occurrence
    - ``logit_bias``: token id → -100 to 100, added
    - ``allowed_ids``: the only tokens that may be chosen (None: all)
    - ``seed``: 0 to 2**63 - 1 (None: ``with_seed`` chooses one)
    - ``stop``: up to 16 strings that end the output and are no part of it; a single one may be
      given as it is
    - ``stop_ids``: tokens that end the output besides the model's, which ``ignore_eos`` leaves out
    - ``logprobs``: alternatives (0 to 20) to report with each token's logprob (None: no logprobs)
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    repetition_counts: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    allowed_ids: tuple[int, ...] | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))

    @classmethod
    def of(
        cls, params: SamplingParams | None = None, **options: Unpack[SamplingOptions]
    ) -> SamplingParams:
        """``params`` (or the defaults) with ``options`` in place of its fields.

        Raises ``InputError`` for an unknown option, naming the nearest, and for a wrong value.
        """
        if params is not None and not isinstance(params, SamplingParams):
            raise InputError(f"params must be SamplingParams, not {reprlib.repr(params)}")
        changes: dict[str, Any] = {**options}
        for name in changes:
            if name not in _CHECKS:
                near = difflib.get_close_matches(name, _CHECKS, n=1, cutoff=0.4)
                hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(_CHECKS)}"
                raise InputError(f"unknown option {name!r}: {hint}")
        return dataclasses.replace(params or cls(), **changes)

    @property
    def changes_scores(self) -> bool:
        """Whether penalties, biases or allowed ids come before the temperature."""
        if self.logit_bias or self.allowed_ids is not None or self.repetition_penalty != 1:
            return True
        return self.presence_penalty != 0 or self.frequency_penalty != 0

    def with_seed(self, rng: random.Random | np.random.Generator | None = None) -> SamplingParams:
        """Return the same with a seed: its own, else one of 31 bits from ``rng`` or the system."""
        if self.seed is not None:
            return self
        if rng is None:
            seed = random.SystemRandom().randrange(GENERATED_SEED_LIMIT)
        elif isinstance(rng, np.random.Generator):
            seed = int(rng.integers(GENERATED_SEED_LIMIT))
        else:
            seed = rng.randrange(GENERATED_SEED_LIMIT)
        return dataclasses.replace(self, seed=seed)

    def check_ids(self, vocab_size: int) -> None:
        """Raise ``InputError`` where an option names a token outside the vocabulary."""
        for name in ("logit_bias", "allowed_ids", "stop_ids"):
            largest = max(getattr(self, name) or (), default=-1)
            if largest >= vocab_size:
                raise InputError(
                    f"{name} names token {largest}, which is not in the vocabulary: "
                    f"ids are 0 to {vocab_size - 1}"
                )


_Check = Callable[[str, Any], Any]
"""Takes an option's name and value; returns the value in its proper type."""


def _wrong(name: str, what: str, value: object) -> InputError:
    return InputError(f"{name} must be {what}, not {reprlib.repr(value)}")


def _is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _as_float(value: Any) -> float:
    """Return a number as a float, and NaN for what is none."""
    if not (_is_integer(value) or isinstance(value, float | np.floating)):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # an integer of more than 308 digits
        return math.nan


def _number(allowed: Callable[[float], bool], limits: str) -> _Check:
    def check(name: str, value: Any) -> float:
        number = _as_float(value)
        if not (math.isfinite(number) and allowed(number)):
            raise _wrong(name, f"a number {limits}", value)
        return number

    return check


def _integer(low: int, high: float, limits: str) -> _Check:
    def check(name: str, value: Any) -> int:
        if not (_is_integer(value) and low <= value <= high):
            raise _wrong(name, f"an integer {limits}", value)
        return int(value)

    return check


def _optional(check: _Check) -> _Check:
    return lambda name, value: None if value is None else check(name, value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong(name, "True or False", value)
    return value


def _ids(name: str, value: Any) -> tuple[int, ...]:
    items = _items(value)
    if items is None or not all(_is_integer(item) and item >= 0 for item in items):
        raise _wrong(name, "token ids, each an integer of at least 0", value)
    return tuple(int(item) for item in items)


def _some_ids(name: str, value: Any) -> tuple[int, ...]:
    ids = _ids(name, value)
    if not ids:
        raise _wrong(name, "at least one token id, or None for all", value)
    return ids


def _biases(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise _wrong(name, "a mapping of token id to bias", value)
    ids = _ids(name, list(value))
    check = _number(lambda bias: -100 <= bias <= 100, "from -100 to 100")
    biases = [check(f"{name}[{token_id}]", bias) for token_id, bias in value.items()]
    return dict(zip(ids, biases, strict=True))


def _stops(name: str, value: Any) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else _items(value)
    if items is None or not all(isinstance(item, str) and item for item in items):
        raise _wrong(name, "non-empty strings", value)
    if len(items) > MAX_STOPS:
        raise InputError(f"{name} has {len(items)} strings: at most {MAX_STOPS} are possible")
    return items


def _items(value: Any) -> tuple[Any, ...] | None:
    """Return the members of a collection; None for what is not one, or is text."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        return None
    return tuple(value)


_CHECKS: Mapping[str, _Check] = {
    "max_tokens": _optional(_integer(0, math.inf, "of at least 0, or None")),
    "temperature": _number(lambda x: x >= 0, "of at least 0 (0 is greedy)"),
    "top_k": _integer(0, math.inf, "of at least 0 (0 means all)"),
    "top_p": _number(lambda x: 0 < x <= 1, "above 0 and at most 1 (1 means all)"),
    "min_p": _number(lambda x: 0 <= x <= 1, "from 0 to 1 (0 means all)"),
    "repetition_penalty": _number(lambda x: x > 0, "above 0 (1 changes nothing)"),
    "repetition_counts": _flag,
    "presence_penalty": _number(lambda x: -2 <= x <= 2, "from -2 to 2 (0 changes nothing)"),
    "frequency_penalty": _number(lambda x: -2 <= x <= 2, "from -2 to 2 (0 changes nothing)"),
    "logit_bias": _biases,
    "allowed_ids": _optional(_some_ids),
    "seed": _optional(_integer(0, SEED_LIMIT - 1, "from 0 to 2**63 - 1, or None")),
    "stop": _stops,
    "stop_ids": _ids,
    "ignore_eos": _flag,
    "logprobs": _optional(_integer(0, MAX_LOGPROBS, f"from 0 to {MAX_LOGPROBS}, or None")),
}
