"""Checkpoint: a folder or a GGUF file with all that a model needs, checked before it is read.

A folder is Hugging Face's: config.json, model.safetensors or its shards, and where they exist
generation_config.json, tokenizer.json and what belongs to it.

Loading is strict: every tensor must be there, in the shape that the config asks for and in the
dtype of the token embedding (a GGUF file may mix its kinds), and nothing else. Loading with
``strict=False`` puts up with tensors that are unexpected and with other floating-point dtypes,
and reports them; a tensor that is missing or has another shape is always an error, since there
would be nothing to compute with.
"""

from __future__ import annotations

import math
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from smollm2 import llama_gguf
from smollm2.config import Config
from smollm2.errors import CheckpointError, ConfigError, InputError, ModelNotFoundError
from smollm2.files import atomic_write, read_json, write_json
from smollm2.formats.gguf import open_gguf
from smollm2.formats.safetensors import open_index, open_safetensors
from smollm2.formats.tensorfile import TensorEntry, TensorFile
from smollm2.quantize import Quantized, Weight
from smollm2.state import LoadReport, Mismatch, NameMapping, State
from smollm2.template import ChatTemplate
from smollm2.tokenizer import Tokenizer
from smollm2.weights import EMBEDDING, HEAD, Weights

_CONFIG = "config.json"
_GENERATION_CONFIG = "generation_config.json"
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"

_FLOATS = ("F64", "F32", "BF16", "F16")
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_STALE = NameMapping(ignore_suffix=("rotary_emb.inv_freq", "masked_bias"))
"""Buffers that old versions of transformers saved and that are computed today."""

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


