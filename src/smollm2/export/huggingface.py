"""Exporting a checkpoint as a Hugging Face folder, which transformers reads."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from smollm2.checkpoint import Checkpoint, load_checkpoint, side_files, state_of
from smollm2.errors import CheckpointError, InputError
from smollm2.export.exported import Exported, Progress, kind_sizes
from smollm2.files import atomic_write, json_bytes, temporary_name
from smollm2.formats.safetensors import stream_safetensors
from smollm2.formats.tensorfile import DENSE_DTYPES, TensorEntry
from smollm2.opening import CONFIG, GENERATION_CONFIG, INDEX, SINGLE
from smollm2.quantize import as_dense
from smollm2.state import State
from smollm2.tokenizer import TOKENIZER_FILES

MAX_SHARD_SIZE = 5_000_000_000
"""Bytes of tensors in one file, as transformers had it for years."""

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""What all weights of a folder can be, and the kind that safetensors calls it."""

_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def save_checkpoint(
    checkpoint: Checkpoint,
    folder: Path | str,
    *,
    dtype: str | None = None,
    max_shard_size: int = MAX_SHARD_SIZE,
    force: bool = False,
    progress: Progress | None = None,
) -> Exported:
    """Write a Hugging Face folder that transformers and ``load_checkpoint`` read.

    It has config.json, model.safetensors, generation_config.json and the tokenizer's files as they
    were. Weights of more than ``max_shard_size`` bytes are split into files of at most as many,
    where no tensor is larger, with an index. The folder gets its name once it has been written,
    opened and compared; it must not exist or be empty, unless ``force``, which replaces one that
    holds nothing but such files.

    ``dtype`` is "float32", "bfloat16" or "float16"; by default that of the weights, and float32
    where they are quantized or mixed, so that nothing is lost. ``progress`` is told of each
    tensor with its number and their count.

    Raises ``InputError`` for another dtype, a folder that may not be replaced, and values that the
    dtype has no room for, ``CheckpointError`` for weights that do not fit the config, and
    ``OSError``.
    """
    began = time.perf_counter()
    if dtype is not None and dtype not in DTYPES:
        raise InputError(f"dtype is {dtype!r:.80}: it must be one of {', '.join(DTYPES)}")
    if max_shard_size < 1:
        raise InputError(f"max_shard_size is {max_shard_size}: it must be a number of bytes")
    folder = Path(folder).resolve()
    check_folder(folder, force=force)
    state = state_of(checkpoint.weights)
    if {spec.name: spec.shape for spec in state.descriptor} != checkpoint.config.shapes:
        raise CheckpointError("the weights have other names or shapes than the config asks for")
    dtype = dtype or _dtype_without_loss(state)
    shards = _shards(_entries(state, DTYPES[dtype]), max_shard_size)
    checkpoint = replace(checkpoint, config=replace(checkpoint.config, dtype=dtype))
    with _new_folder(folder) as temporary:
        for name, data in side_files(checkpoint).items():
            with atomic_write(temporary / name) as file:
                file.write(data)
        _write_weights(temporary, state, shards, progress)
        load_checkpoint(temporary)
    return Exported(
        folder,
        sum(path.stat().st_size for path in folder.iterdir()),
        time.perf_counter() - began,
        kind_sizes(entry for entries in shards.values() for entry in entries),
    )


def check_folder(folder: Path, *, force: bool) -> None:
    """Raise ``InputError`` where a folder would be replaced that nobody said to replace."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise InputError(f"{folder}: exists and is not a folder: give a new one")
    names = [path.name for path in folder.iterdir()]
    if not force and names:
        raise InputError(
            f"{folder}: exists and is not an empty folder: give a new one, or --force to replace it"
        )
    for name in names:
        if name not in _NAMES and not _SHARD.fullmatch(name):
            raise InputError(
                f"{folder}: holds {name!r:.80}, which no export writes: give another folder"
            )


_NAMES = (CONFIG, GENERATION_CONFIG, SINGLE, INDEX, *TOKENIZER_FILES)


def _dtype_without_loss(state: State) -> str:
    kinds = {spec.kind for spec in state.descriptor}
    if "F64" in kinds:
        raise InputError("the weights are F64, which a folder does not hold: give dtype")
    names = [dtype for dtype, kind in DTYPES.items() if kinds == {kind}]
    return names[0] if names else "float32"


def _entries(state: State, kind: str) -> list[TensorEntry]:
    itemsize = DENSE_DTYPES[kind].itemsize
    return [
        TensorEntry(spec.name, kind, spec.shape, 0, prod(spec.shape) * itemsize)
        for spec in state.descriptor
    ]


def _shards(entries: Sequence[TensorEntry], limit: int) -> dict[str, list[TensorEntry]]:
    """Give each tensor to a file, in order; what is larger than the limit has one of its own.

    As ``split_torch_state_dict_into_shards`` of huggingface_hub does.
    """
    groups: list[list[TensorEntry]] = []
    current: list[TensorEntry] = []
    size = 0
    for entry in entries:
        if entry.nbytes > limit:
            groups.append([entry])
            continue
        if size + entry.nbytes > limit:
            groups.append(current)
            current, size = [], 0
        current.append(entry)
        size += entry.nbytes
    if current:
        groups.append(current)
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {
        f"model-{number:05}-of-{len(groups):05}.safetensors": group
        for number, group in enumerate(groups, 1)
    }


def _write_weights(
    folder: Path,
    state: State,
    shards: Mapping[str, Sequence[TensorEntry]],
    progress: Progress | None,
) -> None:
    done = 0

    def make(entry: TensorEntry) -> NDArray[Any]:
        nonlocal done
        done += 1
        if progress is not None:
            progress(entry, done, len(state))
        return as_dense(state[entry.name], entry.kind)

    for name, entries in shards.items():
        stream_safetensors(folder / name, entries, make, {"format": "pt"})
    if len(shards) > 1:
        with atomic_write(folder / INDEX) as file:
            file.write(json_bytes(_index(shards)))


def _index(shards: Mapping[str, Sequence[TensorEntry]]) -> dict[str, Any]:
    """Return the index of the shards, as transformers writes it."""
    placed = [(entry, name) for name, entries in shards.items() for entry in entries]
    return {
        "metadata": {
            "total_parameters": sum(prod(entry.shape) for entry, _ in placed),
            "total_size": sum(entry.nbytes for entry, _ in placed),
        },
        "weight_map": dict(sorted((entry.name, name) for entry, name in placed)),
    }


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """Make a folder that gets its name when the body ends, and is deleted if it raises.

    One that has the name already is moved away first, and deleted last. An ``OSError`` names it,
    not the one that is made.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary, old = (folder.with_name(temporary_name()) for _ in range(2))
    try:
        temporary.mkdir()
        yield temporary
        if folder.exists():
            folder.replace(old)
        temporary.replace(folder)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if old.exists():
            old.replace(folder)
        if isinstance(error, OSError) and str(error.filename).startswith(str(temporary)):
            raise OSError(error.errno, error.strerror, str(folder)) from None
        raise
    shutil.rmtree(old, ignore_errors=True)
