"""RewardFunction: a function with a name and a weight, from a recipe's mapping or from Python."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dovetail.core.choice import did_you_mean, require
from dovetail.core.errors import RecipeError
from dovetail.core.fingerprint import fingerprint
from dovetail.core.imported import ImportedFunction
from dovetail.core.recipe import read
from dovetail.tune.rl.rewards.code_reward import CodeReward
from dovetail.tune.rl.rewards.json_schema import JsonReward
from dovetail.tune.rl.rewards.matches import ExactReward, FormatReward, LengthReward, NumberReward, RegexReward
from dovetail.tune.rl.rewards.model_rewards import JudgeReward, ModelReward
from dovetail.tune.rl.rewards.user_code import identity

KINDS: dict[str, type] = {
    "exact": ExactReward, "number": NumberReward, "regex": RegexReward, "json": JsonReward, "length": LengthReward,
    "format": FormatReward, "code": CodeReward, "judge": JudgeReward, "model": ModelReward,
}  # fmt: skip
COMMON_KEYS = ("name", "weight", "seconds")  # of every reward
IDS = "completion_ids"  # given to the functions that name it
ROW_PARAMETERS = ("prompts", "completions")
P = inspect.Parameter


@dataclass(frozen=True)
class RewardFunction:
    """A function `f(prompts, completions, **columns) -> list[float | None]`, sync or async, with a name and a weight.

    Each argument is a list with one value per row. None means that the reward does not apply to a row; a NoReward means
    the same and has the reason. The function gets the columns of the data that it has parameters for, or all with
    `**columns`; `completion_ids` only if it names it.

    Attributes:
        name: Under which its values are shown.
        function: The function.
        weight: Its factor in the sum of rewards.
        seconds: Time limit of a call; None: the pool's.
    """

    name: str
    function: Callable[..., Any]
    weight: float = 1.0
    seconds: float | None = None

    def __post_init__(self) -> None:
        require(bool(self.name), "name must not be empty", param="name")
        require(callable(self.function), f"function must be callable; got {self.function!r}", param="function")
        require(_is_number(self.weight), f"weight must be a number such as 1.0; got {self.weight!r}", param="weight")
        is_limit = self.seconds is None or (_is_number(self.seconds) and self.seconds > 0)
        require(is_limit, f"seconds must be a number above 0; got {self.seconds!r}", param="seconds")

    @cached_property
    def arguments(self) -> RewardArguments:
        """The arguments that the function takes."""
        return arguments_of(self.function.function if isinstance(self.function, ImportedFunction) else self.function)

    @property
    def fingerprint(self) -> str:
        """A digest of its weight and of its code, by which a resumed run detects a change."""
        return fingerprint(self.weight, identity(self.function))

    def check(self, columns: Collection[str]) -> None:
        """Raise a RecipeError if it needs a column that the data does not have."""
        for name in self.arguments.missing([*columns, IDS]):
            has = ", ".join(sorted(columns)) or "none"
            raise RecipeError(
                f"the reward {self.name!r} needs a column {name!r} of the data, which has {has}: add it, or name "
                f"another.{did_you_mean(name, columns)}",
                param="rewards",
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


# --- from a recipe or from Python -------------------------------------------------------------------------------------


def reward_of(given: Any, columns: Collection[str] | None = None) -> RewardFunction:
    """Return a RewardFunction from a function, a RewardFunction or a recipe's mapping.

        reward_of(my_reward)
        reward_of({"kind": "number", "column": "answer", "weight": 0.5})
        reward_of({"function": "rewards.py:my_reward"})

    Args:
        given: The reward.
        columns: The columns of the data, if they are known.

    Raises:
        RecipeError: The reward cannot be called, or needs a column that the data does not have.
    """
    try:
        reward = _parsed(given)
        reward.arguments  # noqa: B018 - raises for a function that cannot be called
    except RecipeError as error:
        is_whole = error.param is None or error.param.startswith("rewards")
        param = error.param or "rewards" if is_whole else f"rewards.{error.param}"
        raise RecipeError(str(error), param=param, code=error.code) from error
    if columns is not None:
        reward.check(columns)
    return reward


def _parsed(given: Any) -> RewardFunction:
    if isinstance(given, RewardFunction):
        return given
    if isinstance(given, str):
        given = {"function": given} if ":" in given else {"kind": given}
    if isinstance(given, Mapping):
        return _from_mapping(given)
    if not callable(given):
        raise RecipeError(f"a reward must be a function, or a mapping with a kind or a function; got {given!r}")
    kinds = {kind: name for name, kind in KINDS.items()}
    name = getattr(given, "name", None) or kinds.get(type(given)) or getattr(given, "__name__", type(given).__name__)
    return RewardFunction(str(name), given)


def _from_mapping(given: Mapping[str, Any]) -> RewardFunction:
    if ("kind" in given) == ("function" in given):
        raise RecipeError(
            f"a reward must have either a kind ({', '.join(KINDS)}) or a function ('rewards.py:name'); "
            f"got {dict(given)}"
        )
    common = {key: given[key] for key in COMMON_KEYS if key in given}
    rest = {key: value for key, value in given.items() if key not in (*COMMON_KEYS, "kind", "function")}
    if "function" in given:
        _refuse_unknown("with a function", rest, ())
        function: Any = given["function"]
        if isinstance(function, str):
            function = ImportedFunction.parse(function)
        name = getattr(function, "name", None) or getattr(function, "__name__", "reward")
    else:
        name, function = given["kind"], _from_kind(given["kind"], rest)
    return RewardFunction(**{"name": str(name), "function": function, **common})


def _from_kind(kind: str, settings: dict[str, Any]) -> Callable[..., Any]:
    if kind not in KINDS:
        message = f"kind must be one of {', '.join(KINDS)}; got {kind!r}.{did_you_mean(kind, KINDS)}"
        raise RecipeError(message, param="kind")
    _refuse_unknown(f"of kind {kind}", settings, [field.name for field in dataclasses.fields(KINDS[kind])])
    return read(KINDS[kind], settings, f"rewards.{kind}")


def _refuse_unknown(what: str, given: Collection[str], known: Collection[str]) -> None:
    for key in given:
        if key not in known:
            keys = [*known, *COMMON_KEYS]
            message = f"a reward {what} has no key {key!r}; it has {', '.join(keys)}.{did_you_mean(key, keys)}"
            raise RecipeError(message, param=key, code="unknown_key")


# --- arguments --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RewardArguments:
    """The arguments that a reward function takes.

    Attributes:
        required: Columns that it must be given.
        optional: Columns that it takes if they are there.
        takes_all: Whether it takes all other columns too.
        by_name: Which of `prompts` and `completions` it takes by name; None: both by position.
    """

    required: tuple[str, ...]
    optional: tuple[str, ...]
    takes_all: bool
    by_name: tuple[str, ...] | None = None

    def missing(self, columns: Collection[str]) -> list[str]:
        """Return the required columns that are not among these."""
        return [name for name in self.required if name not in columns]

    def bind(self, prompts: list, completions: list, columns: Mapping[str, list]) -> tuple[list, dict[str, list]]:
        """Return the positional and the named arguments of a call."""
        everything = set(columns) - {IDS} if self.takes_all else ()
        wanted = {*self.required, *self.optional, *everything} - set(ROW_PARAMETERS)
        named = {name: list(values) for name, values in columns.items() if name in wanted}
        if self.by_name is None:
            return [prompts, completions], named
        rows = {"prompts": prompts, "completions": completions}
        return [], {**{name: rows[name] for name in self.by_name}, **named}


def arguments_of(function: Callable[..., Any]) -> RewardArguments:
    """Read the arguments from the attribute `columns` of a function, or else from its signature.

    A function takes (prompts, completions) by position, or by name as in `f(completions, **columns)`.
    """
    columns = getattr(function, "columns", None)
    if columns is not None:
        return RewardArguments(tuple(columns), (), False)
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some functions written in C have no signature
        return RewardArguments((), (), False)
    kinds = {name: parameter.kind for name, parameter in parameters.items()}
    takes_all = P.VAR_KEYWORD in kinds.values()
    by_name = None
    if kinds.get("completions") in (P.POSITIONAL_OR_KEYWORD, P.KEYWORD_ONLY):
        by_name = tuple(name for name in ROW_PARAMETERS if name in kinds or takes_all)
    rest = _column_parameters(function, parameters, by_name)
    required = tuple(name for name, parameter in rest.items() if parameter.default is P.empty)
    return RewardArguments(required, tuple(name for name in rest if name not in required), takes_all, by_name)


def _column_parameters(
    function: Callable[..., Any], parameters: Mapping[str, P], by_name: tuple[str, ...] | None
) -> dict[str, P]:
    positional = [p for p in parameters.values() if p.kind in (P.POSITIONAL_ONLY, P.POSITIONAL_OR_KEYWORD)]
    is_variadic = any(p.kind is P.VAR_POSITIONAL for p in parameters.values())
    if by_name is None and len(positional) < 2 and not is_variadic:
        name = getattr(function, "__name__", type(function).__name__)
        taken = ", ".join(parameters)
        raise RecipeError(f"the reward function {name} must take (prompts, completions, **columns); it takes ({taken})")
    rows = ROW_PARAMETERS if by_name is not None else tuple(p.name for p in positional[:2])
    kinds = (P.POSITIONAL_OR_KEYWORD, P.KEYWORD_ONLY)
    return {name: p for name, p in parameters.items() if p.kind in kinds and name not in rows}