@dataclass(frozen=True, slots=True)
class _Opened:
    """Files whose structure has been checked and whose tensors have not been read."""

    path: Path
    config: Config
    files: Sequence[TensorFile]
    is_gguf: bool


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a tensor comes from: the file and the name that it has there."""

    file: TensorFile
    name: str

    @property
    def entry(self) -> TensorEntry:
        return self.file.entries[self.name]

    def read(self) -> Weight:
        """Read the weight as it is stored, not copied."""
        entry = self.entry
        if entry.is_dense:
            return self.file.array(self.name)
        rows = math.prod(entry.shape[:-1])
        return Quantized(entry.kind, entry.shape, self.file.raw(self.name).reshape(rows, -1))


def load_checkpoint(
    path: Path | str, *, strict: bool = True, mapping: NameMapping | None = None
) -> Checkpoint:
    """Load a Hugging Face folder, a .gguf file or a folder that holds just one.

    ``mapping`` renames the file's tensors first. Nothing is read of any tensor before the config
    and the names, shapes and dtypes of all of them have been found to fit.

    Raises ``ModelNotFoundError``, ``FormatError`` for a broken file, ``ConfigError``,
    ``CheckpointError`` (one, with all that does not fit), ``TokenizerError``, ``TemplateError``.
    """
    opened = _open(Path(path))
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
            lambda name: _read(found[name], name, opened),
            num_layers=config.num_hidden_layers,
            tied=config.tie_word_embeddings,
        ),
        tokenizer=tokenizer,
        template=ChatTemplate(template) if template is not None else None,
        generation_config=_generation_config(opened),
        report=report,
    )


def state_of(weights: Weights[Weight]) -> State:
    """Name weights: in file order, the tied tensor once."""
    return State(weights.items())


def save_checkpoint(
    checkpoint: Checkpoint, folder: Path | str, *, dtype: str | None = None
) -> None:
    """Write a Hugging Face folder that transformers and ``load_checkpoint`` read.

    The folder must not exist or be empty; it appears once all of it is written. Files of the
    tokenizer are written as they were. ``dtype`` ("float32", "bfloat16", "float16") converts the
    weights, which quantized ones need.

    Raises ``InputError`` for a folder with content and for weights that are not all of one of
    these dtypes, ``CheckpointError`` for weights that do not fit the config, and ``OSError``.
    """
    state = state_of(checkpoint.weights)
    if {spec.name: spec.shape for spec in state.descriptor} != checkpoint.config.shapes:
        raise CheckpointError("the weights have other names or shapes than the config asks for")
    if dtype is not None:
        state = state.dequantize(dtype)
    kinds = sorted({spec.kind for spec in state.descriptor})
    if len(kinds) > 1 or kinds[0] not in _DTYPES:
        raise InputError(
            f"the weights are {' and '.join(kinds)}, but a folder has one of {', '.join(_DTYPES)}: "
            "give dtype to convert them"
        )
    config = replace(checkpoint.config, dtype=_DTYPES[kinds[0]])
    tokenizer, template = checkpoint.tokenizer, checkpoint.template
    with _new_folder(Path(folder).resolve()) as temporary:
        write_json(temporary / _CONFIG, config.to_dict())
        if checkpoint.generation_config:
            write_json(temporary / _GENERATION_CONFIG, dict(checkpoint.generation_config))
        if tokenizer is not None:
            tokenizer.save(temporary)
        if template is not None and (
            tokenizer is None or template.source != tokenizer.chat_template
        ):
            with atomic_write(temporary / "chat_template.jinja") as file:
                file.write(template.source.encode())
        state.save(temporary / _SINGLE)


def _open(path: Path) -> _Opened:
    if path.is_file() and path.suffix == ".gguf":
        return _open_gguf(path)
    if path.is_file():
        raise ModelNotFoundError(f"{path}: give a .gguf file, or the folder of a checkpoint")
    if not path.is_dir():
        raise ModelNotFoundError(f"{path}: no such folder or file")
    stored = [name for name in (_SINGLE, _INDEX) if (path / name).is_file()]
    if len(stored) == 2:
        raise CheckpointError(f"{path}: holds both {_SINGLE} and {_INDEX}: keep one of them")
    if not stored:
        return _open_gguf(_only_gguf(path))
    config = Config.from_file(path / _CONFIG)
    index = _INDEX in stored
    files = open_index(path / _INDEX) if index else [open_safetensors(path / _SINGLE)]
    return _Opened(path, config, files, is_gguf=False)


def _only_gguf(folder: Path) -> Path:
    paths = sorted(folder.glob("*.gguf"))
    if not paths:
        raise ModelNotFoundError(f"{folder}: holds no {_SINGLE}, {_INDEX} or .gguf file")
    if len(paths) > 1:
        names = ", ".join(path.name for path in paths)
        raise CheckpointError(f"{folder}: holds {len(paths)} .gguf files: give one of {names}")
    return paths[0]


def _open_gguf(path: Path) -> _Opened:
    file = open_gguf(path)
    parts = file.metadata.get("split.count")
    if isinstance(parts, int) and parts > 1:
        raise CheckpointError(
            f"{path}: one part of {parts}: join them with `llama-gguf-split --merge`"
        )
    try:
        config = Config.from_gguf(file.metadata, file.entries.keys())
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return _Opened(path, config, [file], is_gguf=True)


def _match(opened: _Opened, mapping: NameMapping | None) -> tuple[dict[str, _Source], LoadReport]:
    """Which of the files' tensors is which of the model's, and what is wrong with them."""
    found: dict[str, _Source] = {}
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
    dtypes = [] if opened.is_gguf else _dtype_mismatches(fitting, found.get(EMBEDDING))
    useless = {mismatch.name for mismatch in dtypes if mismatch.got not in _FLOATS}
    return found, LoadReport(
        loaded=tuple(name for name in fitting if name not in useless),
        ignored=tuple(ignored),
        missing=tuple(name for name in expected if name not in found),
        unexpected=tuple(unexpected),
        shape_mismatches=tuple(shapes),
        dtype_mismatches=tuple(dtypes),
    )


def _targets(opened: _Opened, mapping: NameMapping | None) -> Iterator[tuple[_Source, str | None]]:
    sources = {name: _Source(file, name) for file in opened.files for name in file.entries}
    first = (mapping or NameMapping()).apply(sources)
    rules = llama_gguf.NAMES if opened.is_gguf else _STALE
    second = rules.apply(target for target in first.values() if target is not None)
    for name, target in first.items():
        yield sources[name], None if target is None else second[target]


def _dtype_mismatches(
    entries: Mapping[str, TensorEntry], embedding: _Source | None
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


def _check_ignored(opened: _Opened, found: Mapping[str, _Source]) -> None:
    """Read what may be ignored only for its values."""
    head = found.get(HEAD)
    tied = opened.config.tie_word_embeddings
    if tied and head is not None and not _same_tensor(head, found[EMBEDDING]):
        raise CheckpointError(
            f"{head.name} differs from the token embedding, but tie_word_embeddings is true: "
            "set it to false in config.json to use the stored head"
        )
    factors = _Source(opened.files[0], llama_gguf.ROPE_FACTORS)
    if opened.is_gguf and factors.name in factors.file.entries:
        values = factors.read()
        if isinstance(values, Quantized) or not np.all(values == 1):
            raise CheckpointError(
                f"{factors.name} scales RoPE's frequencies, which is not supported"
            )


def _same_tensor(one: _Source, other: _Source) -> bool:
    if (one.entry.shape, one.entry.kind) != (other.entry.shape, other.entry.kind):
        return False
    first, second = one.file.raw(one.name), other.file.raw(other.name)
    return all(
        np.array_equal(first[start : start + _CHUNK], second[start : start + _CHUNK])
        for start in range(0, len(first), _CHUNK)
    )


def _read(source: _Source, name: str, opened: _Opened) -> Weight:
    weight = source.read()
    return llama_gguf.restore_rows(name, weight, opened.config) if opened.is_gguf else weight


def _tokenizer(opened: _Opened) -> Tokenizer | None:
    """Open the tokenizer, if there is one; none of its ids may lie outside the embedding."""
    if opened.is_gguf:
        metadata = opened.files[0].metadata
        if "tokenizer.ggml.tokens" not in metadata:
            return None
        tokenizer = Tokenizer.from_gguf(metadata)
    elif (opened.path / "tokenizer.json").is_file():
        tokenizer = Tokenizer.from_folder(opened.path)
    else:
        return None
    if tokenizer.vocab_size > opened.config.vocab_size:
        raise CheckpointError(
            f"{opened.path}: the tokenizer has {tokenizer.vocab_size} tokens, but vocab_size is "
            f"{opened.config.vocab_size}"
        )
    return tokenizer


def _generation_config(opened: _Opened) -> Mapping[str, Any]:
    path = opened.path / _GENERATION_CONFIG
    return {} if opened.is_gguf or not path.is_file() else read_json(path)


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """Make a folder that gets its name when the body ends, and is deleted if it raises."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder}: exists and is not an empty folder: give a new one")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{secrets.token_hex(8)}.tmp")
    temporary.mkdir()
    try:
        yield temporary
        if folder.exists():
            folder.rmdir()
        temporary.replace(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
