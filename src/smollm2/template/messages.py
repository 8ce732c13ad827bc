"""Messages: what a chat is made of, checked and brought into the one form that templates see."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NotRequired, TypedDict

from smollm2.errors import InputError
from smollm2.tokenizer import check_text

ROLES = ("system", "user", "assistant", "tool")
"""The roles that a message can have. A role is markup: a stranger cannot choose another."""

_MAX_DEPTH = 64  # of JSON inside a message


class Message(TypedDict):
    """One turn of a conversation.

    ``content`` is a text, a list of text parts ``{"type": "text", "text": …}``, or ``None`` for
    none. ``tool_calls`` (assistant only) has OpenAI's form, ``{"function": {"name": …,
    "arguments": …}}`` with the arguments as an object or as its JSON text, or the inner object
    alone.
    """

    role: str
    content: str | list[dict[str, Any]] | None
    tool_calls: NotRequired[list[dict[str, Any]]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]


def normalise(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copy messages so that each has a known role and a text as content.

    Tool calls come out as ``{"type": "function", "function": {"name", "arguments": {…}}}``.
    Raises ``InputError`` that names the message and the key.
    """
    if not isinstance(messages, Iterable):
        raise InputError(f"messages is {_kind(messages)}, not a list")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Return a copy of a JSON-like value with every string changed, keys of objects too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [map_strings(item, change) for item in value]
    if isinstance(value, dict):
        return {change(key): map_strings(item, change) for key, item in value.items()}
    return value


def tool_call_text(calls: list[dict[str, Any]]) -> str:
    """Write calls as SmolLM2 does: one JSON list between ``<tool_call>`` and its end."""
    functions = [call["function"] for call in calls]
    return f"<tool_call>{json.dumps(functions, ensure_ascii=False)}</tool_call>"


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InputError(f"{where} is {_kind(message)}, not an object with role and content")
    role = message.get("role")
    if role not in ROLES:
        raise InputError(
            f"{where} has no 'role'"
            if "role" not in message
            else f"{where}.role is {role!r:.80}: it must be one of {', '.join(ROLES)}"
        )
    calls = message.get("tool_calls")
    if "content" not in message and not calls:
        raise InputError(f"{where} has no 'content'")
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    rest["content"] = _content(message.get("content"), f"{where}.content")
    copy: dict[str, Any] = _json(rest, where)
    if calls:
        if role != "assistant":
            raise InputError(f"{where}.tool_calls: only an assistant's message has tool calls")
        copy["tool_calls"] = _tool_calls(calls, f"{where}.tool_calls")
    return copy


def _content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InputError(f"{where} is {_kind(content)}, not a text or a list of text parts")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else _kind(part)
        if kind != "text":
            raise InputError(
                f"{where}[{index}] is {kind!r:.80}: only parts of type 'text' are read"
            )
        if not isinstance(part.get("text"), str):
            raise InputError(f"{where}[{index}].text is {_kind(part.get('text'))}, not a text")
        texts.append(part["text"])
    return "".join(texts)


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise InputError(f"{where} is {_kind(calls)}, not a list")
    return [_tool_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise InputError(f"{where} is {_kind(call)}, not an object")
    function = call.get("function", call)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InputError(f"{where} has no function name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where}.function.arguments is not JSON: {error}") from None
    if not isinstance(arguments, Mapping):
        raise InputError(f"{where}.function.arguments is {_kind(arguments)}, not an object")
    extra = {key: call[key] for key in ("id",) if key in call}
    copy: dict[str, Any] = _json(
        {
            **extra,
            "type": "function",
            "function": {"name": function["name"], "arguments": arguments},
        },
        where,
    )
    return copy


def _json(value: Any, where: str, depth: int = 0) -> Any:
    """Copy a value that JSON can hold, and refuse any other."""
    if depth > _MAX_DEPTH:
        raise InputError(f"{where} is nested deeper than {_MAX_DEPTH} levels")
    if isinstance(value, str):
        return check_text(value, where)
    if isinstance(value, Mapping):
        return {
            check_text(key, where): _json(item, f"{where}.{key}", depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_json(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    if isinstance(value, bool | int | None):
        return value
    if isinstance(value, float) and value - value == 0:  # neither infinite nor NaN
        return value
    raise InputError(f"{where} is {value!r:.80}, which JSON cannot hold")


def _kind(value: Any) -> str:
    return f"of type {type(value).__name__}"
