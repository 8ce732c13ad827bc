"""Counting: rewrites a parsed template so that it asks its environment before what costs.

Each part becomes a call of a method of the environment (``text``, ``same``, ``concatenated``,
``step``), which pays.
"""

from __future__ import annotations

from typing import NoReturn, TypeVar

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.visitor import NodeTransformer

from smollm2.template.budget import check_bits

_Body = TypeVar("_Body", nodes.For, nodes.Macro, nodes.CallBlock)


class Counting(NodeTransformer):
    """Makes a template pay for what Jinja does without asking its environment."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        """Pay for every turn of a loop, also for those that its condition leaves out."""
        self._body(node)
        if node.test is not None:
            node.test = _paid("same", node.test)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:  # noqa: N802
        """Pay for every run of a macro."""
        return self._body(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.CallBlock:  # noqa: N802
        """Pay for every run of what a macro is given as ``caller``."""
        return self._body(node)

    def visit_Output(self, node: nodes.Output) -> nodes.Output:  # noqa: N802
        """Pay for what is written, which need not reach the end of the rendering."""
        self.generic_visit(node)
        node.nodes = [
            _paid("text", nodes.Const(item.data) if isinstance(item, nodes.TemplateData) else item)
            for item in node.nodes
        ]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:  # noqa: N802
        """Pay for ``a ~ b``."""
        self.generic_visit(node)
        return _paid("concatenated", *node.nodes)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:  # noqa: N802
        """Pay for what is compared or searched."""
        self.generic_visit(node)
        node.expr = _paid("same", node.expr)
        for operand in node.ops:
            operand.expr = _paid("same", operand.expr)
        return node

    def visit_Call(self, node: nodes.Call) -> nodes.Call:  # noqa: N802
        """Pay for the copies that ``f(*values, **values)`` makes."""
        self.generic_visit(node)
        if node.dyn_args is not None:
            node.dyn_args = _paid("same", node.dyn_args)
        if node.dyn_kwargs is not None:
            node.dyn_kwargs = _paid("same", node.dyn_kwargs)
        return node

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

    def visit_Const(self, node: nodes.Const) -> nodes.Const:  # noqa: N802
        """Refuse a number that takes long to write."""
        if isinstance(node.value, int):
            check_bits(node.value.bit_length())
        return node

    def visit_ScopedEvalContextModifier(self, node: nodes.Node) -> NoReturn:  # noqa: N802
        """Refuse ``autoescape``, which writes more than was paid for."""
        raise SecurityError("autoescape is not allowed")

    def _other_template(self, node: nodes.Node) -> NoReturn:
        """Refuse what is for several templates: there is one, and it would compile slowly.

        Jinja's compiler writes out all variables at each of these statements.
        """
        raise SecurityError(f"{type(node).__name__.lower()} is not allowed")

    visit_Block = visit_Extends = visit_FromImport = _other_template  # noqa: N815
    visit_Import = visit_Include = _other_template  # noqa: N815

    def _body(self, node: _Body) -> _Body:
        self.generic_visit(node)
        length = sum(1 for _ in node.find_all(nodes.Node))
        node.body.insert(0, nodes.ExprStmt(_paid("step", nodes.Const(length)), lineno=node.lineno))
        return node


def _paid(method: str, *arguments: nodes.Node) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), list(arguments), [], None, None)
