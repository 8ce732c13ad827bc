"""Checkpoint: a folder or a file with all that a model needs, checked before it is read.

A folder is Hugging Face's: config.json, model.safetensors or its shards, and where they exist
generation_config.json, tokenizer.json and what belongs to it. A file is GGUF or .smol.

Loading is strict: every tensor must be there, in the shape that the config asks for and in the
dtype of the token embedding (a single file may mix its kinds), and nothing else. Loading with
``strict=False`` puts up with tensors that are unexpected and with other floating-point dtypes,
and reports them; a tensor that is missing or has another shape is always an error, since there
would be nothing to compute with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from smollm2 import llama_gguf
from smollm2.bindings import Bindings, Given
from smollm2.config import Config
from smollm2.errors import CheckpointError, InputError
from smollm2.files import json_bytes
from smollm2.formats.tensorfile import TensorEntry
from smollm2.opening import CONFIG, GENERATION_CONFIG, Opened, Source, open_files, open_path
from smollm2.quantize import Weight
from smollm2.state import LoadReport, Mismatch, NameMapping, State
from smollm2.template import ChatTemplate
from smollm2.tokenizer import Tokenizer
from smollm2.weights import EMBEDDING, HEAD, Weights

_FLOATS = ("F64", "F32", "BF16", "F16")

_CHUNK = 2**24
"""Bytes compared at a time."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Checkpoint:
    """A loaded checkpoint; dense weights are read-only views of the mapped file."""

    path: Path
    config: Config
    weights: Weights[Weight]
    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    generation_config: Mapping[str, Any]
    report: LoadReport


def load_checkpoint(
    path: Path | str,
    *,
    strict: bool = True,
    mapping: NameMapping | None = None,
    bindings: Given | None = None,
    verify: bool = False,
) -> Checkpoint:
    """Load a Hugging Face folder, a .gguf or .smol file, or a folder that holds just one.

    ``mapping`` renames the file's tensors first. ``bindings``, a mapping or the path of a JSON
    file, say instead which tensor each weight is: ``{canonical name: tensor}``. Where they bind
    the head and the token embedding to one tensor, the head is tied, whatever the config says.

    Nothing is read of any tensor before the config and the names, shapes and dtypes of all of
    them have been found to fit; but ``verify`` compares the checksums of a .smol file's.

    Raises ``ModelNotFoundError``, ``FormatError`` for a broken file, ``ConfigError``,
    ``CheckpointError`` (one, with all that does not fit), ``TokenizerError``, ``TemplateError``,
    and ``InputError`` for wrong bindings.
    """
    if bindings is None:
        return _load(open_path(Path(path), verify=verify), strict=strict, mapping=mapping)
    if mapping is not None:
        raise InputError("mapping and bindings both say what tensors are: give one of them")
    bound = Bindings.read(bindings)
    opened = open_path(Path(path), verify=verify)
    if bound.tie:
        opened = replace(opened, config=replace(opened.config, tie_word_embeddings=True))
    return _load(opened, strict=strict, mapping=bound.mapping(opened.config, opened.sources))


def load_files(config: Path, tokenizer: Path, weights: Path) -> Checkpoint:
    """Load a config.json, a tokenizer.json, and a .safetensors file or the index of its shards.

    For files that do not lie in one folder. Strict, and raises, as ``load_checkpoint``.
    """
    return _load(open_files(config, tokenizer, weights), strict=True, mapping=None)


def _load(opened: Opened, *, strict: bool, mapping: NameMapping | None) -> Checkpoint:
    config = opened.config
    found, report = _match(opened, mapping)
    try:
        report.raise_if_strict() if strict else report.raise_if_unusable()
        _check_ignored(opened, found)
    except CheckpointError as error:
        raise CheckpointError(f"{opened.path}: {error}") from None
    tokenizer = _tokenizer(opened)
    template = tokenizer.chat_template if tokenizer is not None else None
    return Checkpoint(
        path=opened.path,
        config=config,
        weights=Weights.build(
            lambda name: opened.restore(name, found[name].read()),
            num_layers=config.num_hidden_layers,
            tied=config.tie_word_embeddings,
        ),
        tokenizer=tokenizer,
        template=ChatTemplate(template) if template is not None else None,
        generation_config=opened.generation_config(),
        report=report,
    )


def state_of(weights: Weights[Weight]) -> State:
    """Name weights: in file order, the tied tensor once."""
    return State(weights.items())


