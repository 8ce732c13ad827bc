"""Grouping: options that several commands take as one parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from inspect import Parameter, signature
from typing import Annotated, Any, get_args, get_type_hints

HIDDEN = "hidden"
"""Marks a group whose options are taken, but left out of the help."""


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each field of those of its parameters that are dataclasses.

    Typer sees the fields, in the place of the parameter; the command gets the object. The fields
    are annotated as options of a command are; ``Annotated[Group, HIDDEN]`` hides them.
    """
    groups: dict[str, tuple[type, list[str]]] = {}
    seen: list[Parameter] = []
    for parameter in signature(command, eval_str=True).parameters.values():
        kind, *marks = get_args(parameter.annotation) or (parameter.annotation,)
        if isinstance(kind, type) and is_dataclass(kind):
            options = list(_options(kind, hidden=HIDDEN in marks))
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


def _options(group: type, *, hidden: bool) -> Iterator[Parameter]:
    annotations = get_type_hints(group, include_extras=True)
    for field in fields(group):
        kind, option = get_args(annotations[field.name])
        if hidden:
            option = copy(option)
            option.hidden = True
        yield Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if field.default is MISSING else field.default,
            annotation=Annotated[kind, option],
        )
