"""Declare the options of a settings dataclass once: type and default in the field, the rest in its metadata.

The command line (`cli.options`), Python keywords and recipe sections are generated from the fields. Only the standard
library is imported here: the command line shows options before it loads jax.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from numbers import Integral, Real
from typing import Any, Literal, get_args, get_origin, get_type_hints

from dovetail.core.choice import did_you_mean
from dovetail.core.errors import UserError


@dataclass(frozen=True)
class Option:
    """Describe one option beside its type and default.

    Attributes:
        help: One or two sentences, also shown by `--help`.
        least: The smallest value, or where `above` is set the largest number that is too small.
        most: The largest value.
        choices: The valid strings; empty: any.
        metavar: What `--help` shows in place of the type.
        panel: The heading of `--help` under which the option is listed.
        defaults: The value of an option left at None, by platform; `""` stands for every platform not named.
    """

    help: str
    least: float | None = None
    most: float | None = None
    above: bool = False
    choices: tuple[str, ...] = ()
    metavar: str | None = None
    panel: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def check(self, name: str, value: Any, kind: Any) -> None:
        """Raise UserError unless `value` is one of the choices and within the range."""
        if self.choices and isinstance(value, str) and value not in self.choices:
            named = ", ".join(self.choices)
            hint = did_you_mean(value, self.choices)
            raise UserError(f"`{name}` must be one of {named}, got {value!r}.{hint}", param=name)
        if self.least is None or value is None:
            return
        number = isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
        if not number or not self._in_range(value):
            raise UserError(f"`{name}` must be {self._range(kind)}, got {value!r}", param=name)

    def _in_range(self, value: Any) -> bool:
        assert self.least is not None
        low = value > self.least if self.above else value >= self.least
        return low and value <= (math.inf if self.most is None else self.most)

    def _range(self, kind: Any) -> str:
        noun = "an integer" if kind is int else "a number"
        low = f"above {self.least:,g}" if self.above else f"of at least {self.least:,g}"
        return f"{noun} {low}" + ("" if self.most is None else f" and at most {self.most:,.0f}")


def option(default: Any, help: str, **info: Any) -> Any:
    """Return a dataclass field with an Option; a callable `default` is the field's factory."""
    metadata = {"option": Option(help, **info)}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def options_of(settings: type) -> dict[str, Option]:
    """Return the declared options of a dataclass by name."""
    return {each.name: each.metadata["option"] for each in fields(settings) if "option" in each.metadata}


def default_of(settings: type, name: str) -> Any:
    """Return the default of an option."""
    declared = settings.__dataclass_fields__[name]
    return declared.default if declared.default_factory is MISSING else declared.default_factory()


def kinds_of(settings: type) -> dict[str, Any]:
    """Return the type of each field, without `| None`."""
    return {name: _without_none(hint) for name, hint in get_type_hints(settings).items()}


def check_options(settings: Any) -> None:
    """Check the choices and ranges of all options of a settings object."""
    kinds = kinds_of(type(settings))
    for name, each in options_of(type(settings)).items():
        each.check(name, getattr(settings, name), kinds[name])


def check_name(name: str, known: Iterable[str], renamed: Mapping[str, str], owner: str) -> None:
    """Raise UserError with the right name unless `name` is one of the `known` options of `owner`."""
    known = tuple(known)
    if name in known:
        return
    if renamed.get(name) in known:
        raise UserError(f"{owner} has no option {name!r}: it is called {renamed[name]!r}", param=name)
    hint = did_you_mean(name, known) or f" The options are {', '.join(known)}."
    raise UserError(f"{owner} has no option {name!r}.{hint}", param=name)


def _without_none(hint: Any) -> Any:
    kinds = [each for each in get_args(hint) if each is not type(None)]
    return kinds[0] if len(kinds) == 1 and get_origin(hint) is not Literal and type(None) in get_args(hint) else hint
