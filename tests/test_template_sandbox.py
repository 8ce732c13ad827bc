"""Templates that strangers wrote: the useful ones work, the hostile ones end as one line."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from smollm2.errors import InputError, TemplateError
from smollm2.template import ChatTemplate
from smollm2.tokenizer import Tokenizer
from tests.vocabulary import gguf_metadata, golden_tokenizer

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": " yo "}]

GROW = "{% set ns = namespace(s='aa') %}{% for i in range(60) %}"
ATTACKS = {
    "globals": "{{ lipsum.__globals__ }}",
    "class": "{{ ''.__class__ }}",
    "mro": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "item": "{{ ''['__class__'] }}",
    "map": "{{ messages | map(attribute='__class__') | list }}",
    "attr": "{{ messages | attr('__class__') }}",
    "init": "{{ namespace.__init__.__globals__ }}",
    "function": "{{ raise_exception.__globals__ }}",
    "self": "{{ self.__init__ }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% from 'os' import system %}",
    "format": "{{ '{0.__class__}'.format(messages) }}",
    "width": "{{ '{:1000000000}'.format(1) }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "ljust": "{{ 'a'.ljust(1000000000) }}",
    "center": "{{ 'a' | center(1000000000) }}",
    "append": "{{ messages.append(1) }}",
    "update": "{{ messages[0].update({'role': 'system'}) }}",
    "range": "{{ range(10 ** 9) }}",
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "recursive": "{% for i in range(3) recursive %}{{ loop(range(3)) }}{% endfor %}",
    "macro": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "tree": "{% macro f(n) %}{{ n and f(n-1) ~ f(n-1) }}{% endmacro %}{{ f(60) }}",
    "times": "{{ 'a' * 10 ** 9 }}",
    "times, unused": "{% set x = 'a' * 10 ** 9 %}",
    "list": "{{ [0] * 10 ** 9 }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "product": "{{ 2 ** 4000 * 2 ** 4000 }}",
    "quotient": "{{ ('f' * 900000) | int(base=16) // 3 }}",
    "concat": GROW + "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "plus": GROW + "{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "nest": GROW + "{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s | string }}",
    "nest objects": GROW + "{% set ns.s = {'a': ns.s, 'b': ns.s} %}{% endfor %}{{ ns.s | string }}",
    "nest tuples": GROW + "{% set ns.s = (ns.s, ns.s) %}{% endfor %}{{ ns.s | string }}",
    "block": GROW + "{% set q %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = q %}{% endfor %}",
    "join": "{{ ('a' * 100000).join(range(99999) | map('string')) }}",
    "join filter": "{{ range(99999) | join('a' * 100000) }}",
    "replace": "{{ ('a' * 100000).replace('a', 'a' * 100000) }}",
    "replace filter": "{{ ('a' * 100000) | replace('a', 'a' * 100000) }}",
    "safe join": "{{ (('a' * 100000) | safe).join(range(99999) | map('string')) }}",
    "default": "{{ range(99999) | map(attribute='x', default='y' * 100000) | join }}",
    "json": "{{ messages | tojson(indent=1000000000) }}",
    "output": "{% for i in range(99999) %}" + "y" * 60000 + "{% endfor %}",
    "search": "{% set s = 'a' * 900000 %}{% for i in range(99999) %}{{ 'b' in s }}{% endfor %}",
    "slices": "{% set s = 'a' * 90000 %}{% for i in range(99) %}{% set t = s[1:] %}{% endfor %}",
    "parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "sum": "{{ 1" + " + 1" * 20000 + " }}",
    "blocks": "{% if 1 %}" * 300 + "{% endif %}" * 300,
    "long": "x" * 200_000,
    "syntax": "{% if %}",
    "undefined": "{{ x.y }}",
    "zero": "{{ 1 / 0 }}",
}


@pytest.mark.parametrize("name", ATTACKS)
def test_hostile_templates_end_as_an_error(name: str) -> None:
    # cases: X1
    with pytest.raises(TemplateError, match="template") as raised:
        ChatTemplate(ATTACKS[name]).render(MESSAGES)
    assert "MemoryError" not in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 300


def test_text_format_is_refused_before_it_runs() -> None:
    # cases: X1
    with pytest.raises(TemplateError, match=r"text\.format is not allowed"):
        ChatTemplate(ATTACKS["width"]).render(MESSAGES)


def test_a_template_cannot_make_text_that_is_not(shared: Path) -> None:
    with pytest.raises((TemplateError, InputError)):
        ChatTemplate("{{ '\\udffe' }}").encode(golden_tokenizer(shared), MESSAGES)


def test_messages_are_not_changed_by_a_template() -> None:
    # cases: X1
    before = [dict(message) for message in MESSAGES]
    ChatTemplate("{% set messages = [] %}{{ messages }}").render(MESSAGES)
    assert before == MESSAGES


def test_long_conversations_fit_the_budget() -> None:
    messages: list[Any] = [
        {"role": "user" if i % 2 == 0 else "assistant", "content": "word " * 2000}
        for i in range(400)
    ]
    text = ChatTemplate(LLAMA).render(messages)
    assert len(text) > 400 * 9999


LLAMA = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start|>system\\n\\n" + system_message + "<|eot|>" }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate\nuser, assistant') }}
    {%- endif %}
    {{- '<|start|>' + message['role'] + '\\n\\n'+ message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant\\n\\n' }}
{%- endif %}
"""
TOOLS = """{% macro show(x, prefix='- ') %}{{ prefix ~ x }}{% endmacro %}
{% set ns = namespace(last='') %}
{% for m in messages[::-1] %}
{% if loop.index > 5 %}{% break %}{% endif %}
{{ show(m.role | upper) }} {{ m.content.strip().split(' ') | join('+') | replace('y', 'Y') }}
{% set ns.last = m.content %}
{% generation %}{{ m | tojson }}{% endgeneration %}
{% endfor %}
{% for key, value in {'a': 1, 'b': [1, 2]}.items() %}{{ key }}={{ value }};{% endfor %}
{{ (messages | selectattr('role', 'equalto', 'user') | list | length) * 2 }} {{ ns.last }}
{{ tools is none }} {{ tools is defined }} {{ missing is defined }} {{ "%s" }} {{ -7 // 2 }}
{{ messages | map(attribute='content') | map('trim') | list | tojson(indent=1) }}
    {% if loop is defined %}loop{% endif %}
{% if 'y' in ns.last %}yes{% elif 1 < 2 %}no{% endif %} {{ 'abc'[1:] }} {{ (1, 2)[0] }}
"""


