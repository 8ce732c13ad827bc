"""``smollm2 export``: write a model as one file in another format."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from smollm2.cli import options
from smollm2.cli.loading import open_checkpoint, size_text
from smollm2.cli.terminal import Terminal
from smollm2.cli.usage import UsageError

if TYPE_CHECKING:
    from smollm2.checkpoint import Checkpoint
    from smollm2.export import Exported
    from smollm2.formats.smol import SmolTensor

Paths = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL [OUT] | CONFIG TOKENIZER WEIGHTS OUT",
        help="Name, folder or file, and what to write; or its files, one by one.",
        show_default=False,
    ),
]
Calibration = Annotated[
    Path | None,
    typer.Option(
        "--calibration",
        metavar="FILE",
        help="Text that q8 and q4 are fitted to.  [default: the package's own]",
    ),
]


def export(
    paths: Paths,
    to: Annotated[
        Literal["smol"], typer.Option("--to", metavar="smol", help="The format to write.")
    ] = "smol",
    quant: Annotated[
        Literal["f32", "bf16", "q16", "q8", "q4", "q4m"] | None,
        typer.Option(
            "--quant",
            metavar="q8|q4|q4m|q16|bf16|f32",
            help="Kind of the matrices.  [default: whatever loses nothing]",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="OUT", help="The file to write.")
    ] = None,
    calibration: Calibration = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
    offline: options.Offline = False,
    no_color: options.NoColor = False,
) -> None:
    """Write a model as one file that is mapped, not read.

    The path of the file goes to stdout, all else to stderr. Without a name for it, the file goes
    to the working folder.

    Example: smollm2 export smollm2-135m-instruct --quant q8 -o model.smol
    """
    terminal = Terminal(no_color=no_color)
    given, target = _split(paths, out)
    path = target or Path(f"{_stem(given[0])}{f'-{quant}' if quant else ''}.{to}")
    from smollm2.export import check_free, export_smol

    check_free(path, force=force)
    text = None if calibration is None else _calibration(calibration, quant)
    checkpoint = _load(given, terminal, offline=offline)
    with terminal.status() as say:

        def show(tensor: SmolTensor, number: int, count: int) -> None:
            say(f"{number}/{count} {tensor.name} {tensor.kind}")

        exported = export_smol(
            checkpoint,
            path,
            quant=quant,
            force=force,
            calibration=text,
            progress=show,
            say=say,
        )
    _summarize(exported, terminal)
    terminal.line(str(path))


def _calibration(path: Path, quant: str | None) -> str:
    from smollm2.kinds import COARSE

    if quant not in COARSE:
        raise UsageError(f"--calibration is for --quant {', '.join(COARSE)}: add one of them")
    text = options.read_file(path)
    if not text.strip():
        raise UsageError(f"{path}: there is no text to calibrate with")
    return text


def _split(paths: list[str], out: Path | None) -> tuple[list[str], Path | None]:
    """What is exported (one path, or three), and the file to write."""
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
            f"{kind.kind:>4}: {kind.tensors} tensors, {kind.bits_per_weight:.2f} bits per weight, "
            f"{size_text(kind.nbytes)}"
        )
    for remark in exported.remarks:
        terminal.note(remark)
    weights = sum(kind.weights for kind in exported.kinds)
    bits = 8 * sum(kind.nbytes for kind in exported.kinds) / weights
    terminal.note(
        f"{exported.path.name}: {size_text(exported.nbytes)}, {bits:.2f} bits per weight, "
        f"checked, in {exported.seconds:.1f} s"
    )
