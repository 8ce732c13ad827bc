"""Exporting a checkpoint as one GGUF file, which llama.cpp and what is built on it read."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smollm2.checkpoint import Checkpoint, state_of
from smollm2.errors import CheckpointError, InputError, TokenizerError
from smollm2.export.exported import Exported, Making, Progress, check_free, kind_sizes
from smollm2.formats.gguf_writer import GgufTensor, write_gguf
from smollm2.ggml_groups import GGML_ROUNDED, ggml_groups, ggml_kind, repacked
from smollm2.llama_gguf import WRITTEN_NAMES, interleaved_rows, metadata_of
from smollm2.packing import Packed
from smollm2.quantize import Quantized, Weight, as_dense, as_float32, kind_of
from smollm2.stopping import stop_ids
from smollm2.tokenizer.gguf_keys import gguf_vocabulary
from smollm2.weights import EMBEDDING, HEAD

Bytes = NDArray[np.uint8]

GGUF_QUANTS = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1")
"""Kinds that matrices can be written as."""

_ENDS = {"Q4_0": "Q8_0", "Q4_1": "Q8_0"}
"""What the embedding and the head become where 4 bit is asked for, as in llama.cpp's own files."""

_FILE_TYPES = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q8_0": 7,
    "Q5_0": 8,
    "Q5_1": 9,
    "Q4_K": 15,
    "Q5_K": 17,
    "Q6_K": 18,
    "BF16": 32,
}
"""``general.file_type`` by the kind of most matrices: ``llama_ftype`` in llama.cpp's llama.h."""

_MAX_ENDS = 3
_CHUNK = 2**22
"""Values that are converted at a time."""


