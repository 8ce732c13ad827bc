"""Opening: which files make up a checkpoint, and what each format says of the model in them.

Whatever the format, an ``Opened`` has the config, the tensors under the file's names, and ways
to the tokenizer and the generation config. No tensor has been read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smollm2 import llama_gguf
from smollm2.config import Config
from smollm2.errors import CheckpointError, ConfigError, FormatError, ModelNotFoundError
from smollm2.files import parse_json, read_json
from smollm2.formats.gguf import open_gguf
from smollm2.formats.safetensors import open_index, open_safetensors
from smollm2.formats.smol import BLOCK_BYTES, MAGIC, VERSION, open_smol
from smollm2.formats.tensorfile import TensorEntry, TensorFile
from smollm2.packing import Packed
from smollm2.quantize import Quantized, Weight
from smollm2.stacks import unstack
from smollm2.state import NameMapping
from smollm2.tokenizer import Tokenizer

if TYPE_CHECKING:
    from smollm2.formats.dart import DartFile

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_TOKENIZER = "tokenizer.json"

_AS_THEY_ARE = NameMapping()
_STALE = NameMapping(ignore_suffix=("rotary_emb.inv_freq", "masked_bias"))
"""Buffers that old versions of transformers saved and that are computed today."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a tensor comes from: its shape and kind, and ways to its bytes and its weight."""

    entry: TensorEntry
    raw: Callable[[], Any]
    read: Callable[[], Weight]

    @property
    def name(self) -> str:
        """The name that the tensor has in its file."""
        return self.entry.name


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """Files whose structure has been checked and whose tensors have not been read.

    ``rules`` turn the files' names into canonical ones; ``same_dtype``: all tensors should be of
    the dtype of the token embedding; ``restore`` puts a weight into the canonical order.
    """

    path: Path
    config: Config
    sources: Mapping[str, Source]
    tokenizer: Callable[[], Tokenizer | None]
    generation_config: Callable[[], Mapping[str, Any]] = dict
    rules: NameMapping = _AS_THEY_ARE
    same_dtype: bool = False
    restore: Callable[[str, Weight], Weight] = lambda _, weight: weight


def open_path(path: Path, *, verify: bool = False) -> Opened:
    """Open a Hugging Face folder, a .gguf or .smol file, or a folder that holds just one.

    ``verify`` compares the checksums of all tensors of a .smol file.
    """
    if path.is_file():
        return _open_file(path, verify=verify)
    if not path.is_dir():
        raise ModelNotFoundError(f"{path}: no such folder or file")
    stored = [name for name in (SINGLE, INDEX) if (path / name).is_file()]
    if len(stored) == 2:
        raise CheckpointError(f"{path}: holds both {SINGLE} and {INDEX}: keep one of them")
    if not stored:
        return _open_file(_only_file(path), verify=verify)
    generation_config = path / GENERATION_CONFIG
    return _open_safetensors(
        path,
        path / CONFIG,
        path / stored[0],
        tokenizer=lambda: Tokenizer.from_folder(path) if (path / _TOKENIZER).is_file() else None,
        generation_config=lambda: (
            read_json(generation_config) if generation_config.is_file() else {}
        ),
    )


def open_files(config: Path, tokenizer: Path, weights: Path) -> Opened:
    """Open a config.json, a tokenizer.json, and a .safetensors file or the index of its shards.

    What lies beside the tokenizer.json belongs to it, as in a folder.
    """
    folder = tokenizer.parent
    return _open_safetensors(
        weights,
        config,
        weights,
        tokenizer=lambda: (
            Tokenizer.from_folder(folder)
            if tokenizer.name == _TOKENIZER
            else Tokenizer.from_file(tokenizer)
        ),
    )


def _open_file(path: Path, *, verify: bool) -> Opened:
    if path.suffix == ".gguf":
        return _open_gguf(path)
    try:
        with path.open("rb") as file:
            start = file.read(8)
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None
    if start[:4] == b"GGUF":
        return _open_gguf(path)
    if start[:4] == MAGIC or path.suffix == ".smol":
        old = start[:4] == MAGIC and int.from_bytes(start[4:], "little") < VERSION
        return (_open_dart if old else _open_smol)(path, verify=verify)
    raise ModelNotFoundError(f"{path}: give a .gguf or .smol file, or the folder of a checkpoint")


def _only_file(folder: Path) -> Path:
    paths = sorted(path for path in folder.iterdir() if path.suffix in (".gguf", ".smol"))
    if not paths:
        raise ModelNotFoundError(f"{folder}: holds no {SINGLE}, {INDEX}, .gguf or .smol file")
    if len(paths) > 1:
        kinds = " and ".join(sorted({path.suffix for path in paths}))
        names = ", ".join(path.name for path in paths)
        raise CheckpointError(f"{folder}: holds {len(paths)} {kinds} files: give one of {names}")
    return paths[0]


