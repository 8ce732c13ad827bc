"""Messages that are not a conversation: each is refused with its place and its key."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from smollm2.errors import InputError
from smollm2.template import SMOLLM2_TEMPLATE, ChatTemplate
from smollm2.template.messages import map_strings, normalise

OK = {"role": "user", "content": "hi"}


def call(**function: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


FAULTS: list[tuple[Any, str]] = [
    ("hi", r"messages\[1\] is of type str, not an object with role and content"),
    (None, r"messages\[1\] is of type NoneType"),
    ({"content": "x"}, r"messages\[1\] has no 'role'"),
    ({"role": "user"}, r"messages\[1\] has no 'content'"),
    ({"role": "assistant", "tool_calls": []}, r"messages\[1\] has no 'content'"),
    ({"role": "User", "content": "x"}, r"messages\[1\].role is 'User': it must be one of system"),
    ({"role": "user\nX", "content": "x"}, r"messages\[1\].role is"),
    ({"role": ["user"], "content": "x"}, r"messages\[1\].role is"),
    ({"role": None, "content": "x"}, r"messages\[1\].role is None"),
    ({"role": "user", "content": 3}, r"messages\[1\].content is of type int"),
    ({"role": "user", "content": {"text": "x"}}, r"messages\[1\].content is of type dict"),
    ({"role": "user", "content": "\ud800"}, r"messages\[1\].content has half a surrogate pair"),
    ({"role": "user", "content": ["x"]}, r"messages\[1\].content\[0\] is 'of type str'"),
    (
        {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
        r"messages\[1\].content\[0\] is 'image_url': only parts of type 'text' are read",
    ),
    ({"role": "user", "content": [{"type": "text"}]}, r"content\[0\].text is of type NoneType"),
    (OK | {"tool_calls": [{}]}, r"messages\[1\].tool_calls: only an assistant's"),
    (OK | {"role": "assistant", "tool_calls": "x"}, r"messages\[1\].tool_calls is of type str"),
    (OK | {"role": "assistant", "tool_calls": [3]}, r"tool_calls\[0\] is of type int"),
    (call(), r"messages\[1\].tool_calls\[0\] has no function name"),
    (call(name=3), r"messages\[1\].tool_calls\[0\] has no function name"),
    (call(name="f", arguments="{"), r"tool_calls\[0\].function.arguments is not JSON"),
    (call(name="f", arguments="[" * 100_000), r"tool_calls\[0\].function.arguments is not JSON"),
    (call(name="f", arguments="[1]"), r"tool_calls\[0\].function.arguments is of type list"),
    (call(name="f", arguments={"x": float("nan")}), r"x is nan, which JSON cannot hold"),
    (call(name="f", arguments='{"x": NaN}'), r"x is nan, which JSON cannot hold"),
    (call(name="f", arguments={"x": {1, 2}}), r"which JSON cannot hold"),
    (call(name="f", arguments={"x": nested(5000)}), r"nested deeper than 64 levels"),
    (call(name="f", arguments={"x": "\udc00"}), r"arguments.x has half a surrogate pair"),
    (call(name="f", arguments={3: "x"}), r"arguments is of type int, not a text"),
    (OK | {"name": "\ud800"}, r"messages\[1\].name has half a surrogate pair"),
]


@pytest.mark.parametrize(("message", "error"), FAULTS)
def test_faults_are_named(message: Any, error: str) -> None:
    # cases: C7, C8
    with pytest.raises(InputError, match=error) as raised:
        ChatTemplate(SMOLLM2_TEMPLATE).render([OK, message])  # type: ignore[list-item]
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("messages", [None, 3, "hi", OK])
def test_messages_are_a_list(messages: Any) -> None:
    with pytest.raises(InputError, match="messages"):
        ChatTemplate(SMOLLM2_TEMPLATE).render(messages)


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_no_content_is_empty(role: str) -> None:
    # cases: C9
    assert normalise([{"role": role, "content": None}]) == [{"role": role, "content": ""}]


def test_tool_calls_get_one_form() -> None:
    # cases: C7
    one = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    for given_call in (
        {"name": "f", "arguments": {"x": 1}},
        {"name": "f", "arguments": '{"x": 1}'},
        {"function": {"name": "f", "arguments": '{"x": 1}'}},
    ):
        message = {"role": "assistant", "tool_calls": [given_call]}
        assert normalise([message])[0]["tool_calls"] == [one]
    without = {"role": "assistant", "tool_calls": [{"id": "7", "name": "f"}]}
    assert normalise([without])[0]["tool_calls"][0]["id"] == "7"
    assert normalise([without])[0]["tool_calls"][0]["function"]["arguments"] == {}


def test_messages_are_copied() -> None:
    message: dict[str, Any] = {"role": "user", "content": "x", "extra": {"list": [1, (2.5, None)]}}
    copy = normalise([message])[0]
    assert copy == {"role": "user", "content": "x", "extra": {"list": [1, [2.5, None]]}}
    copy["extra"]["list"].append(3)
    assert message["extra"]["list"] == [1, (2.5, None)]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@given(value=JSON)
def test_every_text_is_changed_and_nothing_else(value: Any) -> None:
    def shift(text: str) -> str:
        return "x" + text

    def unshift(text: str) -> str:
        return text.removeprefix("x")

    changed = map_strings(value, shift)
    assert map_strings(changed, unshift) == value
    assert repr(changed).count("'x") + repr(changed).count('"x') >= _texts(value)


def _texts(value: Any) -> int:
    if isinstance(value, list):
        return sum(map(_texts, value))
    if isinstance(value, dict):
        return len(value) + sum(map(_texts, value.values()))
    return isinstance(value, str)