def export_gguf(
    checkpoint: Checkpoint,
    path: Path | str,
    *,
    quant: str | None = None,
    name: str | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Exported:
    """Write a GGUF file, atomically, as llama.cpp's converter writes one of such a checkpoint.

    It is opened and compared before it gets its name. ``quant`` is one of ``GGUF_QUANTS``; with
    the 4-bit ones, the embedding and the head are q8_0. Without it, each matrix is held without
    loss. Groups that are of the kind already are written as they are; others are rounded as ggml
    rounds them. Norms are float32, a tied head is not written. ``name`` is the model's name in the
    file, by default that of the checkpoint's folder or file. ``progress`` is told of each tensor
    with its number and their count.

    Raises ``InputError`` for an unknown quant, a file that exists (unless ``force``), and weights
    that the kind cannot hold, ``TokenizerError`` where there is no tokenizer, or one that GGUF
    cannot say, ``CheckpointError`` for weights that do not fit the config, and ``OSError``.
    """
    began = time.perf_counter()
    path = Path(path)
    if quant is not None and quant not in GGUF_QUANTS:
        raise InputError(f"quant is {quant!r:.80}: it must be one of {', '.join(GGUF_QUANTS)}")
    check_free(path, ".gguf", force=force)
    plan = _Plan(checkpoint, quant)
    source = Path(os.path.abspath(checkpoint.path))  # "." and ".." have no names
    name = name or (source.name if source.is_dir() else source.stem)
    metadata, remarks = _metadata(checkpoint, name, plan.file_type)
    making = Making(checkpoint.path, len(plan.tensors), progress)

    def pieces(tensor: GgufTensor) -> Iterator[Bytes]:
        with making.of(tensor):
            yield from plan.pieces(tensor)

    write_gguf(path, metadata, plan.tensors, pieces)
    seconds = time.perf_counter() - began
    return Exported(path, path.stat().st_size, seconds, kind_sizes(plan.tensors), remarks)


class _Plan:
    """Which tensors a file gets, of which kinds, and how each is made."""

    def __init__(self, checkpoint: Checkpoint, quant: str | None) -> None:
        self._config = checkpoint.config
        weights = state_of(checkpoint.weights)
        if {spec.name: spec.shape for spec in weights.descriptor} != self._config.shapes:
            raise CheckpointError("the weights have other names or shapes than the config asks for")
        names = WRITTEN_NAMES.apply(weights)
        self._weights = {names[name] or name: (name, weight) for name, weight in weights.items()}
        self.tensors = tuple(
            GgufTensor(theirs, _kind(ours, weight, quant), weight.shape)
            for theirs, (ours, weight) in self._weights.items()
        )
        for tensor in self.tensors:
            if tensor.kind in GGML_ROUNDED and tensor.shape[-1] % 32:
                raise InputError(
                    f"{tensor.name} has rows of {tensor.shape[-1]}, but {tensor.kind.lower()} "
                    "needs a multiple of 32: choose f32, f16 or bf16"
                )

    @property
    def file_type(self) -> int:
        """The number for the kind of most matrices."""
        kinds = Counter(tensor.kind for tensor in self.tensors if len(tensor.shape) == 2)
        return _FILE_TYPES[kinds.most_common(1)[0][0]]

    def pieces(self, tensor: GgufTensor) -> Iterator[Bytes]:
        """The bytes of a tensor, some rows at a time."""
        name, weight = self._weights[tensor.name]
        order = interleaved_rows(name, self._config)
        if len(weight.shape) == 1:
            yield as_float32(weight).view(np.uint8)
            return
        if isinstance(weight, Packed) and ggml_kind(weight) == tensor.kind:
            weight = repacked(weight, tensor.kind)
        elif not isinstance(weight, np.ndarray | Quantized):
            weight = as_float32(weight)
        rows, cols = weight.shape
        step = max(1, _CHUNK // cols)
        for start in range(0, rows, step):
            chosen = np.arange(start, min(start + step, rows))
            yield _rows(weight, chosen if order is None else order[chosen], tensor.kind)


def _rows(weight: NDArray[Any] | Quantized, chosen: NDArray[np.int64], kind: str) -> Bytes:
    """Some rows of a matrix as bytes of a kind."""
    part = weight.take_rows(chosen) if isinstance(weight, Quantized) else weight[chosen]
    if isinstance(part, Quantized) and part.kind == kind:
        return part.data
    if kind in GGML_ROUNDED:
        return ggml_groups(as_float32(part), kind)
    return np.ascontiguousarray(as_dense(part, kind)).view(np.uint8)


def _kind(name: str, weight: Weight, quant: str | None) -> str:
    """The kind that a weight gets in the file."""
    if len(weight.shape) == 1:
        return "F32"
    stored = _stored_kind(weight)
    if quant is not None:
        asked = quant.upper()
        return _ENDS.get(asked, asked) if name in (EMBEDDING, HEAD) and stored != asked else asked
    if stored is None:
        raise InputError(f"{name} is F64, which llama.cpp does not compute with: give a quant")
    return stored


def _stored_kind(weight: Weight) -> str | None:
    """The kind of GGUF that holds a matrix without loss, the smallest; None where none does."""
    if isinstance(weight, Packed):
        return ggml_kind(weight) or ("BF16" if weight.kind == "bf16" else "F32")
    kind = kind_of(weight)
    return None if kind == "F64" else kind


def _metadata(
    checkpoint: Checkpoint, name: str, file_type: int
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The keys of a file, and what llama.cpp will make of a model that lacks some."""
    config, tokenizer, template = checkpoint.config, checkpoint.tokenizer, checkpoint.template
    if tokenizer is None:
        raise TokenizerError(
            f"{checkpoint.path}: has no tokenizer, without which llama.cpp opens no GGUF file: put "
            "its tokenizer.json beside the weights"
        )
    try:
        vocabulary = gguf_vocabulary(tokenizer, config.vocab_size)
    except TokenizerError as error:
        raise TokenizerError(f"{checkpoint.path}: {error}") from None
    ends = _end_ids(checkpoint)
    metadata = {
        "general.architecture": "llama",
        "general.type": "model",
        "general.name": name,
        "general.file_type": file_type,
        "general.quantization_version": 2,
        **metadata_of(config, ends),
        **vocabulary,
    }
    if template is not None:
        metadata["tokenizer.chat_template"] = template.source
    return metadata, _remarks(ends)


def _end_ids(checkpoint: Checkpoint) -> list[int]:
    """The ids that end an answer, those of the config first."""
    config, tokenizer = checkpoint.config, checkpoint.tokenizer
    others = stop_ids(config, checkpoint.generation_config, None, None)
    eos = None if tokenizer is None else tokenizer.eos_id
    ends = dict.fromkeys([*config.eos_token_ids, *sorted(others), eos])
    return [token_id for token_id in ends if token_id is not None]


def _remarks(ends: list[int]) -> tuple[str, ...]:
    if not ends:
        return ("no token is known to end an answer: llama.cpp takes the one with id 11",)
    if len(ends) > _MAX_ENDS:
        left_out = ", ".join(map(str, ends[_MAX_ENDS:]))
        return (f"GGUF has room for {_MAX_ENDS} ids that end an answer: left out: {left_out}",)
    return ()
