"""The compiled extension, where it is installed: what can also be done without it asks here."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def compiled(name: str) -> Callable[..., Any] | None:
    """Return a function of the extension, None where that is not installed."""
    try:
        native = import_module("smollm2._native")
    except ImportError:
        return None
    function: Callable[..., Any] | None = getattr(native, name, None)
    return function