def side_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Make all files of a Hugging Face folder beside the weights, by name.

    Files of the tokenizer are as they were.
    """
    files = {CONFIG: json_bytes(checkpoint.config.to_dict())}
    if checkpoint.generation_config:
        files[GENERATION_CONFIG] = json_bytes(dict(checkpoint.generation_config))
    tokenizer, template = checkpoint.tokenizer, checkpoint.template
    if tokenizer is not None:
        files |= tokenizer.files()
    if template is not None and (tokenizer is None or template.source != tokenizer.chat_template):
        files["chat_template.jinja"] = template.source.encode()
    return files


def _match(opened: Opened, mapping: NameMapping | None) -> tuple[dict[str, Source], LoadReport]:
    """Which of the files' tensors is which of the model's, and what is wrong with them."""
    found: dict[str, Source] = {}
    ignored: list[str] = []
    unexpected: list[str] = []
    expected = opened.config.shapes
    for source, target in _targets(opened, mapping):
        if target is None:
            ignored.append(source.name)
        elif target in expected:
            found[target] = source
        elif target == HEAD:
            found[target] = source
            ignored.append(source.name)
        else:
            unexpected.append(source.name)
    shapes = [
        Mismatch(name, shape, found[name].entry.shape)
        for name, shape in expected.items()
        if name in found and found[name].entry.shape != shape
    ]
    wrong = {mismatch.name for mismatch in shapes}
    fitting = {name: found[name].entry for name in expected if name in found and name not in wrong}
    dtypes = _dtype_mismatches(fitting, found.get(EMBEDDING)) if opened.same_dtype else []
    useless = {mismatch.name for mismatch in dtypes if mismatch.got not in _FLOATS}
    return found, LoadReport(
        loaded=tuple(name for name in fitting if name not in useless),
        ignored=tuple(ignored),
        missing=tuple(name for name in expected if name not in found),
        unexpected=tuple(unexpected),
        shape_mismatches=tuple(shapes),
        dtype_mismatches=tuple(dtypes),
    )


def _targets(opened: Opened, mapping: NameMapping | None) -> Iterator[tuple[Source, str | None]]:
    first = (mapping or NameMapping()).apply(opened.sources)
    second = opened.rules.apply(target for target in first.values() if target is not None)
    for name, target in first.items():
        yield opened.sources[name], None if target is None else second[target]


def _dtype_mismatches(
    entries: Mapping[str, TensorEntry], embedding: Source | None
) -> list[Mismatch]:
    """Compare with the model's dtype, which is that of its token embedding."""
    kind = embedding.entry.kind if embedding is not None else None
    if kind not in _FLOATS:
        return [
            Mismatch(name, " or ".join(_FLOATS), entry.kind)
            for name, entry in entries.items()
            if entry.kind not in _FLOATS
        ]
    return [
        Mismatch(name, kind, entry.kind) for name, entry in entries.items() if entry.kind != kind
    ]


def _check_ignored(opened: Opened, found: Mapping[str, Source]) -> None:
    """Read what may be ignored only for its values."""
    head = found.get(HEAD)
    tied = opened.config.tie_word_embeddings
    if tied and head is not None and not _same_tensor(head, found[EMBEDDING]):
        raise CheckpointError(
            f"{head.name} differs from the token embedding, but tie_word_embeddings is true: "
            "set it to false in config.json to use the stored head"
        )
    factors = opened.sources.get(llama_gguf.ROPE_FACTORS)
    if factors is not None and opened.rules is llama_gguf.NAMES:
        values = factors.read()
        if not isinstance(values, np.ndarray) or not np.all(values == 1):
            raise CheckpointError(
                f"{factors.name} scales RoPE's frequencies, which is not supported"
            )


def _same_tensor(one: Source, other: Source) -> bool:
    if (one.entry.shape, one.entry.kind) != (other.entry.shape, other.entry.kind):
        return False
    first, second = one.raw().reshape(-1), other.raw().reshape(-1)
    return all(
        np.array_equal(first[start : start + _CHUNK], second[start : start + _CHUNK])
        for start in range(0, len(first), _CHUNK)
    )


def _tokenizer(opened: Opened) -> Tokenizer | None:
    """Open the tokenizer, if there is one; none of its ids may lie outside the embedding."""
    tokenizer = opened.tokenizer()
    if tokenizer is not None and tokenizer.vocab_size > opened.config.vocab_size:
        raise CheckpointError(
            f"{opened.path}: the tokenizer has {tokenizer.vocab_size} tokens, but vocab_size is "
            f"{opened.config.vocab_size}"
        )
    return tokenizer
