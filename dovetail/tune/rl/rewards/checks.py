"""A test as a list of steps, of which the parent compares as many as it can with what it expects.

    Check.of("assert double(2) == 4")       # the sandbox evaluates `double(2)`; the parent compares the result with 4

A program shares its interpreter with the statements of its tests and can make any of them pass: by an object that
equals everything, or by writing the report itself. It cannot do so where the expected value is not in its process. So
`assert EXPRESSION == LITERAL` is split here, and every other statement runs as it is.
"""

from __future__ import annotations

import ast
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
            body = ast.parse(test).body
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
