"""Reward: a function with a name and a weight, made from what a recipe or a Python caller gives."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dovetail.core.choice import did_you_mean, require
from dovetail.core.errors import UserError
from dovetail.core.fingerprint import fingerprint
from dovetail.tune.rl.rewards.arguments import Arguments, arguments_of
from dovetail.tune.rl.rewards.code import Code
from dovetail.tune.rl.rewards.code_identity import identity
from dovetail.tune.rl.rewards.imported import Imported
from dovetail.tune.rl.rewards.json_schema import Json
from dovetail.tune.rl.rewards.judge import Judge
from dovetail.tune.rl.rewards.matches import Exact, Format, Length, Regex
from dovetail.tune.rl.rewards.model import ModelReward
from dovetail.tune.rl.rewards.number import Number

KINDS: dict[str, type] = {
    "exact": Exact, "number": Number, "regex": Regex, "json": Json, "length": Length, "format": Format, "code": Code,
    "judge": Judge, "model": ModelReward,
}  # fmt: skip
OWN = ("name", "weight", "seconds")  # what every reward has


@dataclass(frozen=True)
class Reward:
    """`function(prompts, completions, **columns) -> list[float | None]`, each a list of one value a row; or async.

    None says that it does not apply to a row; a NoReward says the same with the reason, which is kept. It gets those of
    the data's columns that it has parameters for, or all with `**columns`; `completion_ids` where it names it.
    """

    name: str
    function: Callable[..., Any]
    weight: float = 1.0
    seconds: float | None = None  # that one call may take; None: what the pool says

    def __post_init__(self) -> None:
        require(bool(self.name), "name must not be empty: a reward's numbers are shown under it")
        require(callable(self.function), f"function must be a function; got {self.function!r}")
        require(_is_number(self.weight), f"weight must be a number such as 1.0; got {self.weight!r}")
        timely = self.seconds is None or (_is_number(self.seconds) and self.seconds > 0)
        require(timely, f"seconds must be a number above 0; got {self.seconds!r}")

    @cached_property
    def arguments(self) -> Arguments:
        plain = self.function.function if isinstance(self.function, Imported) else self.function
        return arguments_of(plain)

    @property
    def fingerprint(self) -> str:
        """Of what it computes and its weight: a resumed run notices another one."""
        return fingerprint(self.weight, identity(self.function))

    def check(self, columns: Collection[str]) -> None:
        """ValueError where it asks for a column that the data has not."""
        for name in self.arguments.missing([*columns, "completion_ids"]):
            has = ", ".join(sorted(columns)) or "none"
            raise UserError(
                f"the reward {self.name!r} needs a column {name!r} of the data, which has {has}; add it, or name "
                f"another.{did_you_mean(name, columns)}"
            )


def reward_of(given: Any, columns: Collection[str] | None = None) -> Reward:
    """From a function, a Reward, or a recipe's mapping; checked against the data's columns where they are known.

    reward_of(my_reward)
    reward_of({"kind": "number", "column": "answer", "weight": 0.5})
    reward_of({"function": "rewards.py:my_reward"})
    """
    if isinstance(given, Mapping):
        found = _of_mapping(given)
    elif isinstance(given, str):
        found = _of_mapping({"function": given} if ":" in given else {"kind": given})
    else:
        found = given if isinstance(given, Reward) else _of_function(given)
    found.arguments  # noqa: B018 - a function that cannot be called is refused here
    if columns is not None:
        found.check(columns)
    return found


def _of_function(given: Any) -> Reward:
    if not callable(given):
        raise UserError(f"a reward must be a function, a Reward, or a mapping with a kind or a function; got {given!r}")
    kinds = {kind: name for name, kind in KINDS.items()}
    name = getattr(given, "name", None) or kinds.get(type(given)) or getattr(given, "__name__", type(given).__name__)
    return Reward(str(name), given)


def _of_mapping(given: Mapping[str, Any]) -> Reward:
    own = {key: given[key] for key in OWN if key in given}
    if ("kind" in given) == ("function" in given):
        raise UserError(
            f"a reward must have either a kind ({', '.join(KINDS)}) or a function ('rewards.py:name'); "
            f"got {dict(given)}"
        )
    rest = {key: value for key, value in given.items() if key not in (*OWN, "kind", "function")}
    if "function" in given:
        _refuse_unknown("with a function", rest, ())
        function: Any = given["function"]
        if isinstance(function, str):
            function = Imported.of(function)
        name = getattr(function, "name", None) or getattr(function, "__name__", "reward")
    else:
        name, function = given["kind"], _of_kind(given["kind"], rest)
    return Reward(**{"name": str(name), "function": function, **own})


def _of_kind(kind: str, settings: dict[str, Any]) -> Callable[..., Any]:
    if kind not in KINDS:
        raise UserError(f"a reward's kind must be one of {', '.join(KINDS)}; got {kind!r}.{did_you_mean(kind, KINDS)}")
    fields = dataclasses.fields(KINDS[kind])
    _refuse_unknown(f"of kind {kind}", settings, [field.name for field in fields])
    optional = [f.name for f in fields if f.default is not f.default_factory]  # both are MISSING where it is needed
    missing = [f.name for f in fields if f.name not in (*optional, *settings)]
    if missing:
        raise UserError(f"a reward of kind {kind} needs {' and '.join(missing)}; got {settings or 'neither'}")
    try:
        return KINDS[kind](**settings)
    except (TypeError, ValueError) as error:
        raise UserError(f"the reward of kind {kind}: {error}") from None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _refuse_unknown(what: str, given: Collection[str], known: Collection[str]) -> None:
    for key in given:
        if key not in known:
            every = [*known, *OWN]
            raise UserError(f"a reward {what} has no {key!r}; it has {', '.join(every)}.{did_you_mean(key, every)}")
