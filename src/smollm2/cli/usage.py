"""Usage: help in colour, wrong usage in one line, and the end of a pipe that nobody reads."""

from __future__ import annotations

import re
import sys
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from smollm2.cli.terminal import BOLD, CYAN, has_color, styled

_HEADING = re.compile(r"^(Usage:|\w+:$)", re.MULTILINE)
_TERM = re.compile(r"^  (-\S(?:[^ \n]| (?! ))*|\w+(?: <\w+>)?(?=  ))", re.MULTILINE)


class UsageError(typer.TyperException):
    """A command cannot do anything with the options that it was given."""

    exit_code = 2


class Command(TyperCommand):
    """A command whose help is in colour on a terminal."""

    def get_help(self, ctx: Any) -> str:
        """Return the help text."""
        return _painted(super().get_help(ctx))


class Group(TyperGroup):
    """The commands; a reader who closed the pipe ends any of them without a word."""

    def get_help(self, ctx: Any) -> str:
        """Return the help text."""
        return _painted(super().get_help(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read ``help`` as ``--help``, and ``help run`` as ``run --help``."""
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that was asked for."""
        if args[0] == "version":
            raise UsageError("no such command 'version'; did you mean --version?")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise typer.Exit(0) from None


def usage_message(error: typer.TyperException) -> str:
    """Say what is wrong with the command line and where to look, in one line."""
    details = vars(error)
    context = details.get("ctx")
    message = " ".join(error.format_message().split()).rstrip(".")
    if context is None:
        return message
    if near := details.get("possibilities"):
        return f"no such option: {details['option_name']}; did you mean {near[0]}?"
    message = message[:1].lower() + message[1:].replace(". Did you mean", "; did you mean")
    return message if message.endswith("?") else f"{message}; see {context.command_path} --help"


def _painted(text: str) -> str:
    if not has_color(sys.stdout):
        return text
    text = _TERM.sub(lambda match: "  " + styled(match[1], CYAN), text)
    return _HEADING.sub(lambda match: styled(match[1], BOLD), text)
