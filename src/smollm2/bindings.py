"""Bindings: which tensor of a checkpoint each weight of the model is, said from outside.

``{canonical name: tensor name in the checkpoint}``, given as a mapping or as a JSON file. Names may
be those of Linnet's cards as well (``layers.0.attention.q_proj.weight``), whose ``bindings.json``
is such a file. A weight that is not bound has the name that it has without bindings.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from smollm2.config import Config
from smollm2.errors import CheckpointError, InputError
from smollm2.files import read_json
from smollm2.state import NameMapping
from smollm2.weights import EMBEDDING, HEAD

Given: TypeAlias = Path | str | Mapping[str, str]
"""Bindings as they are given: the path of a JSON file, or what would be in it."""

_LINNET = NameMapping(
    rename={"embedding.weight": EMBEDDING, "norm.weight": "model.norm.weight"},
    rewrite={
        f"layers.{{layer}}.{theirs}.weight": f"model.layers.{{layer}}.{ours}.weight"
        for theirs, ours in (
            ("attention_norm", "input_layernorm"),
            ("mlp_norm", "post_attention_layernorm"),
            *((f"attention.{part}_proj", f"self_attn.{part}_proj") for part in "qkvo"),
            *((f"mlp.{part}", f"mlp.{part}_proj") for part in ("gate", "up", "down")),
        )
    },
)
"""Linnet's paths → canonical names."""


@dataclass(frozen=True, slots=True)
class Bindings:
    """Bindings that have been read: ``tensors`` is canonical name → tensor, ``source`` a name.

    Raises ``InputError`` where they are not strings, or name a weight twice.
    """

    tensors: Mapping[str, str]
    source: str

    @classmethod
    def read(cls, given: Given) -> Bindings:
        """Take a mapping, or read a JSON file. Raises ``FormatError`` for one that is broken."""
        if isinstance(given, Mapping):
            return cls._of(given, "bindings")
        if not isinstance(given, str | Path):
            raise InputError(
                f"bindings is {type(given).__name__}: give a mapping, or the path of a JSON file"
            )
        return cls._of(read_json(Path(given)), str(given))

    @classmethod
    def _of(cls, values: Mapping[str, object], source: str) -> Bindings:
        names = {name: tensor for name, tensor in values.items() if isinstance(tensor, str)}
        if len(names) < len(values) or not all(isinstance(name, str) for name in names):
            wrong = next((name for name in values if name not in names), "a key")
            raise InputError(f"{source}: {wrong!r:.80}: bindings map names to names of tensors")
        try:
            canonical = _LINNET.apply(names)
        except CheckpointError as error:
            raise InputError(f"{source}: {error}") from None
        return cls({canonical[name] or name: tensor for name, tensor in names.items()}, source)

    @property
    def tie(self) -> bool:
        """Whether the head and the token embedding are bound to one tensor."""
        return HEAD in self.tensors and self.tensors[HEAD] == self.tensors.get(EMBEDDING)

    def mapping(self, config: Config, stored: Collection[str]) -> NameMapping:
        """Make the rules that rename a checkpoint's ``stored`` tensors.

        Raises ``InputError``, in one line that names the nearest, for a name that the model does
        not have, a tensor that is not stored, and two names of one tensor, unless they are those
        of the head and the token embedding.
        """
        known = (*config.shapes, HEAD)
        names: dict[str, str] = {}
        for name, tensor in self.tensors.items():
            if name not in known:
                raise InputError(
                    f"{self.source}: the model has no weight {name!r:.200}{_nearest(name, known)}"
                )
            if tensor not in stored:
                raise InputError(
                    f"{self.source}: {name} is bound to {tensor!r:.200}, which the checkpoint "
                    f"does not have{_nearest(tensor, stored)}"
                )
            if tensor in names and {name, names[tensor]} != {EMBEDDING, HEAD}:
                raise InputError(
                    f"{self.source}: {names[tensor]} and {name} are both bound to {tensor!r:.200}"
                )
            if tensor not in names or name == EMBEDDING:
                names[tensor] = name
        return NameMapping(rename=names)


def _nearest(name: str, names: Iterable[str]) -> str:
    from difflib import get_close_matches

    near = get_close_matches(name, names, n=1)
    return f": did you mean {near[0]!r:.200}?" if near else ""
