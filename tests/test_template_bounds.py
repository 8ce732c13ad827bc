"""Bounds of the template sandbox, measured: attacks run in a process with little memory.

What a template spends is paid for before it is done, so no attack comes near the memory that
the process may have, and no single call takes long.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from smollm2.template import ChatTemplate

ADDRESS_SPACE = 1_500_000_000  # bytes
MESSAGES: list[Any] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]

BIG = "{% set s = 'a' * 400000 %}"
WIDE = "{% set s = '\u0436 ' * 200000 %}"  # two bytes a character
GROW = "{% set ns = namespace(s='aa') %}{% for i in range(60) %}"
KEEP = "{% set ns = namespace(s=0, l=[]) %}{% for i in range(90000) %}"
NAMES = "".join(f"{{% set v{i} = ns.l %}}" for i in range(1000))

# Each asks for more time or memory than there is.
ATTACKS = {
    "concat": BIG + "{% set t = " + " ~ ".join(["s"] * 9000) + " %}",
    "concat lists": BIG + "{% set t = " + " ~ ".join(["[s, s]"] * 3000) + " %}",
    "plus": BIG + "{% set t = [s] %}" + "{% set t = t + t %}" * 60,
    "plus text": BIG + "{% set s = s + s %}" * 60,
    "times": "{% set t = [" + "'aaaa', " * 900 + "] * 90000 %}",
    "views": GROW + "{% set ns.s = {'a': ns.s, 'b': ns.s}.items() %}{% endfor %}{{ ns.s }}",
    "values": GROW + "{% set ns.s = {'a': ns.s, 'b': ns.s}.values() %}{% endfor %}{{ ns.s }}",
    "rfind": BIG + "{{ s.rfind('ab' + 'a' * 200000) }}",
    "rindex": BIG + "{{ s.rindex('ab' + 'a' * 200000) }}",
    "rsplit": BIG + "{{ s.rsplit('ab' + 'a' * 200000) }}",
    "rsplit, named": BIG + "{{ s.rsplit(maxsplit=1, sep='ab' + 'a' * 200000) }}",
    "rpartition": BIG + "{{ s.rpartition('ab' + 'a' * 200000) }}",
    "strip": BIG + "{{ s.strip('b' * 200000 + 'a') }}",
    "trim": BIG + "{{ s | trim('b' * 200000 + 'a') }}",
    "find": BIG + "{% for i in range(300) %}{{ s.find('ab') }}{% endfor %}",
    "count": BIG + "{% for i in range(300) %}{{ s.count('ab') }}{% endfor %}",
    "in": BIG + "{% for i in range(300) %}{{ 'ab' in s }}{% endfor %}",
    "in test": BIG + "{{ range(90000) | map('string') | select('in', s) | list }}",
    "select in": BIG + "{{ (['ab'] * 9000) | reject('in', s) | list }}",
    "equal": BIG + "{% set t = s[:-1] ~ 'b' %}{% for i in range(300) if s == t %}{% endfor %}",
    "equal test": BIG + "{% set t = s[1:] ~ 'b' %}{% for i in range(300) %}{{ s is eq t }}"
    "{% endfor %}",
    "order": BIG + "{% set t = s[1:] ~ 'b' %}{% for i in range(300) %}{{ s < t }}{% endfor %}",
    "hash": "{% set t = ('a',) * 20000 %}{% for i in range(300) %}{{ t in {} }}{% endfor %}",
    "replace": BIG + "{{ s.replace('a', s) }}",
    "replace in a loop": BIG + "{% for i in [1] %}{{ s.replace('', s) }}{% endfor %}",
    "join in a loop": BIG + "{% for i in [1] %}{{ s.join('a' * 90000) }}{% endfor %}",
    "join views": BIG + "{{ {'a': s}.values() | map('replace', 'a', 'aa' * 90000) | join }}",
    "join attribute": BIG + "{{ ([{'a': s}] * 9) | join('', 'a') }}" * 99,
    "split": WIDE + "{% set t = [s.split(), s.split(), s.split(), s.split()] %}" * 99,
    "split at": WIDE + "{% set t = [s.split(' '), s.split(' '), s.split(' ')] %}" * 99,
    "lines": "{% set s = '\\n' * 300000 %}" + "{% set t = s.splitlines() %}" * 99,
    "list": WIDE + "{% set t = s | list %}",
    "turns": WIDE + "{% for c in s if false %}{% endfor %}",
    "sort": "{% set l = range(99999) | list %}{{ l | sort | sort | sort | sort | sort }}",
    "unique": WIDE + "{{ s | unique | list }}",
    "groupby": WIDE + "{{ s | groupby('x') }}",
    "min": WIDE + "{{ s | min }}",
    "collisions": "{% set l = (('" + str(2**61 - 1) + ",') * 90000).split(',') %}"
    "{% for i in l | map('int') | list %}{{ i * loop.index }}{% endfor %}",
    "dict": "{{ dict((['ab'] * 90000) | map('list')) }}",
    "namespace": "{{ namespace(('ab,' * 300000).split(',') | map('list')) }}",
    "copies": "{% set d = {" + ", ".join(f"'{i}': 0" for i in range(900)) + "} %}"
    "{% macro f() %}{% for i in range(90000) %}{{ dict(**d) is none }}{% endfor %}{% endmacro %}"
    "{{ f() }}",
    "arguments": "{% macro f() %}{{ varargs is none }}{% endmacro %}{% set b = [0] * 90000 %}"
    "{% for i in range(90000) %}{{ f(*b) }}{% endfor %}",
    "json": WIDE + "{% for i in range(9000) %}{{ [s, s] | tojson }}{% endfor %}",
    "json lists": BIG + "{% set t = [0] * 99999 %}{{ [t, t, t, t] | tojson(indent=16) }}",
    "escapes": "{% set s = '\\u0000' * 90000 %}" + "{% set s = [s] | string %}" * 40,
    "bodies": "{% for i in range(90000) %}" + "{% set x = i %}" * 3000 + "{% endfor %}",
    "macro bodies": "{% macro f() %}" + "{% set x = 1 %}" * 3000 + "{% endmacro %}"
    "{% for i in range(90000) %}{{ f() }}{% endfor %}",
    "names": KEEP + "{% set ns.l = [0] * 90000 %}" + NAMES + "{% endfor %}",
    "nested calls": "{% macro f(n) %}{{ n and f(n-1) ~ f(n-1) }}{% endmacro %}{{ f(60) }}",
}
TOO_MUCH = "it takes too much time or memory"

# Each is refused at once.
REFUSED = {
    "odd": "{{ '%1000000000d' is odd }}",
    "even": "{{ '%1000000000d' is even }}",
    "divisibleby": "{{ '%1000000000d' is divisibleby(3) }}",
    "select odd": "{{ ['%1000000000d'] | select('odd') | list }}",
    "power": "{{ 10 ** (10 ** 8) }}",
    "power of a text": "{{ (2 ** 4000) ** ('a' * 100000) }}",
    "negative power": "{{ (-10) ** (10 ** 8) }}",
    "product": "{{ 2 ** 4000 * 2 ** 4000 }}",
    "digits": "{{ ('9' * 100000) | int }}",
    "digits, base 3": "{{ ('2' * 100000) | int(0, 3) }}",
    "digits, base 16": "{{ ('f' * 900000) | int(base=16) }}",
    "float": "{{ ('1' * 900000) | float }}",
    "literal": "{{ 0x" + "f" * 40000 + " }}",
    "date": "{{ strftime_now('%c' * 1000000) }}",
    "include": "".join(f"{{% set c{i} = 1 %}}" for i in range(1200)) + "{% include 'a' %}" * 1200,
    "blocks": "{% block a scoped %}{% endblock %}",
    "autoescape": "{% autoescape true %}{{ '\"' * 900000 }}{% endautoescape %}",
    "view": "{{ {}.items().mapping }}",
    "generator": "{{ (range(3) | map('string')).throw(1) }}",
}

PROGRAM = """
import json, resource, sys
from smollm2.errors import TemplateError
from smollm2.template import ChatTemplate, budget
budget._SECONDS = float("inf")  # prices alone must do
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2)
attacks, messages = json.load(sys.stdin)
ends = {}
for name, source in attacks.items():
    try:
        ends[name] = "made " + str(len(ChatTemplate(source).render(messages)))
    except TemplateError as error:
        ends[name] = str(error)
