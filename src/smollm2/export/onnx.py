"""Exporting an entry of a checkpoint as an ONNX file, which onnxruntime runs."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from smollm2.backends import check_framework
from smollm2.checkpoint import Checkpoint, state_of
from smollm2.errors import CheckpointError, InputError, MissingDependencyError
from smollm2.export.binding import Bound, bind
from smollm2.export.exported import Exported, check_free, kind_sizes, naming_tensor
from smollm2.files import naming, temporary_folder
from smollm2.formats.tensorfile import DENSE_DTYPES, TensorEntry
from smollm2.quantize import Weight, as_dense

if TYPE_CHECKING:
    from torch import Tensor
    from torch.onnx import ONNXProgram

SUFFIX = ".onnx"

ONNX_DTYPES = {"float32": "F32", "float16": "F16"}
"""What weights and cache can be, and the kind that other files call it."""

OPSET = 23
"""The first that has attention and RMS norms as operators: onnxruntime from 1.23 on."""

SINGLE_FILE = 2_000_000_000
"""Bytes of weights that are held in the file itself, which Protocol Buffers limit to 2 GiB."""


def export_onnx(
    checkpoint: Checkpoint,
    path: Path | str,
    *,
    entry: str,
    sizes: Mapping[str, int],
    dtype: str = "float32",
    force: bool = False,
    say: Callable[[str], object] = lambda _: None,
) -> Exported:
    """Write an entry (see ``ENTRIES``) as an ONNX file, atomically, which is checked before.

    ``sizes`` binds the entry's symbols, see ``smollm2.export.binding.bind``: all shapes are static.
    The graph takes the entry's inputs by their names and, after them, ``cache_keys.0``,
    ``cache_values.0`` and so on, [slots, kv heads, head size] of each layer, zeros at first; it
    gives ``logits``, ``ids``, ``hidden``, ``log_probs`` or ``loss``, and ``new_cache_keys.0`` and
    so on, which the next call takes. Position p of row b of a fixed cache is slot
    ``b * MaxSeq + p``; its last slot is scratch, as page 0 of a paged one is. So graphs of
    different entries can share a cache. ``generate``, ``sample`` and ``generate_until``, which
    gives ``counts`` too, are steps of decode one after the other, and the file grows with each.

    Nothing is checked when a graph runs: positions must continue what is stored, as the entries of
    this package ask for. All of the cache takes part in each step, with a weight of 0 behind what a
    row holds: so it must be finite, and what is NaN there has to be made 0. Weights are in the
    file, or beside it in ``<path>.data`` where they take more than 2 GB. Metadata say the entry,
    its sizes, the config, and what a caller has to keep to. ``say`` is told of each stage.

    Raises ``InputError`` for an unknown entry or dtype, sizes that do not fit the entry or the
    model, weights that the dtype has no room for, and a file that exists (unless ``force``),
    ``CheckpointError`` for weights that do not fit the config, ``MissingDependencyError`` where
    torch, onnx or onnxscript is not installed, and ``OSError``.
    """
    began = time.perf_counter()
    path = Path(path).absolute()
    if dtype not in ONNX_DTYPES:
        raise InputError(f"dtype is {dtype!r:.80}: it must be one of {', '.join(ONNX_DTYPES)}")
    bound = bind(entry, checkpoint.config, sizes)
    check_onnx(path, force=force)
    check_framework("torch", "this export", extra="export")
    require(onnx="onnx", onnxscript="onnxscript")
    shapes = {spec.name: spec.shape for spec in state_of(checkpoint.weights).descriptor}
    if shapes != checkpoint.config.shapes:
        raise CheckpointError("the weights have other names or shapes than the config asks for")
    say(f"tracing {entry} with {bound.bindings}")
    program = _program(checkpoint, bound, dtype)
    program.model.metadata_props.update(bound.facts(dtype))
    say(f"writing {path.name}")
    nbytes = _write(program, path, external=_nbytes(shapes, dtype) > SINGLE_FILE, say=say)
    return Exported(
        path,
        nbytes,
        time.perf_counter() - began,
        kind_sizes(
            TensorEntry(name, ONNX_DTYPES[dtype], shape, 0, _nbytes({name: shape}, dtype))
            for name, shape in shapes.items()
        ),
    )


def check_onnx(path: Path, *, force: bool) -> None:
    """Raise ``InputError`` where the file, or that of its weights, may not be written."""
    check_free(path, SUFFIX, force=force)
    data = _data_file(path)
    if data.exists() and not force:
        raise InputError(f"{data}: exists: give another name, or --force to replace it")


def require(**packages: str) -> None:
    """Raise ``MissingDependencyError`` for the first of these that is not installed."""
    for module, name in packages.items():
        if find_spec(module) is None:
            raise MissingDependencyError(
                f"this export needs {name}, which is not installed: pip install 'smollm2[export]'"
            )


def _program(checkpoint: Checkpoint, bound: Bound, dtype: str) -> ONNXProgram:
    """The graph, made by torch's exporter."""
    import torch
    from onnxscript import optimizer

    from smollm2.export.graph import EntryGraph

    def tensor(name: str, weight: Weight) -> Tensor:
        with naming_tensor(checkpoint.path, name):
            return torch.from_numpy(np.array(as_dense(weight, ONNX_DTYPES[dtype])))

    graph = EntryGraph(bound, checkpoint.weights.map(tensor))
    examples = _examples(bound, getattr(torch, dtype))
    with _quiet():
        traced = torch.export.export(graph, tuple(examples.values()))
        program = torch.onnx.export(
            traced,
            input_names=[*examples],
            output_names=bound.result_names,
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
            optimize=False,
        )
    assert program is not None  # it is None for TorchScript alone
    # All rules of the optimizer take time that grows with the square of the graph.
    optimizer.fold_constants_ir(program.model)
    optimizer.remove_unused_nodes(program.model)
    _forget_traces(program.model.graph)
    return program


