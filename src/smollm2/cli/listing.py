"""``smollm2 list``: the models that are here."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from smollm2.cli import options
from smollm2.cli.loading import format_of, size_text
from smollm2.cli.terminal import Terminal

if TYPE_CHECKING:
    from smollm2.registry import LocalModel


def list_(
    json: options.Json = False,
    no_color: options.NoColor = False,
) -> None:
    """List the models that are here.

    A table on a terminal, lines split by tabs in a pipe.

    Example: smollm2 list
    """
    terminal = Terminal(no_color=no_color)
    from smollm2.registry import list_models

    models = list_models()
    if json:
        terminal.json(
            [
                {
                    **asdict(model),
                    "path": str(model.path),
                    "format": format_of(model.path),
                    "prepared": str(model.prepared) if model.prepared else None,
                }
                for model in models
            ]
        )
        return
    if not models:
        terminal.note(f"no models yet: try smollm2 pull {options.DEFAULT_MODEL}")
        return
    terminal.table(
        ("NAME", "SIZE", "FORMAT", "SOURCE", "PATH"),
        [
            (model.name, size_text(model.nbytes), _formats(model), model.source, model.path)
            for model in models
        ],
    )
    for model in models:
        if model.problem:
            terminal.note(f"{model.name} cannot be used: {model.problem}")


def _formats(model: LocalModel) -> str:
    """What was fetched, and what was prepared of it."""
    return f"{format_of(model.path)}{', smol' if model.prepared else ''}"