# Not ru_maxrss, which begins at what the parent of this process had.
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps([ends, int(status["VmHWM"].split()[0])]))
"""


def attack(attacks: dict[str, str]) -> tuple[dict[str, str], int]:
    """How each attack ends in a process of its own, and the most KiB that it had."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(ADDRESS_SPACE)],
        input=json.dumps([attacks, MESSAGES]),
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    ends, peak = json.loads(done.stdout)
    return ends, peak


def test_attacks_stay_within_little_memory() -> None:
    # cases: X1
    ends, peak = attack({"harmless": "x"} | ATTACKS)
    unbounded = {name: end for name, end in ends.items() if TOO_MUCH not in end}
    assert unbounded == {"harmless": "made 1"}
    assert peak < 500_000  # KiB; some 90,000 of it are Python and the modules


def test_what_cannot_be_bounded_is_refused() -> None:
    # cases: X1
    ends, peak = attack(REFUSED)
    assert {name: end for name, end in ends.items() if "not allowed" not in end} == {}
    assert peak < 500_000


HARMLESS = """{% for m in messages %}
{{ m.content.replace('x', 'y') }}{{ '-'.join(['a', m.role]) }}{{ m.content.split('x') }}
{{ 'a b  c'.split() }}{{ 'a</t>b</t>c'.rsplit('</t>', 1) }}{{ 'xxay'.strip('xy') }}
{{ dict(a=1, **{'b': 2}) }}{{ dict([('a', 1)]) }}{{ namespace({'n': 3}, k=4).n }}
{{ [3, 1, 2] | sort }}{{ 'bab' | unique | list }}{{ [1, 2] | map('string') | join }}
{{ (messages | groupby('role')) | map('first') | list }}{{ 'abc' | reverse }}{{ none | list }}
{{ missing | list }}{{ 3 is odd }}{{ 'a' is in('abc') }}{{ 'x' in m.content }}{{ 1 < 2 < 3 }}
{{ 'a' ~ 1 ~ none }}{{ 'é"' | tojson(ensure_ascii=true) }}{{ '12' | int + 1 }}{{ 2 ** 10 }}
{% for c in 'abc' if c != 'b' %}{{ c }}{{ loop.index }}{{ loop.last }}{% endfor %}
{% macro f(a, b=2) %}{{ a }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ f(*[1, 2, 3], **{'z': 1}) }}
{% call f(1) %}inner{% endcall %}{% filter upper %}loud{% endfilter %}{{ loop.cycle('p', 'q') }}
{% endfor %}"""


def test_prices_change_nothing_else() -> None:
    import jinja2

    by_jinja = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, finalize=None)
    by_jinja.filters["tojson"] = json.dumps
    source = HARMLESS.replace("none | list", "[] | list").replace("{% call f(1) %}inner{% end", "")
    source = source.replace("call %}{% filter", "{% filter")
    by_jinja.globals["namespace"] = dict
    assert ChatTemplate(source).render(MESSAGES) == by_jinja.from_string(source).render(
        messages=MESSAGES
    )


def test_the_probe_for_stop_ids_has_a_twentieth(shared: Any) -> None:
    # cases: X1 (loading renders the template of a stranger)
    from tests.vocabulary import golden_tokenizer

    tokenizer = golden_tokenizer(shared)
    ending = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    for turns, found in ((1_000, {2}), (20_000, set())):
        source = f"{{% for i in range({turns}) %}}{{% endfor %}}" + ending
        assert ChatTemplate(source).stop_ids(tokenizer) == found
        assert ChatTemplate(source).render(MESSAGES) == "x<|im_end|>" * 2
