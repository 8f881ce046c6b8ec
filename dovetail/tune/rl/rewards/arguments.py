"""What a reward function asks for: read from its signature, or from `columns` where it says so itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from dovetail.core.errors import UserError

IDS = "completion_ids"  # given to those who ask for it by name
OURS = ("prompts", "completions")
P = inspect.Parameter


@dataclass(frozen=True)
class Arguments:
    required: tuple[str, ...]  # columns
    optional: tuple[str, ...]
    every: bool  # whether it takes all other columns too
    by_name: tuple[str, ...] | None = None  # of OURS, those that it takes by name; None: both, by place

    def missing(self, columns: Collection[str]) -> list[str]:
        return [name for name in self.required if name not in columns]

    def bind(self, prompts: list, completions: list, columns: Mapping[str, list]) -> tuple[list, dict[str, list]]:
        """Positional and named arguments of one call."""
        asked = {*self.required, *self.optional, *(set(columns) - {IDS} if self.every else ())} - set(OURS)
        named = {name: list(values) for name, values in columns.items() if name in asked}
        if self.by_name is None:
            return [prompts, completions], named
        ours = {"prompts": prompts, "completions": completions}
        return [], {**{name: ours[name] for name in self.by_name}, **named}


def arguments_of(function: Callable[..., Any]) -> Arguments:
    """`f(prompts, completions, **columns)`, with columns named or not; or its two by name: `f(completions, **rest)`."""
    told = getattr(function, "columns", None)
    if told is not None:
        return Arguments(tuple(told), (), False)
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some of those written in C have none
        return Arguments((), (), False)
    kinds = {name: parameter.kind for name, parameter in parameters.items()}
    every = P.VAR_KEYWORD in kinds.values()
    by_name = None
    if kinds.get("completions") in (P.POSITIONAL_OR_KEYWORD, P.KEYWORD_ONLY):
        by_name = tuple(name for name in OURS if name in kinds or every)
    rest = _columns(function, parameters, by_name)
    required = tuple(name for name, parameter in rest.items() if parameter.default is P.empty)
    return Arguments(required, tuple(name for name in rest if name not in required), every, by_name)


def _columns(
    function: Callable[..., Any], parameters: Mapping[str, P], by_name: tuple[str, ...] | None
) -> dict[str, P]:
    named = [p for p in parameters.values() if p.kind in (P.POSITIONAL_ONLY, P.POSITIONAL_OR_KEYWORD)]
    starred = any(p.kind is P.VAR_POSITIONAL for p in parameters.values())
    if by_name is None and len(named) < 2 and not starred:
        name = getattr(function, "__name__", type(function).__name__)
        raise UserError(
            f"the reward function {name} must take (prompts, completions, **columns); "
            f"it takes ({', '.join(parameters)})"
        )
    placed = OURS if by_name is not None else tuple(p.name for p in named[:2])
    words = (P.POSITIONAL_OR_KEYWORD, P.KEYWORD_ONLY)
    return {name: p for name, p in parameters.items() if p.kind in words and name not in placed}
