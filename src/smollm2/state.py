"""State: weights under validated names, how names are mapped, and what a load found."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smollm2.errors import CheckpointError, InputError
from smollm2.formats.safetensors import open_safetensors, write_safetensors
from smollm2.quantize import Scaled, Weight, as_dense, kind_of

_MAX_LISTED = 20
_KINDS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)\}")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a tensor is without its values."""

    name: str
    shape: tuple[int, ...]
    kind: str


class State(Mapping[str, Weight]):
    """Weights by name, in order.

    Takes a mapping or (name, weight) pairs. A name is segments joined by dots, none empty, and
    occurs once, else ``CheckpointError``. A weight under two names (a tied head) is listed once,
    under the first.
    """

    def __init__(self, weights: Mapping[str, Weight] | Iterable[tuple[str, Weight]] = ()) -> None:
        pairs = weights.items() if isinstance(weights, Mapping) else weights
        self._weights: dict[str, Weight] = {}
        names: set[str] = set()
        tensors: set[object] = set()
        for name, weight in pairs:
            _check_name(name)
            if name in names:
                raise CheckpointError(f"two tensors are named {name!r:.200}")
            names.add(name)
            identity = _identity(weight)
            if identity not in tensors:
                tensors.add(identity)
                self._weights[name] = weight
        self.descriptor: tuple[TensorSpec, ...] = tuple(
            TensorSpec(name, weight.shape, kind_of(weight))
            for name, weight in self._weights.items()
        )

    def __getitem__(self, name: str) -> Weight:
        return self._weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def __repr__(self) -> str:
        return f"State of {len(self)} tensors"

    def dequantize(self, dtype: str = "float32") -> State:
        """Make dense arrays of one dtype of all weights: "float32", "bfloat16" or "float16".

        Weights that are so already are not copied. Raises ``InputError`` for a dtype that is none
        of these, and for values that it has no room for.
        """
        if dtype not in _KINDS:
            raise InputError(f"dtype is {dtype!r}: it must be one of {', '.join(_KINDS)}")
        return State((name, as_dense(weight, _KINDS[dtype])) for name, weight in self.items())

    def save(self, path: Path) -> None:
        """Write one safetensors file, atomically.

        Raises ``InputError`` for quantized weights, which safetensors does not hold.
        """
        dense: dict[str, NDArray[Any]] = {}
        for name, weight in self.items():
            if not isinstance(weight, np.ndarray):
                raise InputError(
                    f"tensor {name!r} is {_kind_text(weight)}, which safetensors cannot hold: "
                    "dequantize the weights to float32, bfloat16 or float16 first"
                )
            dense[name] = weight
        write_safetensors(path, dense, {"format": "pt"})

    @classmethod
    def load(cls, path: Path) -> State:
        """Open a safetensors file; the weights are read-only views of it.

        Raises ``FormatError`` for a broken file.
        """
        file = open_safetensors(path)
        return cls((name, file.array(name)) for name in file.entries)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A tensor whose shape or dtype is not the one that the config asks for."""

    name: str
    expected: tuple[int, ...] | str
    got: tuple[int, ...] | str

    def __str__(self) -> str:
        expected, got = (_shown(value) for value in (self.expected, self.got))
        return f"{_shown(self.name)} (expected {expected}, got {got})"


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load found: names of tensors, in file order.

    ``ignored`` and ``unexpected`` are the file's names, the others the model's. A tensor with
    both mismatches counts among the shapes only; one with another floating-point dtype can be
    computed with, so it is ``loaded`` as well.
    """

    loaded: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    shape_mismatches: tuple[Mismatch, ...] = ()
    dtype_mismatches: tuple[Mismatch, ...] = ()

    def summary(self) -> str:
        """All that is wrong, in one line; empty where nothing is."""
        return _summary(
            {
                "missing": self.missing,
                "unexpected": self.unexpected,
                "shape mismatches": self.shape_mismatches,
                "dtype mismatches": self.dtype_mismatches,
            }
        )

    def raise_if_strict(self) -> None:
        """Raise one ``CheckpointError`` that lists everything that is wrong."""
        if text := self.summary():
            raise CheckpointError(text)

    def raise_if_unusable(self) -> None:
        """Raise for what no model can do without: its tensors, in their shapes, of numbers."""
        useless = [fault for fault in self.dtype_mismatches if fault.name not in self.loaded]
        faults: dict[str, Sequence[object]] = {
            "missing": self.missing,
            "shape mismatches": self.shape_mismatches,
            "dtype mismatches": useless,
        }
        if text := _summary(faults):
            raise CheckpointError(text)


