"""``smollm2 verify``: check a model's files against their checksums."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from smollm2.cli import options
from smollm2.cli.loading import size_text
from smollm2.cli.terminal import Terminal

if TYPE_CHECKING:
    from smollm2.registry import FileCheck

_DIGEST = re.compile("([0-9a-f]{12})[0-9a-f]{52}")


def verify(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="The name that it was pulled under, or a .smol file."),
    ] = options.DEFAULT_MODEL,
    hub: Annotated[
        bool,
        typer.Option("--hub", help="Check what the hub has, without fetching the weights."),
    ] = False,
    json: options.Json = False,
    no_color: options.NoColor = False,
) -> None:
    """Check the files of a model.

    Their sizes and SHA-256 must be those that they were fetched with; a .smol file has checksums.
    On the hub, the tensors must have the names, shapes and dtypes that the config asks for.

    Example: smollm2 verify smollm2-135m-instruct

    Example: smollm2 verify HuggingFaceTB/SmolLM2-1.7B --hub
    """
    terminal = Terminal(no_color=no_color)
    if hub:
        _verify_hub(name, terminal, as_json=json)
        return
    from smollm2.prepared import verify as check_files

    checks = check_files(name)
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
        count = f"{len(bad)} of {len(checks)} files of {name} are damaged"
        terminal.error(f"{count}: {_remedy(name, bad)}")
        raise typer.Exit(1)


def _verify_hub(name: str, terminal: Terminal, *, as_json: bool) -> None:
    from smollm2.registry.remote import check_hub

    snapshot = check_hub(name)
    if as_json:
        detail = f"fits {snapshot.repo}@{snapshot.commit}"
        terminal.json(
            [{"path": file.name, "ok": True, "detail": detail} for file in snapshot.files]
        )
    else:
        rows = [("ok", file.name, size_text(file.size)) for file in snapshot.files]
        terminal.table(("", "FILE", "SIZE"), rows)


def _remedy(name: str, bad: Sequence[FileCheck]) -> str:
    from smollm2.prepared import FILE
    from smollm2.registry import local_path

    if local_path(name) is not None:
        return "smollm2 export writes it again"
    if all(check.path.name == FILE for check in bad):
        return f"smollm2 pull {name} makes it again"
    return f"smollm2 pull --force {name} fetches them again"