def _forget_traces(graph: Any) -> None:
    """Drop what the exporter notes of itself: names in Python, and paths of this machine."""
    values = (value for node in graph for value in node.outputs)
    parts = (*graph, *graph.inputs, *graph.initializers.values(), *values)
    for part in (graph, *parts):
        part.metadata_props.clear()


def _examples(bound: Bound, dtype: Any) -> dict[str, Tensor]:
    """An input of each shape, without memory: a cache may be larger than that of this machine."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):  # the weights are real
        return {
            **{
                item.name: torch.zeros(bound.inputs[item.name], dtype=getattr(torch, item.dtype))
                for item in bound.entry.inputs
            },
            **{name: torch.zeros(bound.cache_shape, dtype=dtype) for name in bound.cache_names},
        }


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the exporter says of itself: a type of its own that is to go, torchvision."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = logger.level
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated", FutureWarning)
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)


def _write(
    program: ONNXProgram, path: Path, *, external: bool, say: Callable[[str], object]
) -> int:
    """Write the file in a folder beside its place, check it there, and move it; returns bytes."""
    import onnx

    with temporary_folder(path) as folder, naming(path, folder / path.name):
        written = folder / path.name
        program.save(written, external_data=external)
        say(f"checking {path.name}")
        onnx.checker.check_model(written, full_check=True)
        files = sorted(folder.iterdir(), key=lambda file: file.name, reverse=True)
        nbytes = sum(file.stat().st_size for file in files)
        for file in files:  # the weights first
            with file.open("rb+") as opened:
                os.fsync(opened.fileno())
            file.replace(path.parent / file.name)
    if not external:
        _data_file(path).unlink(missing_ok=True)
    return nbytes


def _data_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.data")


def _nbytes(shapes: Mapping[str, tuple[int, ...]], dtype: str) -> int:
    return sum(map(prod, shapes.values())) * DENSE_DTYPES[ONNX_DTYPES[dtype]].itemsize
