"""SmolLM2's chat template: text and ids, held to golden ids, Jinja and transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given, strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from smollm2.errors import FormatError, InputError, TemplateError
from smollm2.template import DEFAULT_SYSTEM, SMOLLM2_TEMPLATE, ChatTemplate, System
from smollm2.tokenizer import Tokenizer
from tests.vocabulary import golden_tokenizer, small_declaration, unhurried

TEMPLATE = ChatTemplate(SMOLLM2_TEMPLATE)
HI = [
    *(1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411),
    *(407, 19712, 8182, 2, 198, 1, 4093, 198, 6004, 2, 198, 1, 520, 9531, 198),
]
DEFAULT_BLOCK = f"<|im_start|>system\n{DEFAULT_SYSTEM}<|im_end|>\n"


@pytest.fixture(scope="module")
def tokenizer(shared: Path) -> Tokenizer:
    return golden_tokenizer(shared)


def said(*turns: str) -> list[Any]:
    """Messages written as ``"user: hi"``."""
    pairs = [turn.split(": ", 1) for turn in turns]
    return [{"role": role, "content": content} for role, content in pairs]


def by_jinja(messages: list[Any], *, add_generation_prompt: bool = True) -> str:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(SMOLLM2_TEMPLATE).render(
        messages=messages, add_generation_prompt=add_generation_prompt
    )


def test_golden_ids(tokenizer: Tokenizer) -> None:
    # cases: C2, C5, T15
    assert TEMPLATE.encode(tokenizer, said("user: hi")) == HI


def test_the_source_is_the_one_of_the_real_file(real_gguf: Path) -> None:
    # cases: C5
    from smollm2.formats.gguf import open_gguf

    assert open_gguf(real_gguf).metadata["tokenizer.chat_template"] == SMOLLM2_TEMPLATE


ROLES = ("system", "user", "assistant", "tool")
CONVERSATIONS = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(ROLES), "content": st.text(max_size=20)}),
    max_size=6,
)


@given(messages=CONVERSATIONS, prompt=st.booleans())
def test_any_conversation_as_jinja_renders_it(messages: list[Any], prompt: bool) -> None:
    # cases: C1, C2, C6
    expected = by_jinja(messages, add_generation_prompt=prompt)
    assert TEMPLATE.render(messages, add_generation_prompt=prompt) == expected


BENIGN = st.text(st.sampled_from("ab \n1<|>é🦙\t_"), max_size=12).filter(lambda t: "<|" not in t)


@unhurried
@given(
    messages=st.lists(
        st.fixed_dictionaries({"role": st.sampled_from(ROLES), "content": BENIGN}), max_size=5
    )
)
def test_the_ids_are_those_of_the_text_in_one_go(shared: Path, messages: list[Any]) -> None:
    # Content may merge with the line feeds of the markup around it.
    tokenizer = golden_tokenizer(shared)
    expected = tokenizer.encode(by_jinja(messages), allow_special=True)
    assert TEMPLATE.encode(tokenizer, messages) == expected


def test_content_merges_with_markup(tokenizer: Tokenizer) -> None:
    ids = TEMPLATE.encode(tokenizer, said("user: \n"), system=False)
    assert ids[:4] == [1, 4093, 1116, 2]  # 1116 is two line feeds


def test_transformers_gives_the_same_ids(shared: Path, tokenizer: Tokenizer) -> None:
    # cases: table 41
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(shared / "golden" / "tokenizer.json")
    )
    for messages in (
        said("user: hi"),
        said("system: You are a pirate", "user: What is 3333+777?"),
        said("user: a  1", "assistant: x\n\n1", "user: \n½ ² Ⅷ\n"),
        said("system: ", "user: こんにちは 🦙"),
    ):
        for prompt in (True, False):
            ids = theirs.apply_chat_template(
                messages,
                chat_template=SMOLLM2_TEMPLATE,
                add_generation_prompt=prompt,
                return_dict=False,
            )
            assert TEMPLATE.encode(tokenizer, messages, add_generation_prompt=prompt) == ids


USER_AND_PROMPT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("system", "block"),
    [
        (None, DEFAULT_BLOCK),
        ("", "<|im_start|>system\n<|im_end|>\n"),
        ("Be brief", "<|im_start|>system\nBe brief<|im_end|>\n"),
        (False, ""),
    ],
)
def test_the_system_block(system: System, block: str) -> None:
    # cases: C1, C3, C4, table 41
    assert TEMPLATE.render(said("user: hi"), system=system) == block + USER_AND_PROMPT


def test_system_messages_are_rendered_where_they_stand() -> None:
    # cases: C1, C6
    messages = said("system: one", "system: two", "user: hi", "system: three")
    text = TEMPLATE.render(messages)
    assert [text.index(f"system\n{word}<") for word in ("one", "two", "three")] == sorted(
        text.index(word) - len("system\n") for word in ("one", "two", "three")
    )
    assert DEFAULT_SYSTEM not in text


def test_two_system_prompts_are_ambiguous() -> None:
    with pytest.raises(InputError, match=r"system is given and messages\[0\]"):
        TEMPLATE.render(said("system: a", "user: hi"), system="b")


@pytest.mark.parametrize("system", [True, 3, b"x", ["x"]])
def test_a_system_prompt_is_a_text(system: Any) -> None:
    with pytest.raises(InputError, match="it must be a text, None or False"):
        TEMPLATE.render(said("user: hi"), system=system)


def test_no_messages() -> None:
    assert TEMPLATE.render([], add_generation_prompt=False) == ""
    assert TEMPLATE.render([]) == "<|im_start|>assistant\n" == by_jinja([])
    assert TEMPLATE.render([], system="x", add_generation_prompt=False) == (
        "<|im_start|>system\nx<|im_end|>\n"
    )


def test_an_answer_is_continued(tokenizer: Tokenizer) -> None:
    messages = said("user: hi", "assistant: Well, <|im_end|>\n")
    text = TEMPLATE.render(messages, continue_final=True)
    assert text.endswith("<|im_start|>assistant\nWell, <|im_end|>\n")
    ids = TEMPLATE.encode(tokenizer, messages, continue_final=True)
    assert ids.count(2) == 2  # of the system prompt and of the user


@pytest.mark.parametrize("messages", [[], said("user: hi"), said("assistant: a", "user: b")])
def test_only_an_answer_can_be_continued(messages: list[Any]) -> None:
    with pytest.raises(InputError, match="continue_final needs an assistant's message"):
        TEMPLATE.render(messages, continue_final=True)


def test_turns_of_a_chat_extend_each_other(tokenizer: Tokenizer) -> None:
    # cases: table 42, 43
    history = said("user: hi", "assistant: Hello!", "user: and 2023?")
    whole = TEMPLATE.encode(tokenizer, history)
    first = TEMPLATE.encode(tokenizer, history[:1])
    later = TEMPLATE.encode(tokenizer, history[2:], system=False)
    assert whole == [*first, *tokenizer.encode("Hello!"), 2, 198, *later]


CALL = {"name": "get_weather", "arguments": {"city": 'Zürich "old"', "days": [1, 2]}}


def openai(call: dict[str, Any]) -> dict[str, Any]:
    function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
    return {"id": "call_1", "type": "function", "function": function}


@pytest.mark.parametrize("form", [openai, dict])
def test_tool_calls_in_the_history(tokenizer: Tokenizer, form: Any) -> None:
    # cases: C4, C7, C9
    calls = [form(CALL), form({"name": "stop", "arguments": {}})]
    messages: list[Any] = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": None, "tool_call_id": "call_1"},
    ]
    text = TEMPLATE.render(messages)
    body = text.split("<|im_start|>assistant\n<tool_call>")[1].split("</tool_call><|im_end|>\n")[0]
    assert json.loads(body) == [CALL, {"name": "stop", "arguments": {}}]
    assert text.endswith("<|im_start|>tool\n<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.detokenize(TEMPLATE.encode(tokenizer, messages), skip_special=False) == text
    messages[1]["content"] = "Let me see."
    assert "assistant\nLet me see.\n<tool_call>[{" in TEMPLATE.render(messages)


def test_lists_of_text_parts_are_joined(tokenizer: Tokenizer) -> None:
    # cases: C8
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert TEMPLATE.encode(tokenizer, [{"role": "user", "content": parts}]) == HI


def test_what_ends_an_answer(tokenizer: Tokenizer) -> None:
    # cases: S1, C5
    assert TEMPLATE.stop_ids(tokenizer) == {2}
    assert ChatTemplate("{# other #}" + SMOLLM2_TEMPLATE).stop_ids(tokenizer) == {2}
    llama = "{% for m in messages %}<repo_name>{{ m.content }}<file_sep><filename>{% endfor %}"
    assert ChatTemplate(llama).stop_ids(tokenizer) == {tokenizer.special_tokens["<file_sep>"]}
    for other in ("{% for m in messages %}{{ m.content }}{% endfor %}", "no content", "{{ x.y }}"):
        assert ChatTemplate(other).stop_ids(tokenizer) == set()


@pytest.mark.parametrize(
    "source",
    [
        SMOLLM2_TEMPLATE,
        SMOLLM2_TEMPLATE + "\n",
        SMOLLM2_TEMPLATE.replace("\n", "\\n"),
        SMOLLM2_TEMPLATE.replace("\n", "\\n") + "\n",
    ],
)
def test_equal_sources_are_recognised(source: str) -> None:
    assert repr(ChatTemplate(source)) == "ChatTemplate(SmolLM2)"
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    rendered = environment.from_string(source).render(
        messages=said("user: hi"), add_generation_prompt=True
    )
    assert (
        ChatTemplate(source).render(said("user: hi"))
        == rendered
        == DEFAULT_BLOCK + (USER_AND_PROMPT)
    )


def test_a_template_file(tmp_path: Path) -> None:
    path = tmp_path / "chat_template.jinja"
    path.write_text(SMOLLM2_TEMPLATE, encoding="utf-8")
    assert ChatTemplate.from_file(path).source == SMOLLM2_TEMPLATE
    path.write_bytes(b"\xff")
    with pytest.raises(FormatError, match="not UTF-8 at byte 0"):
        ChatTemplate.from_file(path)
    with pytest.raises(FormatError, match="nowhere"):
        ChatTemplate.from_file(tmp_path / "nowhere")
    with pytest.raises(TemplateError, match="not NoneType"):
        ChatTemplate(None)  # type: ignore[arg-type]


def test_a_tokenizer_without_the_markup_is_refused() -> None:
    other = Tokenizer(small_declaration(), source="made up")
    with pytest.raises(TemplateError, match=r"no control token <\|im_start\|>"):
        TEMPLATE.encode(other, said("user: hi"))
