"""Sandbox: renders a chat template that a stranger wrote, within bounds.

Jinja's own sandbox keeps a template from reaching Python's internals and from changing what it
is given. It does not bound time or memory, so this one counts: a budget is spent by every turn of
a loop, every call and every value made, and rendering ends when it is used up.
"""

from __future__ import annotations

import datetime
import functools
import json
import time
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from smollm2.errors import TemplateError

_MAX_SOURCE = 100_000  # characters of a template
_MAX_SECONDS = 5.0
_MAX_INDENT = 16  # and longest separator, in JSON
_BUDGET = 4_000_000  # characters and items made, of a template by itself
_BUDGET_FACTOR = 64  # and for each character of the messages
_STEP = 32  # what a call or a turn of a loop costs
_MAX_BITS = 4096  # of a whole number

_FILTERS = """
    abs capitalize count d default dictsort first float groupby int items join last
    length list lower map max min reject rejectattr replace reverse safe select selectattr sort
    string title tojson trim unique upper
"""
_TEXT_METHODS = """
    capitalize count endswith find index isalnum isalpha isdecimal isdigit islower isnumeric
    isspace istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind
    rindex rpartition rsplit rstrip split splitlines startswith strip swapcase title upper
"""


def render(source: str, variables: Mapping[str, Any]) -> str:
    """Render the template ``source`` as transformers does, with the given variables.

    Raises ``TemplateError`` where the template is broken, refuses the messages
    (``raise_exception``), reaches for what it must not, or asks for too much.
    """
    if len(source) > _MAX_SOURCE:
        raise TemplateError(f"the chat template is longer than {_MAX_SOURCE} characters")
    try:
        environment = _Environment(_BUDGET + _BUDGET_FACTOR * _size(variables, limit=1 << 40))
        template = jinja2.Template.from_code(
            environment, _compile(source), environment.make_globals(None)
        )
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
    environment = _Environment(_BUDGET)
    tree = _Counting().visit(environment.parse(source))
    code: types.CodeType = environment.compile(tree, filename="<chat template>")
    return code


class _Environment(ImmutableSandboxedEnvironment):
    """The environment of one rendering: what transformers offers to a template, with a budget."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "**", "%"])

    def __init__(self, budget: int) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        self._left = budget
        self._deadline = time.monotonic() + _MAX_SECONDS
        own = {"join": self.joined, "replace": self.replaced, "tojson": self.tojson, "safe": str}
        filters = {**self.filters, **own}
        self.filters = {name: self._counted(filters[name]) for name in _FILTERS.split()}
        self.globals = {
            "range": self.globals["range"],
            "dict": dict,
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def charge(self, value: Any) -> Any:
        """Pay for a step and for ``value``, and return it."""
        self._spend(_STEP + _size(value, self._left))
        return value

    def concatenated(self, *values: Any) -> str:
        """Compute ``a ~ b``."""
        return "".join(map(str, values))

    def same(self, value: Any = None) -> Any:
        """Return a value as it is: ``call`` pays for it."""
        return value

    def joined(self, values: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
        """Be the filter ``join``, which pays before it joins."""
        texts = []
        for value in values:
            texts.append(str(value if attribute is None else self.getitem(value, attribute)))
            self._spend(len(texts[-1]) + len(d))
        return str(d).join(texts)

    def replaced(self, text: str, old: str, new: str, count: int = -1) -> str:
        """Be the filter ``replace``, which pays before it replaces."""
        text, old, new = str(text), str(old), str(new)
        self._spend(len(text) + text.count(old) * len(new))
        return text.replace(old, new, count)

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
            ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        return self.joined(encoder.iterencode(value))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call something that a template names, at a price."""
        if isinstance(__obj, types.BuiltinMethodType | types.MethodType):
            text = __obj.__self__
            if isinstance(text, str) and __obj.__name__ == "join":
                return __self.joined(args[0], text)
            if isinstance(text, str) and __obj.__name__ == "replace":
                return __self.replaced(text, *args, **kwargs)
        return __self.charge(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute what can grow without bound, if the budget allows it."""
        if operator == "%" and isinstance(left, str):
            raise SecurityError("text % values is not allowed")
        for one, other in ((left, right), (right, left)):
            if not isinstance(one, int):
                continue
            if operator == "*" and isinstance(other, str | list | tuple):
                self._spend(max(0, one) * len(other))
            bits = one.bit_length() * (other if operator == "**" and one is left else 2)
            if isinstance(bits, int) and bits > _MAX_BITS:
                raise SecurityError("numbers so large are not allowed")
        return self.charge(super().call_binop(context, operator, left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may read an attribute: of texts and numbers only few."""
        if isinstance(obj, str):
            return attr in _TEXT_METHODS.split()
        return not isinstance(obj, int | float) and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Refuse ``str.format``: a width can be of any size."""
        if super().wrap_str_format(value) is not None:
            raise SecurityError("text.format is not allowed")
        return None

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        """Refuse at once where Jinja waits for the value to be used."""
        raise SecurityError(f"{attribute!r} of {type(obj).__name__} is not allowed")

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            return self.charge(function(*args, **kwargs))

        return counted

    def _spend(self, amount: int) -> None:
        self._left -= amount
        if self._left < 0 or time.monotonic() > self._deadline:
            raise SecurityError("it takes too much time or memory")


class _Counting(NodeTransformer):
    """Makes a template pay for what Jinja does without asking its environment."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        """Pay for every turn of a loop."""
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_paid("same"), lineno=node.lineno))
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Output:  # noqa: N802
        """Pay for what is written, which need not reach the end of the rendering."""
        self.generic_visit(node)
        node.nodes = [
            _paid("same", nodes.Const(item.data) if isinstance(item, nodes.TemplateData) else item)
            for item in node.nodes
        ]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:  # noqa: N802
        """Pay for ``a ~ b``."""
        self.generic_visit(node)
        return _paid("concatenated", *node.nodes)

    def visit_List(self, node: nodes.List) -> nodes.Call:  # noqa: N802
        """Pay for a list."""
        self.generic_visit(node)
        return _paid("same", node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Call:  # noqa: N802
        """Pay for an object."""
        self.generic_visit(node)
        return _paid("same", node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:  # noqa: N802
        """Pay for a tuple that is a value, not a target."""
        self.generic_visit(node)
        return _paid("same", node) if node.ctx == "load" else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:  # noqa: N802
        """Pay for the copy that a slice is."""
        self.generic_visit(node)
        return _paid("same", node) if isinstance(node.arg, nodes.Slice) else node


def _paid(method: str, *arguments: nodes.Expr) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), list(arguments), [], None, None)


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


def _size(value: Any, limit: int) -> int:
    """Characters and items of a value, each counted as often as it appears; stops at ``limit``."""
    total = 0
    waiting = [value]
    while waiting and total <= limit:
        item = waiting.pop()
        if isinstance(item, str | range):
            total += len(item)
        elif isinstance(item, list | tuple):
            total += 1 + len(item)
            waiting.extend(item if total <= limit else ())
        elif isinstance(item, dict):
            total += 1 + 2 * len(item)
            waiting.extend((*item.keys(), *item.values()) if total <= limit else ())
        else:
            total += 1
    return total


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().astimezone().strftime(layout)
