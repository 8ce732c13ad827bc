"""The command line: one module a command, none of which does more than call the package.

``main`` turns whatever can go wrong into one line on stderr and an exit code:

- 0: done, also when nobody reads the output any more (``| head``)
- 1: a ``SmolLM2Error`` or an error of the system
- 2: a wrong command or option
- 130: stopped with Ctrl-C, 143: with SIGTERM; what was begun is cleared away

``SMOLLM2_DEBUG=1`` shows the traceback instead.

Nothing but Typer is imported until a command runs.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence

import typer

from smollm2.cli.app import app_for
from smollm2.cli.interrupts import tidy_on_terminate
from smollm2.cli.terminal import (
    drop_unwritten,
    oserror_text,
    print_error,
    settle_streams,
    show_warning,
)
from smollm2.cli.usage import usage_message
from smollm2.errors import SmolLM2Error

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, by default that of ``sys.argv``; returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    settle_streams()
    warnings.showwarning = show_warning
    try:
        command = typer.main.get_command(app_for(arguments))
        with tidy_on_terminate():
            code = command.main(arguments or ["--help"], prog_name="smollm2", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except (typer.TyperException, SmolLM2Error, OSError, MemoryError) as error:
        if os.environ.get("SMOLLM2_DEBUG"):
            raise
        return _report(error)
    finally:
        drop_unwritten()


def _report(error: Exception) -> int:
    """Say what went wrong, in one line; returns the exit code."""
    match error:
        case typer.TyperException():
            print_error(usage_message(error))
            return error.exit_code
        case OSError():
            print_error(oserror_text(error))
        case MemoryError():
            print_error(f"not enough memory: {error}" if str(error) else "not enough memory")
        case _:
            print_error(str(error))
    return 1
