"""The compiled extension, where it is installed: what can also be done without it asks here."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

from smollm2.errors import InputError

_NAME = "smollm2._native"


def missing() -> str | None:
    """Why the extension cannot be imported, None where it can."""
    try:
        import_module(_NAME)
    except ImportError as error:
        return str(error)
    return None


def compiled(name: str) -> Callable[..., Any] | None:
    """Return a function of the extension, None where that is not installed.

    It raises ``InputError`` for a wrong SMOLLM2_ISA.
    """
    if missing() is not None:
        return None
    function: Callable[..., Any] | None = getattr(import_module(_NAME), name, None)
    return function and _with_our_errors(function)


def cores() -> int:
    """Physical cores that this process may use, and where it cannot be told, all there are."""
    available = compiled("available_cores")
    return available() if available else os.cpu_count() or 1


def _with_our_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        try:
            return function(*given, **named)
        except RuntimeError as error:  # a wrong SMOLLM2_ISA, or no thread to be had
            raise InputError(str(error)) from None

    return call
