"""Tests of a sandboxed program, split so that the parent process compares as many values as it can.

    Check.parse("assert double(2) == 4")    # the sandbox evaluates `double(2)`; the parent compares the result with 4

A program shares its interpreter with the statements of its tests and can make any of them pass: with an object that
equals everything, or by writing the report itself. It cannot do so where the expected value is not in its process. So
`assert EXPRESSION == LITERAL` is split here, also in a function of asserts that is called with the program's function
(`def check(candidate): ...`, as in HumanEval). Every other statement runs as it is.
"""

from __future__ import annotations

import ast
import copy
import json
from dataclasses import dataclass
from typing import Any

from dovetail.tune.rl.rewards.isolation.canonical import canonical

CONSTRUCTORS = {"set": set, "frozenset": frozenset, "tuple": tuple, "list": list}
TOO_DEEP = (RecursionError, MemoryError)  # raised by Python's parser for thousands of brackets


@dataclass(frozen=True)
class Check:
    """A test as steps to execute in the sandbox, and the values that the parent expects.

    Attributes:
        steps: ("run", statements) or ("value", expression), in order.
        expected: The canonical text that each value must have.
    """

    steps: tuple[tuple[str, str], ...]
    expected: tuple[str, ...] = ()

    @classmethod
    def parse(cls, test: str) -> Check:
        """Split the source of a test into steps."""
        try:
            body = _inlined(ast.parse(test).body)
            split = [(statement, _split(statement)) for statement in body]
        except (SyntaxError, ValueError, *TOO_DEEP):  # reported by the sandbox, which runs it as it is
            return cls((("run", test),))
        if not any(pair for _, pair in split):
            return cls((("run", test),))
        steps = [("value", pair[0]) if pair else ("run", ast.unparse(statement)) for statement, pair in split]
        return cls(tuple(steps), tuple(pair[1] for _, pair in split if pair))

    def error(self, values: list[str]) -> str:
        """Return why the reported values do not pass, or an empty text."""
        for number, expected in enumerate(self.expected):
            if number >= len(values):
                return "it ended before this test did"
            if values[number] != expected:
                source = [source for kind, source in self.steps if kind == "value"][number]
                return f"{source[:80]} must be {expected[:40]}, got {values[number][:40]}"
        return ""


# --- the report -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProgramReport:
    """The lines that the sandboxed process wrote, each checked for its form: see `isolation.program`.

    Attributes:
        isolation: The active restrictions: the first line, written before the program started.
        program: The program's exception, or an empty text; None if the program did not reach its end.
        tests: For each test its exception, or an empty text, and its values.
    """

    isolation: tuple[str, ...] = ()
    program: str | None = None
    tests: tuple[tuple[str, list[str]], ...] = ()

    @classmethod
    def parse(cls, text: bytes, secret: str) -> ProgramReport:
        """Read the lines that have the secret and the right form; ignore every other line.

        The program can write lines of its own, so nothing in them may raise.
        """
        lines = [parts for line in text.splitlines() if (parts := _line(line, secret)) is not None]
        isolation = next((value for kind, value in lines[:1] if kind == "isolation" and _is_texts(value)), ())
        program = next((value for kind, value in lines if kind == "program" and isinstance(value, str)), None)
        tests = [(value[0], value[1]) for kind, value in lines if kind == "test" and _is_test(value)]
        return cls(tuple(isolation), program, tuple(tests))


def _line(line: bytes, secret: str) -> tuple[Any, Any] | None:
    try:
        parts = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return (parts[1], parts[2]) if isinstance(parts, list) and len(parts) == 3 and parts[0] == secret else None


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_test(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and _is_texts(value[1])


# --- splitting a test -------------------------------------------------------------------------------------------------


def _inlined(body: list[ast.stmt]) -> list[ast.stmt]:
    """Replace `def check(candidate)`, if it holds only asserts, and `check(f)` by these asserts with f in them."""
    checks = {one.name: one for one in body if isinstance(one, ast.FunctionDef) and _has_only_asserts(one)}
    named = [node.id for one in body for node in ast.walk(one) if isinstance(node, ast.Name)]
    calls = [one.value.func.id for one in body if _is_call(one)]  # type: ignore[attr-defined]
    # A function that is also used in another way must stay, with its expected values.
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


def _has_only_asserts(function: ast.FunctionDef) -> bool:
    """Return whether a function binds no names of its own: it holds asserts and a docstring only."""
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
    """Return the expression and the canonical text of the literal in `assert EXPRESSION == LITERAL`, else None."""
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
    """Return the value of a literal, or of a call such as `set([1, 2])`; raise ValueError for anything else."""
    match node:
        case ast.Call(func=ast.Name(id=name), args=[] | [_], keywords=[]) if name in CONSTRUCTORS:
            return CONSTRUCTORS[name](*map(_literal, node.args))
    return ast.literal_eval(node)