@dataclass(frozen=True)
class NameMapping:
    """Rules that turn a file's tensor names into a model's; names without a rule stay.

    - ``rename``: whole names
    - ``rewrite``: patterns, as ``"h.{i}.attn.weight"`` → ``"layers.{i}.attention.weight"``; a
      placeholder stands for one whole segment and occurs once on each side
    - ``ignore_suffix``: last segments of names to leave out

    Raises ``InputError`` for a rule that is malformed or given twice.
    """

    rename: Mapping[str, str] = field(default_factory=dict)
    rewrite: Mapping[str, str] = field(default_factory=dict)
    ignore_suffix: tuple[str, ...] = ()
    _patterns: tuple[tuple[re.Pattern[str], str, str], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if len(set(self.ignore_suffix)) < len(self.ignore_suffix):
            raise InputError(f"ignore_suffix {self.ignore_suffix} has a suffix twice")
        for name in (*self.rename, *self.rename.values(), *self.ignore_suffix):
            if not name or "" in name.split("."):
                raise InputError(f"mapping rule {name!r} has an empty segment")
        patterns = [
            (_pattern(source, target), source, target) for source, target in self.rewrite.items()
        ]
        if len({_PLACEHOLDER.sub("{}", source) for source in self.rewrite}) < len(patterns):
            raise InputError("two rewrite rules have the same pattern")
        object.__setattr__(self, "_patterns", tuple(patterns))

    def apply(self, names: Iterable[str]) -> dict[str, str | None]:
        """Each name's target, None where it is ignored.

        Raises ``CheckpointError`` where two rules match a name or two names get one target.
        """
        targets: dict[str, str | None] = {}
        sources: dict[str, str] = {}
        for name in names:
            target = self._target(name)
            if target is not None:
                if target in sources:
                    raise CheckpointError(
                        f"tensors {sources[target]!r:.200} and {name!r:.200} are both mapped to "
                        f"{target!r:.200}"
                    )
                sources[target] = name
            targets[name] = target
        return targets

    def _target(self, name: str) -> str | None:
        found: list[tuple[str, str | None]] = []
        if name in self.rename:
            found.append((name, self.rename[name]))
        for pattern, source, target in self._patterns:
            if match := pattern.fullmatch(name):
                found.append((source, target.format_map(match.groupdict())))
        found += [
            (suffix, None)
            for suffix in self.ignore_suffix
            if name == suffix or name.endswith(f".{suffix}")
        ]
        if len(found) > 1:
            rules = " and ".join(repr(rule) for rule, _ in found)
            raise CheckpointError(f"tensor {name!r:.200} matches two mapping rules: {rules}")
        return found[0][1] if found else name


def _pattern(source: str, target: str) -> re.Pattern[str]:
    """Compile a rewrite rule's source; its placeholders become named groups."""
    captures = [_captures(rule) for rule in (source, target)]
    if sorted(captures[0]) != sorted(captures[1]) or len(set(captures[0])) < len(captures[0]):
        raise InputError(
            f"rewrite rule {source!r} to {target!r}: each placeholder must occur once on each side"
        )
    return re.compile(
        r"\.".join(
            f"(?P<{match[1]}>[^.]+)" if (match := _PLACEHOLDER.fullmatch(part)) else re.escape(part)
            for part in source.split(".")
        )
    )


def _captures(rule: str) -> list[str]:
    captures: list[str] = []
    for part in rule.split("."):
        if match := _PLACEHOLDER.fullmatch(part):
            captures.append(match[1])
        elif not part or "{" in part or "}" in part:
            raise InputError(
                f"rewrite rule {rule!r}: segments must not be empty, and a placeholder such as "
                "{layer} must be a whole segment"
            )
    return captures


def _check_name(name: str) -> None:
    if not isinstance(name, str) or "" in name.split("."):
        raise CheckpointError(f"tensor name {name!r:.80} has an empty segment")


def _kind_text(weight: Weight) -> str:
    return "scaled" if isinstance(weight, Scaled) else kind_of(weight)


def _identity(weight: Weight) -> object:
    """Equal for weights that are the same memory seen in the same way."""
    if isinstance(weight, Scaled):
        return id(weight)
    array = weight if isinstance(weight, np.ndarray) else weight.data
    if array.size == 0:
        return id(weight)
    return (array.ctypes.data, kind_of(weight), weight.shape, array.strides)


def _shown(value: object) -> str:
    """Write a name, a kind, a shape or a mismatch so that it fits into one line."""
    if isinstance(value, str):
        return value if value.isprintable() and len(value) <= 200 else f"{value!r:.200}"
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _summary(faults: Mapping[str, Sequence[object]]) -> str:
    texts = []
    for what, items in faults.items():
        if items:
            more = f" and {len(items) - _MAX_LISTED} more" if len(items) > _MAX_LISTED else ""
            texts.append(f"{what}: {', '.join(map(_shown, items[:_MAX_LISTED]))}{more}")
    return "; ".join(texts)
