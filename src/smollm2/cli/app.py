"""The Typer app: which commands there are."""

from __future__ import annotations

from typing import Annotated

import typer

from smollm2._version import __version__
from smollm2.cli.bench import bench
from smollm2.cli.chat import chat
from smollm2.cli.eval import eval_
from smollm2.cli.export import export
from smollm2.cli.listing import list_
from smollm2.cli.pull import pull
from smollm2.cli.run import run
from smollm2.cli.show import show
from smollm2.cli.tokenize import tokenize
from smollm2.cli.usage import Command, Group
from smollm2.cli.verify import verify

app = typer.Typer(
    cls=Group,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"smollm2 {__version__}")
        raise typer.Exit


@app.callback()
def smollm2(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Everything a person does with a SmolLM2 model.

    Example: smollm2 run "The capital of France is"
    """


app.command(cls=Command)(run)
app.command(cls=Command)(chat)
app.command(cls=Command)(pull)
app.command("list", cls=Command)(list_)
app.command(cls=Command)(show)
app.command(cls=Command)(tokenize)
app.command(cls=Command)(verify)
app.command(cls=Command)(bench)
app.command("eval", cls=Command)(eval_)
app.command(cls=Command)(export)
