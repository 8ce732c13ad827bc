"""Grouping: options that several commands take as one parameter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from inspect import Parameter, signature
from typing import Any, get_type_hints


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each field of those of its parameters that are dataclasses.

    Typer sees the fields, in the place of the parameter; the command gets the object. The fields
    are annotated as options of a command are.
    """
    groups: dict[str, tuple[type, list[str]]] = {}
    seen: list[Parameter] = []
    for parameter in signature(command, eval_str=True).parameters.values():
        kind = parameter.annotation
        if is_dataclass(kind) and isinstance(kind, type):
            options = list(_options(kind))
            groups[parameter.name] = (kind, [option.name for option in options])
            seen.extend(options)
        else:
            seen.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))

    @wraps(command)
    def call(**given: Any) -> None:
        made = {
            name: kind(**{option: given.pop(option) for option in options})
            for name, (kind, options) in groups.items()
        }
        command(**given, **made)

    vars(call)["__signature__"] = signature(command).replace(parameters=seen)
    return call


def _options(group: type) -> list[Parameter]:
    annotations = get_type_hints(group, include_extras=True)
    return [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if field.default is MISSING else field.default,
            annotation=annotations[field.name],
        )
        for field in fields(group)
    ]
