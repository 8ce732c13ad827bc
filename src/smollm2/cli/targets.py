"""Targets of an export: for each format, what its names end in, what it takes, and who writes it.

Another format is another row of ``TARGETS``. Whatever computes is imported when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from smollm2.cli.usage import UsageError

if TYPE_CHECKING:
    from smollm2.checkpoint import Checkpoint
    from smollm2.export import Exported, Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What an export was asked for; ``name`` is that of the model, ``sizes`` those of an entry."""

    name: str
    quant: str | None
    force: bool
    calibration: str | None
    shard_size: int | None
    entry: str | None
    sizes: Mapping[str, int]
    progress: Progress
    say: Callable[[str], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A format: ``options`` are those of the command that only some formats take.

    ``needs_entry``: it holds an entry of the model, which ``--entry`` names. ``check`` raises where
    the path cannot be written, before anything is loaded.
    """

    ending: str
    quants: tuple[str, ...]
    options: tuple[str, ...]
    needs_entry: bool = False
    check: Callable[[Path, bool], None]
    write: Callable[[Checkpoint, Path, Asked], Exported]


def target_of(to: str, quant: str | None, options: Mapping[str, object]) -> Target:
    """Find a format, and check what was given beside it: ``options`` by name, None if not given.

    Raises ``UsageError`` in one line that says what there is.
    """
    if to not in TARGETS:
        raise UsageError(f"--to is {to!r:.80}: it must be one of {', '.join(TARGETS)}")
    target = TARGETS[to]
    for option, value in {"--quant": quant, **options}.items():
        if value is not None and option not in target.options:
            others = [name for name, other in TARGETS.items() if option in other.options]
            raise UsageError(f"{option} is for --to {', '.join(others)}, not for {to}")
    if quant is not None and quant not in target.quants:
        takes = ", ".join(target.quants)
        raise UsageError(f"--quant is {quant!r:.80}: --to {to} takes {takes}")
    if target.needs_entry and options.get("--entry") is None:
        raise UsageError(f"--to {to} needs --entry: smollm2 export --entries lists them")
    return target


def _check_file(ending: str, path: Path, force: bool) -> None:
    from smollm2.export import check_free

    check_free(path, ending, force=force)


def _smol(checkpoint: Checkpoint, path: Path, asked: Asked) -> Exported:
    from smollm2.export import export_smol

    return export_smol(
        checkpoint,
        path,
        quant=asked.quant,
        force=asked.force,
        calibration=asked.calibration,
        progress=asked.progress,
        say=asked.say,
    )


def _gguf(checkpoint: Checkpoint, path: Path, asked: Asked) -> Exported:
    from smollm2.export import export_gguf

    return export_gguf(
        checkpoint,
        path,
        quant=asked.quant,
        name=asked.name,
        force=asked.force,
        progress=asked.progress,
    )


def _check_huggingface(path: Path, force: bool) -> None:
    from smollm2.export import check_folder

    check_folder(path, force=force)


def _huggingface(checkpoint: Checkpoint, path: Path, asked: Asked) -> Exported:
    from smollm2.export import DTYPES, MAX_SHARD_SIZE, save_checkpoint

    return save_checkpoint(
        checkpoint,
        path,
        dtype=_dtype(DTYPES, asked.quant),
        max_shard_size=asked.shard_size or MAX_SHARD_SIZE,
        force=asked.force,
        progress=asked.progress,
    )


def _check_onnx(path: Path, force: bool) -> None:
    from smollm2.export.onnx import check_onnx

    check_onnx(path, force=force)


def _onnx(checkpoint: Checkpoint, path: Path, asked: Asked) -> Exported:
    from smollm2.export.onnx import ONNX_DTYPES, export_onnx

    return _entry(export_onnx, ONNX_DTYPES, checkpoint, path, asked)


def _check_stablehlo(path: Path, force: bool) -> None:
    from smollm2.export.stablehlo import check_stablehlo

    check_stablehlo(path, force=force)


def _stablehlo(checkpoint: Checkpoint, path: Path, asked: Asked) -> Exported:
    from smollm2.export.stablehlo import STABLEHLO_DTYPES, export_stablehlo

    return _entry(export_stablehlo, STABLEHLO_DTYPES, checkpoint, path, asked)


def _entry(
    export: Callable[..., Exported],
    dtypes: Mapping[str, str],
    checkpoint: Checkpoint,
    path: Path,
    asked: Asked,
) -> Exported:
    """Export an entry as one of the formats of graphs, whose ``dtypes`` have these kinds."""
    return export(
        checkpoint,
        path,
        entry=asked.entry or "",
        sizes=asked.sizes,
        dtype=_dtype(dtypes, asked.quant or "f32"),
        force=asked.force,
        say=asked.say,
    )


def _dtype(dtypes: Mapping[str, str], quant: str | None) -> str | None:
    """The dtype whose kind ``--quant`` says; None where it says none."""
    return None if quant is None else {kind.lower(): name for name, kind in dtypes.items()}[quant]


TARGETS: Mapping[str, Target] = MappingProxyType(
    {
        "smol": Target(
            ending=".smol",
            quants=("q8", "q4", "q4m", "q16", "bf16", "f32"),
            options=("--quant", "--calibration"),
            check=partial(_check_file, ".smol"),
            write=_smol,
        ),
        "gguf": Target(
            ending=".gguf",
            quants=("q8_0", "q4_0", "q4_1", "f16", "bf16", "f32"),
            options=("--quant",),
            check=partial(_check_file, ".gguf"),
            write=_gguf,
        ),
        "huggingface": Target(
            ending="-hf",
            quants=("f16", "bf16", "f32"),
            options=("--quant", "--shard-size"),
            check=_check_huggingface,
            write=_huggingface,
        ),
        "onnx": Target(
            ending=".onnx",
            quants=("f16", "f32"),
            options=("--quant", "--entry", "--bind"),
            needs_entry=True,
            check=_check_onnx,
            write=_onnx,
        ),
        "stablehlo": Target(
            ending=".mlir",
            quants=("f16", "bf16", "f32"),
            options=("--quant", "--entry", "--bind"),
            needs_entry=True,
            check=_check_stablehlo,
            write=_stablehlo,
        ),
    }
)
"""Formats by their name, in the order of the help."""
