"""``smollm2 verify``: check a model's files against what was fetched."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from smollm2.cli import options
from smollm2.cli.loading import size_text
from smollm2.cli.terminal import Terminal

_DIGEST = re.compile("([0-9a-f]{12})[0-9a-f]{52}")


def verify(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The name that it was pulled under.")
    ] = options.DEFAULT_MODEL,
    json: options.Json = False,
    no_color: options.NoColor = False,
) -> None:
    """Check the files of a model.

    Their sizes and SHA-256 must be those that they were fetched with.

    Example: smollm2 verify smollm2-135m-instruct
    """
    terminal = Terminal(no_color=no_color)
    from smollm2 import registry

    checks = registry.verify(name)
    if json:
        terminal.json([{"path": str(c.path), "ok": c.ok, "detail": c.detail} for c in checks])
    else:
        terminal.table(
            ("", "FILE", "SIZE"),
            [
                ("ok", check.path.name, size_text(check.path.stat().st_size))
                if check.ok
                else ("bad", check.path.name, _DIGEST.sub(r"\1…", check.detail))
                for check in checks
            ],
        )
    bad = [check for check in checks if not check.ok]
    if bad:
        terminal.error(
            f"{len(bad)} of {len(checks)} files of {name} are damaged: "
            f"smollm2 pull --force {name} fetches them again"
        )
        raise typer.Exit(1)
