"""A test as a list of steps, of which the parent compares as many as it can with what it expects.

    Check.of("assert double(2) == 4")       # the sandbox evaluates `double(2)`; the parent compares the result with 4

A program shares its interpreter with the statements of its tests and can make any of them pass: by an object that
equals everything, or by writing the report itself. It cannot do so where the expected value is not in its process. So
`assert EXPRESSION == LITERAL` is split here, also in a function of asserts that is called with the program's function
(`def check(candidate): ...`, as in HumanEval), and every other statement runs as it is.
"""

from __future__ import annotations

import ast
import copy
from dataclasses import dataclass
from typing import Any

from dovetail.tune.rl.rewards.cage.values import canonical

MAKERS = {"set": set, "frozenset": frozenset, "tuple": tuple, "list": list}
TOO_DEEP = (RecursionError, MemoryError)  # what Python's parser raises for thousands of brackets


@dataclass(frozen=True)
class Check:
    """`steps` are ("run", statements) or ("value", expression), in order; `expected` is the text of each value."""

    steps: tuple[tuple[str, str], ...]
    expected: tuple[str, ...] = ()

    @classmethod
    def of(cls, test: str) -> Check:
        try:
            body = _inlined(ast.parse(test).body)
            split = [(statement, _split(statement)) for statement in body]
        except (SyntaxError, ValueError, *TOO_DEEP):  # reported by the sandbox, which runs it as it is
            return cls((("run", test),))
        if not any(pair for _, pair in split):
            return cls((("run", test),))
        steps = [("value", pair[0]) if pair else ("run", ast.unparse(statement)) for statement, pair in split]
        return cls(tuple(steps), tuple(pair[1] for _, pair in split if pair))

    def error_of(self, found: list[str]) -> str:
        """Return why the values do not pass, or nothing."""
        for number, expected in enumerate(self.expected):
            if number >= len(found):
                return "it ended before this test did"
            if found[number] != expected:
                source = [source for kind, source in self.steps if kind == "value"][number]
                return f"{source[:80]} must be {expected[:40]}, got {found[number][:40]}"
        return ""


def _inlined(body: list[ast.stmt]) -> list[ast.stmt]:
    """Replace `def check(candidate)` of nothing but asserts, and `check(f)`, by these asserts with f in them."""
    checks = {one.name: one for one in body if isinstance(one, ast.FunctionDef) and _has_asserts_alone(one)}
    named = [node.id for one in body for node in ast.walk(one) if isinstance(node, ast.Name)]
    calls = [one.value.func.id for one in body if _is_call(one)]  # type: ignore[attr-defined]
    # one that is used in another way too must stay, and the expected values stay with it
    checks = {name: one for name, one in checks.items() if 0 < calls.count(name) == named.count(name)}
    found: list[ast.stmt] = []
    for statement in body:
        match statement:
            case ast.FunctionDef(name=name) if statement is checks.get(name):
                continue
            case ast.Expr(ast.Call(ast.Name(name), [ast.Name(given)], [])) if name in checks:
                rename = _Rename(checks[name].args.args[0].arg, given)
                found += [rename.visit(copy.deepcopy(one)) for one in checks[name].body]
            case _:
                found.append(statement)
    return found


def _is_call(statement: ast.stmt) -> bool:
    match statement:
        case ast.Expr(ast.Call(ast.Name(), [ast.Name()], [])):
            return True
    return False


def _has_asserts_alone(function: ast.FunctionDef) -> bool:
    """Other statements would have names of their own, which are not the program's. A text is a docstring."""
    plain = all(isinstance(one, ast.Assert | ast.Pass) or _is_text(one) for one in function.body)
    bound = any(isinstance(one, ast.Lambda | ast.NamedExpr | ast.comprehension) for one in ast.walk(function))
    given = function.args
    one_argument = len(given.args) == 1 and not (given.posonlyargs or given.kwonlyargs or given.vararg or given.kwarg)
    return plain and not bound and one_argument and not function.decorator_list


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


class _Rename(ast.NodeTransformer):
    def __init__(self, before: str, after: str) -> None:
        self.before, self.after = before, after

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(self.after, node.ctx) if node.id == self.before else node


def _split(statement: ast.stmt) -> tuple[str, str] | None:
    """Return the expression and the text of the value it must have, of `assert EXPRESSION == LITERAL`."""
    if not isinstance(statement, ast.Assert) or not isinstance(statement.test, ast.Compare):
        return None
    compare = statement.test
    if len(compare.ops) != 1 or not isinstance(compare.ops[0], ast.Eq):
        return None
    for value, expression in ((compare.comparators[0], compare.left), (compare.left, compare.comparators[0])):
        try:
            return ast.unparse(expression), canonical(_literal(value))
        except (ValueError, TypeError):
            continue
    return None


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal, or of a call such as `set([1, 2])`. ValueError for anything else."""
    match node:
        case ast.Call(func=ast.Name(id=name), args=[] | [_], keywords=[]) if name in MAKERS:
            return MAKERS[name](*map(_literal, node.args))
    return ast.literal_eval(node)
