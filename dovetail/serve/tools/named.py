"""A call that names its function and then writes the arguments: `name[ARGS]{...}`, `f(a=1)`, `<function=f>...`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from dovetail.serve.tools.head import Found, Head
from dovetail.serve.tools.notation import State


class Arguments(Protocol):
    """Reads arguments in a format's own notation and writes them as JSON."""

    state: State

    def push(self, text: str, at: int) -> int: ...

    def take(self) -> str: ...


class Named:
    """`name` is None until the head is complete; until then nothing is read."""

    def __init__(self, heads: tuple[Head, ...], arguments: Callable[[str], Arguments]):
        self.state, self.complete = State.OPEN, False
        self.name: str | None = None
        self._heads, self._new_arguments = heads, arguments
        self._arguments: Arguments | None = None

    def push(self, text: str, at: int) -> int:
        if self._arguments is None:
            found = [head.find(text, at) for head in self._heads]
            whole = next((head for head in found if isinstance(head, Found)), None)
            if whole is None:
                self.state = State.OPEN if any(found) else State.BROKEN
                return at
            self.name, at = whole
            self._arguments = self._new_arguments(self.name)
        at = self._arguments.push(text, at)
        self.state = self._arguments.state
        self.complete = self.state is State.DONE
        return at

    def take(self) -> str:
        assert self._arguments is not None
        return self._arguments.take()
