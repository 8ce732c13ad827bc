"""Sandbox: renders a chat template that a stranger wrote, within bounds.

Jinja's own sandbox keeps a template from reaching Python's internals and from changing what it
is given. It does not bound time or memory, so this one has a budget, which every turn of a loop,
every call and every value is paid from. What can grow is paid for before it is made; of the rest,
the result is at most some times as large as what was paid for already.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.filters import do_float, do_int
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from smollm2.errors import TemplateError
from smollm2.template.budget import Budget, check_bits, size, text_price
from smollm2.template.counting import Counting

_MAX_SOURCE = 50_000  # characters of a template: three or four seconds to compile, at the worst
_MAX_INDENT = 16  # and longest separator, in JSON
_MAX_DIGITS = 400  # of a number that is read
_MAX_LAYOUT = 200  # characters of a layout for the date
_UNITS = 4_000_000  # for a template by itself
_UNITS_EACH = 64  # and for each character of the messages
_MAX_UNITS = 1 << 25

# Filters by what they do with their value: hand it on or look at one end; go through its items;
# read all of it.
_GLANCING = "count d default first items last length"
_WALKING = "groupby join list map max min reject rejectattr select selectattr sort unique"
_READING = """
    abs capitalize dictsort float int lower replace reverse safe string title tojson trim upper