def _open_safetensors(
    path: Path,
    config: Path,
    weights: Path,
    *,
    tokenizer: Callable[[], Tokenizer | None],
    generation_config: Callable[[], Mapping[str, Any]] = dict,
) -> Opened:
    if not config.is_file():  # as where the Trainer of transformers saved weights alone
        raise FormatError(
            f"{config}: no such file: copy that of the model that these weights are of"
        )
    read = Config.from_file(config)
    files = open_index(weights) if weights.suffix == ".json" else [open_safetensors(weights)]
    return Opened(
        path=path,
        config=read,
        sources=_sources(files),
        tokenizer=tokenizer,
        generation_config=generation_config,
        rules=_STALE,
        same_dtype=True,
    )


def _open_gguf(path: Path) -> Opened:
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
    has_tokenizer = "tokenizer.ggml.tokens" in file.metadata
    return Opened(
        path=path,
        config=config,
        sources=_sources([file]),
        tokenizer=lambda: Tokenizer.from_gguf(file.metadata) if has_tokenizer else None,
        rules=llama_gguf.NAMES,
        restore=lambda name, weight: llama_gguf.restore_rows(name, weight, config),
    )


def _open_smol(path: Path, *, verify: bool) -> Opened:
    file = open_smol(path, verify=verify)
    texts = file.metadata
    if CONFIG not in texts:
        raise FormatError(f"{path}: there is no section {CONFIG}")
    try:
        config = Config.from_dict(parse_json(texts[CONFIG], f"{path}: {CONFIG}"))
    except ConfigError as error:
        raise ConfigError(f"{path}: {CONFIG}: {error}") from None
    generation_config = texts.get(GENERATION_CONFIG, b"{}")
    return Opened(
        path=path,
        config=config,
        sources=_unstacked(file, config),
        tokenizer=lambda: Tokenizer.from_files(texts, path) if _TOKENIZER in texts else None,
        generation_config=lambda: parse_json(generation_config, f"{path}: {GENERATION_CONFIG}"),
    )


def _open_dart(path: Path, *, verify: bool) -> Opened:
    from smollm2.dart_model import config_of, tokenizer_of
    from smollm2.formats.dart import open_dart

    file = open_dart(path)
    for name in file.tensors if verify else ():
        file.read(name)
    return Opened(
        path=path,
        config=config_of(file),
        sources={name: _dart_source(file, entry) for name, entry in file.tensors.items()},
        tokenizer=lambda: tokenizer_of(file),
    )


def _sources(files: Sequence[TensorFile]) -> dict[str, Source]:
    return {name: _source(file, entry) for file in files for name, entry in file.entries.items()}


def _source(file: TensorFile, entry: TensorEntry) -> Source:
    """A tensor that is read as it is stored, not copied."""
    raw = partial(file.raw, entry.name)
    if entry.is_dense:
        return Source(entry, raw, partial(file.array, entry.name))
    if entry.kind in BLOCK_BYTES:
        return Source(entry, raw, lambda: Packed.of_bytes(entry.kind, entry.shape, raw()))
    rows = math.prod(entry.shape[:-1])
    return Source(entry, raw, lambda: Quantized(entry.kind, entry.shape, raw().reshape(rows, -1)))


def _unstacked(file: TensorFile, config: Config) -> dict[str, Source]:
    """Tensors of a .smol file, with each stack's parts in its place."""
    sources: dict[str, Source] = {}
    shapes = config.shapes
    for name, entry in file.entries.items():
        try:
            parts = unstack(entry, shapes)
        except CheckpointError as error:
            raise CheckpointError(f"{file.path}: {error}") from None
        found = (
            [_source(file, entry)]
            if parts is None
            else [_part(file, entry, part.name, part.shape, part.tiles) for part in parts]
        )
        for source in found:
            if source.name in sources:
                raise CheckpointError(f"{file.path}: {source.name} is there twice, in {name}")
            sources[source.name] = source
    return sources


def _part(
    file: TensorFile, stack: TensorEntry, name: str, shape: tuple[int, ...], tiles: slice
) -> Source:
    def read() -> Packed:
        whole = Packed.of_bytes(stack.kind, stack.shape, file.raw(stack.name))
        return Packed(stack.kind, shape, whole.data[tiles])

    entry = TensorEntry(name, stack.kind, shape, stack.offset, stack.nbytes)
    return Source(entry, lambda: read().data, read)


def _dart_source(file: DartFile, entry: TensorEntry) -> Source:
    kind = "BF16" if entry.kind == "bf16" else "F32"
    read = partial(file.read, entry.name)
    seen = TensorEntry(entry.name, kind, entry.shape, entry.offset, entry.nbytes)
    return Source(seen, read, read)
