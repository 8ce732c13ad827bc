"""Groups of options: what Typer sees of them, and what a command gets."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated

import pytest
import typer

from smollm2.cli.app import app_for
from smollm2.cli.grouping import HIDDEN, grouped
from smollm2.cli.options import Computing, Loading, Sampling


@dataclass(frozen=True, kw_only=True)
class Size:
    width: Annotated[int, typer.Option("-w", "--width", help="How wide.")] = 3
    height: Annotated[int, typer.Option("--height", help="How high.")]


def invoke(command: typer.Typer, *arguments: str) -> object:
    return typer.main.get_command(command).main(
        list(arguments), prog_name="test", standalone_mode=False
    )


def test_fields_are_options_in_the_place_of_the_parameter() -> None:
    got: list[tuple[str, Size, int]] = []

    @grouped
    def command(
        *,
        name: Annotated[str, typer.Argument()],
        size: Size,
        count: Annotated[int, typer.Option("--count")] = 1,
    ) -> None:
        """Say something."""
        got.append((name, size, count))

    app = typer.Typer(rich_markup_mode=None)
    app.command()(command)
    invoke(app, "box", "--height", "4")
    invoke(app, "box", "--count", "2", "--height", "4", "-w", "9")
    assert got == [("box", Size(height=4), 1), ("box", Size(width=9, height=4), 2)]
    names = [option.name for option in typer.main.get_command(app).params]
    assert names[:4] == ["name", "width", "height", "count"]
    assert command.__doc__ == "Say something."


def test_a_hidden_group_is_taken_but_not_shown(capsys: pytest.CaptureFixture) -> None:
    got: list[Size] = []

    @grouped
    def command(*, size: Annotated[Size, HIDDEN]) -> None:
        got.append(size)

    app = typer.Typer(rich_markup_mode=None)
    app.command()(command)
    invoke(app, "--height", "4")
    assert got == [Size(height=4)]
    invoke(app, "--help")
    assert "--height" not in capsys.readouterr().out


def test_a_field_without_a_default_is_required() -> None:
    @grouped
    def command(*, size: Size) -> None:
        raise AssertionError(size)

    app = typer.Typer(rich_markup_mode=None)
    app.command()(command)
    with pytest.raises(typer.TyperException, match="height"):
        invoke(app)


@pytest.mark.parametrize("group", [Computing, Loading, Sampling])
@pytest.mark.parametrize("command", ["run", "chat"])
def test_run_and_chat_take_the_same_options(command: str, group: type) -> None:
    """What one of the two can be told, the other can."""
    found = typer.main.get_command(app_for([command]))
    params = getattr(found, "commands", {command: found})[command].params
    assert {field.name for field in fields(group)} <= {option.name for option in params}