"""
_COMPARING_TESTS = "in == eq equalto != ne > gt greaterthan >= ge < lt lessthan <= le lower upper"
_NUMBER_TESTS = "odd even divisibleby"
_ATTRIBUTES: dict[type, str] = {
    str: """
        capitalize count endswith find index isalnum isalpha isdecimal isdigit islower isnumeric
        isspace istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind
        rindex rpartition rsplit rstrip split splitlines startswith strip swapcase title upper
    """,
    dict: "copy get items keys values",
    list: "copy count index",
    tuple: "count index grouper list",  # the last two: what ``groupby`` makes
}
_QUICK_METHODS = ("get", "items", "keys", "values")
_NOT_ASCII = re.compile("[^\x00-\x7f\ud800-\udfff]")  # half surrogates are marks of this package


def render(source: str, variables: Mapping[str, Any], *, share: int = 1) -> str:
    """Render the template ``source`` as transformers does, with the given variables.

    ``share``: use at most one part in so many of what a template may use up.

    Raises ``TemplateError`` where the template is broken, refuses the messages
    (``raise_exception``), reaches for what it must not, or asks for too much.
    """
    if len(source) > _MAX_SOURCE:
        raise TemplateError(f"the chat template is longer than {_MAX_SOURCE} characters")
    try:
        code = _compile(source)
        units = min(_MAX_UNITS, _UNITS + _UNITS_EACH * size(variables, _MAX_UNITS))
        environment = _Environment(Budget(units // share))
        template = jinja2.Template.from_code(environment, code, environment.make_globals(None))
        return template.render(**variables)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"chat template, line {error.lineno}: {error.message}") from None
    except Exception as error:  # the template is a stranger's program: it may fail in any way
        reason = " ".join(str(error).split()) or "no reason given"
        raise TemplateError(
            f"the chat template failed with {type(error).__name__}: {reason:.200}"
        ) from None


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> types.CodeType:
    environment = _Environment(Budget(0))  # nothing runs yet
    tree = Counting().visit(environment.parse(source))
    code: types.CodeType = environment.compile(tree, filename="<chat template>")
    return code


class _Environment(ImmutableSandboxedEnvironment):
    """The environment of one rendering: what transformers offers to a template, with a budget."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "**", "%"])

    def __init__(self, budget: Budget) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # else filters would run at compile time
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        self._budget = budget
        own = {
            "float": functools.partial(_number, do_float),
            "int": functools.partial(_number, do_int),
            "join": self.joined,
            "replace": self.replaced,
            "safe": self.text,
            "string": self.text,
            "tojson": self.tojson,
            "trim": self.trimmed,
        }
        filters = {**self.filters, **own}
        self.filters = {
            **{name: filters[name] for name in _GLANCING.split()},
            **{name: self._walking(filters[name]) for name in _WALKING.split()},
            **{name: self._reading(filters[name]) for name in _READING.split()},
        }
        tests: dict[str, Any] = {**self.tests}
        self.tests = {
            **tests,
            **{name: self._reading(tests[name]) for name in _COMPARING_TESTS.split()},
            **{name: _of_numbers(tests[name]) for name in _NUMBER_TESTS.split()},
        }
        self.globals = {
            "range": self.globals["range"],
            "dict": self.mapping,
            "namespace": lambda *args, **values: _Namespace(self.mapping(*args, **values)),
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def step(self, length: int) -> None:
        """Pay for a run of a part of the template, by its length."""
        self._budget.spend(length)

    def same(self, value: Any) -> Any:
        """Pay for a value and return it."""
        self._budget.pay(value)
        return value

    def text(self, value: Any) -> str:
        """Write a value as a text, which is paid for."""
        self._budget.pay(value)
        if type(value) is str:
            return value
        text = str(value)
        self._budget.pay(text)
        return text

    def concatenated(self, *values: Any) -> str:
        """Compute ``a ~ b``: all is paid for before it is joined."""
        return "".join([self.text(value) for value in values])

    def joined(self, values: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
        """Be the filter ``join``, which pays before it joins."""
        texts = []
        for value in values:
            texts.append(self.text(value if attribute is None else self.getitem(value, attribute)))
            self._budget.pay(d)
        return str(d).join(texts)

    def replaced(self, text: str, old: str, new: str, count: int = -1) -> str:
        """Be the filter ``replace``, which pays before it replaces."""
        text, old, new = self.text(text), self.text(old), self.text(new)
        self._budget.spend(text.count(old) * len(new))
        return text.replace(old, new, count)

    def trimmed(self, value: Any, chars: str | None = None) -> str:
        """Be the filter ``trim``."""
        text = self.text(value)
        self._budget.spend(text_price("strip", text, (chars,)))
        return text.strip(chars)

    def mapping(self, *args: Any, **values: Any) -> dict[Any, Any]:
        """Be ``dict``, which pays for each pair before it takes the next one."""
        self._budget.pay(values)
        pairs = (arg.items() if isinstance(arg, dict) else arg for arg in args)
        return dict(*map(self._budget.walk, pairs), **values)

    def tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Be the filter ``tojson`` as transformers has it: without Jinja's HTML escapes."""
        if max(indent or 0, *map(len, separators or [""])) > _MAX_INDENT:
            raise SecurityError("tojson: so wide an indent or separator is not allowed")
        encoder = json.JSONEncoder(
            ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
        )
        text = self.joined(encoder.iterencode(value))
        if not ensure_ascii:
            return text
        # json would also escape the shadows of characters, which then could not be lifted.
        return _NOT_ASCII.sub(lambda match: json.dumps(match[0])[1:-1], text)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call something that a template names, at a price."""
        if isinstance(__obj, types.BuiltinMethodType | types.MethodType):
            return __self._call_method(__obj, args, _without_scope(kwargs))
        return __self.same(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute what can grow without bound, if the budget allows it."""
        if operator == "%" and isinstance(left, str):
            raise SecurityError("text % values is not allowed")
        self._budget.pay(left, right)
        numbers = [value for value in (left, right) if isinstance(value, int)]
        if len(numbers) == 2 and operator == "**":
            check_bits(left.bit_length() * right)
        check_bits(sum(number.bit_length() for number in numbers))
        for one, other in ((left, right), (right, left)):
            if operator == "*" and isinstance(one, int) and isinstance(other, str | list | tuple):
                self._budget.spend(max(0, one) * size(other, 1 << 40))
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may read an attribute: few, and only of what Jinja hands out."""
        for kind, names in _ATTRIBUTES.items():
            if isinstance(obj, kind):
                return attr in names.split()
        known = isinstance(obj, LoopContext | Macro | Namespace)
        return known and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Refuse ``str.format``: a width can be of any size."""
        if super().wrap_str_format(value) is not None:
            raise SecurityError("text.format is not allowed")
        return None

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        """Refuse at once where Jinja waits for the value to be used."""
        raise SecurityError(f"{attribute!r} of {type(obj).__name__} is not allowed")

    def _call_method(
        self,
        method: types.BuiltinMethodType | types.MethodType,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        owner, name = method.__self__, method.__name__
        if owner is self:  # which pays by itself
            return method(*args, **kwargs)
        if isinstance(owner, str) and name == "join":
            return self.joined(args[0], owner)
        if isinstance(owner, str) and name == "replace":
            return self.replaced(owner, *args, **kwargs)
        self._budget.pay(args, kwargs, *(() if name in _QUICK_METHODS else (owner,)))
        if isinstance(owner, str):
            self._budget.spend(text_price(name, owner, (*args, *kwargs.values())))
        return self.same(method(*args, **kwargs))

    def _reading(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter or test that pays for its arguments, and for its result as ``same`` does."""

        @functools.wraps(function)
        def paying(*args: Any, **kwargs: Any) -> Any:
            self._budget.pay(args, kwargs)
            return self.same(function(*args, **kwargs))

        return paying

    def _walking(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that pays for each item of its value when it takes it."""
        place = int(hasattr(function, "jinja_pass_arg"))  # of the value, behind Jinja's argument

        @functools.wraps(function)
        def paying(*args: Any, **kwargs: Any) -> Any:
            before, more = args[:place], args[place + 1 :]
            value = args[place]
            items = value and self._budget.walk(value, more, kwargs)
            return function(*before, items, *more, **kwargs)

        return paying


class _Generation(Extension):
    """``{% generation %}``: marks what an assistant wrote; without meaning for rendering."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Put the marked part in place of the mark."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """``namespace()``, written without its values: they may hold each other many times over."""

    def __repr__(self) -> str:
        return "<Namespace>"


def _without_scope(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Leave out what Jinja passes to functions that ask for its context."""
    return {key: kwargs[key] for key in kwargs if key not in ("_loop_vars", "_block_vars")}


def _number(convert: Callable[..., Any], value: Any, *args: Any, **kwargs: Any) -> Any:
    """Read a number, whose text is not long: the time grows with the square."""
    if isinstance(value, str) and len(value) > _MAX_DIGITS:
        raise SecurityError("numbers so large are not allowed")
    return convert(value, *args, **kwargs)


def _of_numbers(test: Callable[..., Any]) -> Callable[..., Any]:
    """A test that computes ``value % number``, which for a text would be formatting."""

    def checked(value: Any, *args: Any) -> Any:
        if isinstance(value, str):
            raise SecurityError("text % values is not allowed")
        return test(value, *args)

    return checked


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    if len(layout) > _MAX_LAYOUT:
        raise SecurityError("so long a layout for the date is not allowed")
    return datetime.datetime.now().astimezone().strftime(layout)
