"""Exporting an entry of a model as a StableHLO program, which XLA, IREE and others compile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from smollm2.backends import check_framework
from smollm2.checkpoint import Checkpoint
from smollm2.errors import InputError
from smollm2.export.binding import Bound, bind
from smollm2.export.exported import Exported, check_free
from smollm2.files import atomic_write

TEXT, BYTECODE = ".mlir", ".mlirbc"

STABLEHLO_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""What weights, cache and activations can be, and the kind that other files call it."""


def export_stablehlo(
    checkpoint: Checkpoint,
    path: Path | str,
    *,
    entry: str,
    sizes: Mapping[str, int],
    dtype: str = "float32",
    force: bool = False,
    say: Callable[[str], object] = lambda _: None,
) -> Exported:
    """Write an entry (see ``ENTRIES``) as a StableHLO program, atomically.

    A path that ends in .mlirbc gets portable bytecode, which later versions of StableHLO read as
    well; any other gets text. ``sizes`` binds the entry's symbols, see
    ``smollm2.export.binding.bind``: all shapes are static.

    ``@main`` takes the entry's inputs, then ``cache_keys.0``, ``cache_values.0`` and so on, [slots,
    kv heads, head size] of each layer, zeros at first, then every weight under its canonical name,
    in file order and in ``dtype``: no values of weights are in the file. It gives ``logits``,
    ``ids`` (and ``counts``), ``hidden``, ``log_probs`` or ``loss``, and ``new_cache_keys.0`` and so
    on, which the next call takes. Each argument and result has its name as the attribute
    ``smollm2.name``; the module has ``smollm2.entry``, ``smollm2.signature``, ``smollm2.sizes``,
    ``smollm2.dtype``, ``smollm2.config`` and, for who calls it, ``smollm2.notes``. Position p of
    row b of a fixed cache is slot ``b * MaxSeq + p``; its last slot is scratch, as page 0 of a
    paged one is.

    Nothing is checked when a program runs: positions must continue what is stored, as the entries
    of this package ask for. All of the cache takes part in each step, with a weight of 0 behind
    what a row holds: so it must be finite, and what is NaN there has to be made 0. ``say`` is told
    of each stage.

    Raises ``InputError`` for an unknown entry or dtype, sizes that do not fit the entry or the
    model, and a file that exists (unless ``force``), ``MissingDependencyError`` where JAX is not
    installed, and ``OSError``.
    """
    began = time.perf_counter()
    path = Path(path).absolute()
    if dtype not in STABLEHLO_DTYPES:
        raise InputError(f"dtype is {dtype!r:.80}: it must be one of {', '.join(STABLEHLO_DTYPES)}")
    bound = bind(entry, checkpoint.config, sizes)
    check_stablehlo(path, force=force)
    check_framework("jax", "this export", extra="export")
    say(f"tracing {entry} with {bound.bindings}")
    module = _module(bound, dtype)
    data = _bytecode(module) if path.suffix == BYTECODE else str(module).encode()
    say(f"writing {path.name}")
    with atomic_write(path) as file:
        file.write(data)
    remarks = ("weights are arguments of the program: their values are not in it",)
    return Exported(path, len(data), time.perf_counter() - began, (), remarks)


def check_stablehlo(path: Path, *, force: bool) -> None:
    """Raise ``InputError`` where the file may not be replaced, or has another format's name."""
    check_free(path, BYTECODE if path.suffix == BYTECODE else TEXT, force=force)


def _module(bound: Bound, dtype: str) -> Any:
    """The program as an MLIR module, with its names."""
    import jax.export
    from jax.extend.mlir import ir
    from jax.extend.mlir.dialects import stablehlo

    from smollm2.export.traced import arguments, flat

    def named(names: Iterable[str]) -> ir.ArrayAttr:
        each = [ir.DictAttr.get({"smollm2.name": ir.StringAttr.get(name)}) for name in names]
        return ir.ArrayAttr.get(each)

    taken = arguments(bound, dtype)
    exported = jax.export.export(jax.jit(flat(bound), keep_unused=True), platforms=("cpu",))
    portable = exported(*taken.values()).mlir_module_serialized
    with ir.Context() as context:
        module = stablehlo.deserialize_portable_artifact(context, portable)
        module = ir.Module.parse(str(module))  # which prints no places in files
        main = ir.SymbolTable(module.operation)["main"]
        main.attributes["arg_attrs"] = named(taken)
        main.attributes["res_attrs"] = named(bound.result_names)
        for key, value in bound.facts(dtype).items():
            module.operation.attributes[key] = ir.StringAttr.get(value)
    return module


def _bytecode(module: Any) -> bytes:
    """Portable bytecode for the oldest readers."""
    from jax.extend.mlir.dialects import stablehlo

    data: bytes = stablehlo.serialize_portable_artifact(module, stablehlo.get_minimum_version())
    return data
