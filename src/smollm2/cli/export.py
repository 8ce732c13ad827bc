"""``smollm2 export``: write a model in another format."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from smollm2.cli import options
from smollm2.cli.loading import open_checkpoint, size_text
from smollm2.cli.targets import Asked, target_of
from smollm2.cli.terminal import Terminal
from smollm2.cli.usage import UsageError

if TYPE_CHECKING:
    from smollm2.checkpoint import Checkpoint
    from smollm2.export import Exported, Progress, Tensor

Paths = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL [OUT] | CONFIG TOKENIZER WEIGHTS OUT",
        help="Name, folder or file, and what to write; or its files, one by one.",
        show_default=False,
    ),
]
To = Annotated[
    str,
    typer.Option("--to", metavar="FORMAT", help="smol, gguf, huggingface, onnx or stablehlo."),
]
Quant = Annotated[
    str | None,
    typer.Option(
        "--quant", metavar="KIND", help="Kind of the matrices.  [default: whatever loses nothing]"
    ),
]
Out = Annotated[Path | None, typer.Option("-o", "--out", metavar="OUT", help="What to write.")]
Calibration = Annotated[
    Path | None,
    typer.Option(
        "--calibration",
        metavar="FILE",
        help="Text that smol's q8 and q4 fit.  [default: the package's own]",
    ),
]
ShardSize = Annotated[
    str | None,
    typer.Option(
        "--shard-size",
        metavar="SIZE",
        help="Largest weights file of huggingface.  [default: 5GB]",
    ),
]
Entry = Annotated[
    str | None,
    typer.Option(
        "--entry", metavar="NAME", help="Which way to call the model onnx and stablehlo hold."
    ),
]
Bind = Annotated[
    list[str] | None,
    typer.Option(
        "--bind",
        metavar="SYMBOL=SIZE",
        help="Size of the entry's inputs, for each symbol one.  [MaxSeq: the context length]",
    ),
]


def list_entries(asked: bool) -> None:
    """Write the signature of each entry, if that is ``asked``, and end."""
    if asked:
        from smollm2.entries.table import ENTRIES

        terminal = Terminal()
        for entry in ENTRIES.values():
            terminal.line(entry.signature)
        raise typer.Exit


Entries = Annotated[
    bool,
    typer.Option(
        "--entries",
        callback=list_entries,
        is_eager=True,
        help="List entries, their inputs and results, and exit.",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace what exists.")]

_SIZE = re.compile(r"(?P<count>\d{1,15}) ?(?P<unit>[KMGT]?B)", re.IGNORECASE)
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def export(
    paths: Paths = None,
    to: To = "smol",
    quant: Quant = None,
    out: Out = None,
    calibration: Calibration = None,
    shard_size: ShardSize = None,
    entry: Entry = None,
    bind: Bind = None,
    _entries: Entries = False,
    force: Force = False,
    offline: options.Offline = False,
    no_color: options.NoColor = False,
) -> None:
    """Write a model in another format.

    It is one file or, for transformers, a folder. Its path goes to stdout, all else to stderr.
    Without a name for it, it goes to the working folder.

    smol, which is mapped and not read, is q8, q4, q4m, q16, bf16 or f32; gguf, for llama.cpp, is
    q8_0, q4_0, q4_1, f16, bf16 or f32; huggingface is f16, bf16 or f32. onnx, for onnxruntime, is
    one entry of the model with shapes that --bind makes static, f16 or f32; stablehlo, for XLA, is
    that too, or bf16, without weights: text or, named .mlirbc, bytecode. The cache comes in, as
    zeros at first, and goes out for the next call; a row of it holds MaxSeq tokens.

    Example: smollm2 export smollm2-135m-instruct --to gguf --quant q8_0

    Example: smollm2 export smollm2-135m-instruct --to onnx --entry prefill --bind B=1 --bind S=8
    """
    terminal = Terminal(no_color=no_color)
    given, path = _split(paths or [], out)
    of_formats = {
        "--calibration": calibration,
        "--shard-size": shard_size,
        "--entry": entry,
        "--bind": bind or None,
    }
    target, sizes = target_of(to, quant, of_formats), _sizes(bind or [])
    stem = _stem(given[-1])
    path = path or Path("-".join(filter(None, (stem, entry, quant))) + target.ending)
    target.check(path, force)
    text = None if calibration is None else _calibration(calibration, quant)
    limit = None if shard_size is None else _bytes(shard_size)
    checkpoint = _load(given, terminal, offline=offline)
    with terminal.status() as say:
        asked = Asked(
            name=stem,
            quant=quant,
            force=force,
            calibration=text,
            shard_size=limit,
            entry=entry,
            sizes=sizes,
            progress=_progress(say),
            say=say,
        )
        exported = target.write(checkpoint, path, asked)
    _summarize(exported, terminal)
    terminal.line(str(path))


def _progress(say: Callable[[str], object]) -> Progress:
    """What tells of each tensor in a line."""

    def show(tensor: Tensor, number: int, count: int) -> None:
        say(f"{number}/{count} {tensor.name} {tensor.kind.lower()}")

    return show


def _bytes(size: str) -> int:
    """A size with a decimal unit, ``5GB``, in bytes."""
    match = _SIZE.fullmatch(size)
    if match is None or not int(match["count"]):
        raise UsageError(f"--shard-size is {size!r:.80}: give a size such as 500MB or 5GB")
    return int(match["count"]) * _UNITS[match["unit"].upper()]


def _sizes(bind: list[str]) -> dict[str, int]:
    """What ``--bind`` says of each symbol."""
    if not bind:
        return {}
    from smollm2.errors import InputError
    from smollm2.export.binding import parse_bindings

    try:
        return parse_bindings(bind)
    except InputError as error:
        raise UsageError(str(error)) from None


def _calibration(path: Path, quant: str | None) -> str:
    from smollm2.kinds import COARSE

    if quant not in COARSE:
        raise UsageError(f"--calibration is for --quant {', '.join(COARSE)}: add one of them")
    text = options.read_file(path)
    if not text.strip():
        raise UsageError(f"{path}: there is no text to calibrate with")
    return text


def _split(paths: list[str], out: Path | None) -> tuple[list[str], Path | None]:
    """What is exported (one path, or three), and the path to write."""
    count = len(paths) + (out is not None)
    if len(paths) > 4 or count not in (1, 2, 4):
        raise UsageError(
            "give MODEL, MODEL OUT, or CONFIG TOKENIZER WEIGHTS OUT; see smollm2 export --help"
        )
    if count == 1 or out is not None:
        return paths, out
    return paths[:-1], Path(paths[-1])


def _stem(model: str) -> str:
    """What to call the file that is made of a model."""
    path = Path(model).absolute()
    return path.name if path.is_dir() or not path.exists() else path.stem


def _load(given: list[str], terminal: Terminal, *, offline: bool) -> Checkpoint:
    if len(given) == 1:
        return open_checkpoint(given[0], terminal, offline=offline)
    from smollm2.checkpoint import load_files

    config, tokenizer, weights = map(Path, given)
    return load_files(config, tokenizer, weights)


def _summarize(exported: Exported, terminal: Terminal) -> None:
    for kind in exported.kinds:
        terminal.note(
            f"{kind.kind.lower():>4}: {kind.tensors} tensors, "
            f"{kind.bits_per_weight:.2f} bits per weight, {size_text(kind.nbytes)}"
        )
    for remark in exported.remarks:
        terminal.note(remark)
    size = size_text(exported.nbytes)
    if weights := sum(kind.weights for kind in exported.kinds):
        bits = 8 * sum(kind.nbytes for kind in exported.kinds) / weights
        size += f", {bits:.2f} bits per weight, checked"
    terminal.note(f"{exported.path.name}: {size}, in {exported.seconds:.1f} s")
