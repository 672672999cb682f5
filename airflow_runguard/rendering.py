"""A key's template or callable → the key's text, for the doors.

Jinja is made to name things for people: it renders ``None`` as "None", a missing attribute as nothing and an object as
its address. In a key each of these is a second charge or a charge that never happens, so here every expression must
come to something that means the same in every process, or the rendering is refused with the expression's name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from functools import partial
from typing import Any
from uuid import UUID

import jinja2
from jinja2 import ChainableUndefined, StrictUndefined, nodes
from jinja2.compiler import CodeGenerator
from jinja2.visitor import NodeTransformer

from airflow_runguard.core.errors import PlanningError
from airflow_runguard.core.keys import moment_text, number_text

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+>")
_AUTHORS_MISTAKES = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
"""What a wrong template or callable raises. Anything else, such as a Variable's store that is out of reach, is no fault
of the key and goes up as it is."""

REMEDY = (
    "Give the run what the key needs, or name a fallback in the key itself (`| default('…', true)`); no call was made."
)


def render_key(
    template: str | Callable[[Any], Any], context: Mapping[str, Any], *, env: jinja2.Environment | None = None
) -> str:
    """The key's text, in which every expression has come to something.

    Aware datetimes are written in UTC, equal Decimals alike. A template without any expression is a constant key.

    :param template: a Jinja template, or a callable that is given ``context["args"]`` and returns the key.
    :param context: what Airflow renders templates with, and ``args``, the function's arguments.
    :param env: the DAG's own environment, for its filters and macros; it is not changed.
    :raises PlanningError: an expression is undefined, ``None``, empty, a float or not a scalar; the template is wrong.
    """
    if not isinstance(template, str):
        name = getattr(template, "__qualname__", type(template).__qualname__)
        try:
            value = template(context.get("args"))
        except _AUTHORS_MISTAKES as exc:
            raise PlanningError(f"The key's function {name} raised {type(exc).__name__}: {exc}.", REMEDY) from exc
        return _piece(value, f"{name}()")

    try:
        return _compile(template, env).render(context)
    except (jinja2.TemplateError, *_AUTHORS_MISTAKES) as exc:
        raise PlanningError(f"The key {template!r} cannot be rendered: {exc}.", REMEDY) from exc


class _Missing(ChainableUndefined, StrictUndefined):
    """``a.b.c`` stays undefined until it is used, so that the whole expression can be named and not only ``a``."""


class _GuardOperands(NodeTransformer):
    """Inside an expression, ``None | upper`` is "NONE" and ``"a" ~ None`` is "aNone": what makes a text of its operands
    gets them checked first. ``default`` is how an author says what a missing value means, so it is let through."""

    def __init__(self, checked: Callable[[nodes.Expr], nodes.Expr]) -> None:
        self.checked = checked

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:  # noqa: N802  # Jinja's naming
        self.generic_visit(node)
        if node.node is not None and node.name not in {"default", "d"}:
            node.node = self.checked(node.node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.nodes = [self.checked(part) for part in node.nodes]
        return node

    def visit_Mod(self, node: nodes.Mod) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.right = self.checked(node.right)
        return node

    def visit_Call(self, node: nodes.Call) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.node, nodes.Getattr) and node.node.attr in {"format", "join", "replace"}:
            node.args = [self.checked(part) for part in node.args]
            for keyword in node.kwargs:
                keyword.value = self.checked(keyword.value)
        return node


def _compile(template: str, env: jinja2.Environment | None) -> jinja2.Template:
    """The template with a check around each of its expressions."""
    base = env or jinja2.Environment()  # noqa: S701  # no HTML is made here
    strict = base.overlay(undefined=_Missing, autoescape=False, finalize=None)
    # A native environment would turn the key "0017" into the number 17.
    strict.code_generator_class, strict.template_class, strict.concat = CodeGenerator, jinja2.Template, "".join  # type: ignore[method-assign]
    strict.filters = {**strict.filters, "runguard_piece": _piece, "runguard_operand": _operand}

    def checked(check: str, name: str, node: nodes.Expr) -> nodes.Expr:
        return nodes.Filter(node, check, [nodes.Const(name)], [], None, None, lineno=node.lineno, environment=strict)

    tree = strict.parse(template)
    names = _expressions(strict, template)
    for output in tree.find_all(nodes.Output):
        for i, node in enumerate(output.nodes):
            if not isinstance(node, nodes.TemplateData):
                name = next(names)
                guarded = _GuardOperands(partial(checked, "runguard_operand", name)).visit(node)
                output.nodes[i] = checked("runguard_piece", name, guarded)
    return strict.from_string(tree)


def _expressions(env: jinja2.Environment, template: str) -> Iterator[str]:
    """The source of each ``{{ expression }}``, in the order in which the parsed template has them."""
    text: list[str] = []
    for _, kind, value in env.lex(template):
        if kind == "variable_begin":
            text = []
        elif kind == "variable_end":
            yield "".join(text).strip()
        else:
            text.append(value)


def _operand(value: Any, name: str) -> Any:
    members = value if isinstance(value, list | tuple | set | frozenset) else (value,)
    for member in members:
        if member is None or isinstance(member, jinja2.Undefined):
            raise PlanningError(f"The key's {{{{ {name} }}}} works on a value that is None or undefined.", REMEDY)
    return value


def _piece(value: Any, name: str) -> str:
    """The one text of a scalar in a key; everything without one is refused by the expression's name."""
    refuse = partial(_refuse, name)
    kind = type(value)
    if value is None:
        raise refuse("is None")
    if issubclass(kind, jinja2.Undefined):
        raise refuse("is undefined")
    if issubclass(kind, Enum):
        return _piece(value.value, name)
    if issubclass(kind, str):
        text = str(value)
        if not text.strip():
            raise refuse("is empty")
        if _ADDRESS.search(text):
            raise refuse(f"is {text!r}, an address in this process's memory")
        return text
    if issubclass(kind, bool | int | UUID):
        return str(value)
    if issubclass(kind, Decimal) and value.is_finite():
        return number_text(value)
    if issubclass(kind, datetime):
        return moment_text(value)
    if issubclass(kind, date):
        return date.isoformat(value)
    if issubclass(kind, float):
        raise refuse("is a float, whose digits depend on how it was computed; use an int, a Decimal or `| int`")
    raise refuse(f"is a {kind.__qualname__}; a key is made of scalars, so name the part that identifies the work")


def _refuse(name: str, fault: str) -> PlanningError:
    return PlanningError(f"The key's {{{{ {name} }}}} {fault}, so it cannot name a piece of work.", REMEDY)
