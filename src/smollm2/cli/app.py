"""The Typer app: which commands there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Annotated

import typer

from smollm2._version import __version__
from smollm2.cli.usage import Command, Group

_COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "run": "run.run",
        "chat": "chat.chat",
        "pull": "pull.pull",
        "list": "listing.list_",
        "show": "show.show",
        "tokenize": "tokenize.tokenize",
        "verify": "verify.verify",
        "bench": "bench.bench",
        "eval": "eval.eval_",
        "export": "export.export",
    }
)
"""Names of commands, in the order of the help, and where each is."""


def app_for(arguments: Sequence[str]) -> typer.Typer:
    """Return the app with the command that the arguments start with, or else with all of them.

    Typer looks into each option of each command that it has, which takes a millisecond a command.
    """
    app = typer.Typer(
        cls=Group,
        context_settings={"help_option_names": ["-h", "--help"]},
        rich_markup_mode=None,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(smollm2)
    asked = [name for name in arguments[:1] if name in _COMMANDS]
    for name in asked or _COMMANDS:
        module, function = _COMMANDS[name].split(".")
        callback = getattr(import_module(f"smollm2.cli.{module}"), function)
        app.command(name, cls=Command)(callback)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"smollm2 {__version__}")
        raise typer.Exit


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
