"""Generate command-line options from settings dataclasses, and refuse renamed flags with the present name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_origin

import typer
from typer.core import TyperCommand

from dovetail.core.errors import UserError
from dovetail.core.option import Option, default_of, kinds_of, options_of
from dovetail.engine.options import EngineOptions

# Flags that had another name. A flag is refused where the command has the new one.
RENAMED_FLAGS = {
    "--no-prefix-caching": "--no-enable-prefix-caching", "--no-multi-step": "--max-decode-steps 1",
    "--tool-format": "--tool-call-parser", "--reasoning-format": "--reasoning-parser",
    "--allow-origin": "--allowed-origins", "--allow-request-template": "--trust-request-chat-template",
    **{f"--{old.replace('_', '-')}": f"--{new.replace('_', '-')}" for old, new in EngineOptions.RENAMED.items()},
}  # fmt: skip
NAMED_PATHS = "NAME=PATH"
_METAVARS = {int: "N", float: "X", str: "TEXT", list[str]: "TEXT"}


class OptionCommand(TyperCommand):
    """Take several NAME=PATH words after one flag, as in `--lora-modules a=DIR b=DIR`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse renamed flags and repeat the flag of a NAME=PATH option before each of its values."""
        flags = {flag: each for each in self.params for flag in (*each.opts, *each.secondary_opts)}
        found: list[str] = []
        listed = ""  # the flag that NAME=PATH words belong to
        for i, word in enumerate(args):
            if word == "--":
                return super().parse_args(ctx, [*found, *args[i:]])
            name = word.partition("=")[0]
            if name not in flags and RENAMED_FLAGS.get(name, "").split(" ")[0] in flags:
                raise UserError(f"there is no option {name}: it is called {RENAMED_FLAGS[name]}", param=name)
            if word.startswith("-"):
                listed = word if getattr(flags.get(word), "metavar", "") == NAMED_PATHS else ""
            elif listed and found[-1] != listed and "=" in word:
                found.append(listed)
            found.append(word)
        return super().parse_args(ctx, found)


def takes_options(
    settings: type,
    argument: str,
    *,
    panel: str | None = None,
    defaults: Mapping[str, Any] | None = None,
    help: Mapping[str, str] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command one command-line option per option of `settings`.

    The command receives the values as a dict in its parameter `argument`, ready for the constructor of `settings`.

    Args:
        settings: A dataclass whose fields are declared with `core.option.option`.
        argument: The name of the command's parameter that gets the values.
        panel: The heading in `--help`, for options that have none of their own.
        defaults: Defaults of this command where they differ.
        help: Help texts of this command where they differ.
    """
    declared, kinds = options_of(settings), kinds_of(settings)

    default_values = {name: default_of(settings, name) for name in declared} | dict(defaults or {})

    def parameter(name: str, each: Option) -> inspect.Parameter:
        default = default_values[name]
        kind, listed = _type_of(kinds[name])
        flag = f"--{name.replace('_', '-')}"
        flags = [flag] if kind is bool and default is False else []  # a flag that is off needs no --no-
        shown = typer.Option(
            list(default or ()) if listed else default, *flags, help=(help or {}).get(name, each.help),
            metavar=each.metavar or _METAVARS.get(kind), rich_help_panel=each.panel or panel,
        )  # fmt: skip
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=shown, annotation=kind)

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        own = inspect.signature(command, eval_str=True)
        kept = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own.parameters.values()]
        made = [parameter(name, each) for name, each in declared.items()]

        @functools.wraps(command)
        def run(**given: Any) -> Any:
            values = default_values | {
                name: _value(kinds[name], name, given.pop(name)) for name in declared if name in given
            }
            return command(**given, **{argument: values})

        parameters = [each for each in kept if each.name != argument] + made
        run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        del run.__wrapped__
        return run

    return decorate


takes_engine_options = functools.partial(takes_options, EngineOptions, "engine", panel="Engine")


def _type_of(kind: Any) -> tuple[Any, bool]:
    """Return the type that typer parses, and whether it is a list."""
    if get_origin(kind) in (tuple, Mapping):
        return list[str], True
    return (kind if kind in (int, float, bool, Path) else str), False


def _value(kind: Any, name: str, given: Any) -> Any:
    origin = get_origin(kind)
    if origin is tuple:
        return tuple(given)
    return named_paths(f"--{name.replace('_', '-')}", given) if origin is Mapping else given


def named_paths(flag: str, given: list[str]) -> dict[str, str]:
    """Return {name: path} from NAME=PATH words."""
    found: dict[str, str] = {}
    for each in given:
        name, equals, path = each.partition("=")
        if not (name and equals and path):
            raise UserError(f"{flag} must be NAME=PATH, got {each!r}", param=flag)
        if name in found:
            raise UserError(f"{flag} {each}: the name {name!r} is already used: choose another one", param=flag)
        found[name] = str(Path(path).expanduser())  # the shell does not expand a ~ after the =
    return found