def by_jinja(source: str, **variables: Any) -> str:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    source = source.replace("{% generation %}", "{% if 1 %}")
    source = source.replace("{% endgeneration %}", "{% endif %}")
    return environment.from_string(source).render(
        **{"messages": MESSAGES, "add_generation_prompt": True, "tools": None} | variables
    )


@pytest.mark.parametrize("source", [LLAMA, TOOLS])
def test_ordinary_templates_render_as_jinja_does(source: str) -> None:
    assert ChatTemplate(source).render(MESSAGES) == by_jinja(source)


def test_named_tokens_are_those_of_the_tokenizer(shared: Path) -> None:
    tokenizer = Tokenizer.from_gguf(gguf_metadata(shared))
    template = ChatTemplate("{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|")
    assert template.render(MESSAGES) == "|||"
    assert template.render(MESSAGES, tokenizer=tokenizer) == ("<|im_start|>|<|im_end|>|<|im_end|>|")
    assert template.encode(tokenizer, MESSAGES) == [1, 108, 2, 108, 2, 108]


def test_a_template_may_refuse_a_conversation() -> None:
    with pytest.raises(TemplateError, match="roles must alternate user, assistant"):
        ChatTemplate(LLAMA).render(MESSAGES[1:])


def test_an_answer_is_continued() -> None:
    text = ChatTemplate(LLAMA).render(MESSAGES, continue_final=True)
    assert text.endswith("<|start|>assistant\n\nyo ")
    empty: list[Any] = [MESSAGES[0], {"role": "assistant", "content": ""}]
    text = ChatTemplate(LLAMA).render(empty, continue_final=True)
    assert text.endswith("<|start|>assistant\n\n")
    with pytest.raises(TemplateError, match="leaves out the message"):
        ChatTemplate("nothing").render(MESSAGES, continue_final=True)


def test_without_a_system_block_only_where_that_is_known() -> None:
    # cases: C3
    with pytest.raises(InputError, match="system=False works with SmolLM2's chat template only"):
        ChatTemplate(LLAMA).render(MESSAGES, system=False)
    assert (
        ChatTemplate(LLAMA)
        .render(MESSAGES, system=" pirate ")
        .startswith("<|start|>system\n\npirate<|eot|>")
    )


def test_the_date_is_there() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}").render(MESSAGES) >= "2025"
