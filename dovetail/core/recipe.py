"""Recipes: YAML to frozen dataclasses and back, for any settings class.

Nothing is ignored: an unknown key is refused with a suggestion, a wrong type with its dotted path. A recipe may start
from another (`base: tiny`), and `key=value` overrides come last. Recipes that ship with the package are found by name.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from dovetail.core import yaml_text
from dovetail.core.choice import did_you_mean
from dovetail.core.errors import RecipeError, UserError
from dovetail.core.foreign_names import IN_SECTION, OURS
from dovetail.core.overrides import Typed, flat, kind_of, parsed, place, split

T = TypeVar("T")
Count = Annotated[int, "count"]  # an int that may be written 10B, 300M or 4k

SHIPPED = Path(__file__).parents[1] / "recipes"
TRAININGS = ("pretrain", "sft", "dpo", "reward", "distill", "rl")  # each is a command, and a class of settings
_QUANTIZATIONS = ("bf16", "f32", "int8", "nf4")  # values that the key `base` had before it meant a parent recipe only
_SUFFIXES = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


# --- finding and layering ---------------------------------------------------------------------------------------------


def shipped(training: str = "pretrain") -> tuple[str, ...]:
    """Return the names of the recipes for this training that come with the package."""
    folder = SHIPPED if training == "pretrain" else SHIPPED / training
    return tuple(sorted(path.stem for path in folder.glob("*.yaml")))


def training_of(name: str) -> str | None:
    """Return the training that a shipped recipe is for; None where no recipe of this name is shipped."""
    return next((training for training in TRAININGS if name in shipped(training)), None)


def find(name_or_path: str, beside: Path | None = None, training: str = "") -> Path:
    """Return a recipe's file: a shipped name, or a path (relative to `beside`, for the base of a recipe in a file).
    `training`: the one that asks, whose recipes an error lists."""
    if found := training_of(name_or_path):
        return (SHIPPED if found == "pretrain" else SHIPPED / found) / f"{name_or_path}.yaml"
    path = (beside or Path()) / Path(name_or_path).expanduser()
    if path.is_file():
        return path
    looked = "no such file" if path.suffix in (".yaml", ".yml") else "neither a file nor shipped"
    names = [name for each in TRAININGS for name in shipped(each) if training in ("", each)]
    hint = did_you_mean(Path(name_or_path).stem, names)
    raise RecipeError(f"no recipe {name_or_path!r}: {looked}.{hint} Shipped: {', '.join(names)}")


def load(name_or_path: str, overrides: Sequence[str] | Mapping[str, Any], cls: type[T]) -> T:
    """The recipe, with overrides on top, as `cls`: `key=value` each, or a mapping of a program's own values."""
    wanted = cls.__name__.lower() if cls.__name__.lower() in TRAININGS else ""
    meant = training_of(name_or_path)
    if wanted and meant and wanted != meant:
        raise RecipeError(
            f"recipe {name_or_path} is for `dovetail {meant}`, not for `dovetail {wanted}`. Shipped for that: "
            f"{', '.join(shipped(wanted))}"
        )
    mapping = _with_base(find(name_or_path, training=wanted), cls, ())
    try:
        return _overridden(cls, mapping, overrides)
    except UserError as error:
        raise RecipeError(f"recipe {name_or_path}: {error}", param=error.param, code=error.code) from error


def raw(name_or_path: str, cls: type = object) -> dict[str, Any]:
    """The recipe's keys and those of its bases, not yet read as any settings; `cls`: one of those they may be for."""
    return _with_base(find(name_or_path), cls, ())


def create(cls: type[T], given: Sequence[str] | Mapping[str, Any]) -> T:
    """Settings from these values alone: see `load`."""
    return _overridden(cls, {}, given)


def change(settings: T, overrides: Sequence[str] | Mapping[str, Any]) -> T:
    """The same settings with some keys changed."""
    return _overridden(type(settings), dump(settings), overrides)


def _overridden(cls: type[T], mapping: Mapping[str, Any], overrides: Sequence[str] | Mapping[str, Any]) -> T:
    pairs = flat(overrides) if isinstance(overrides, Mapping) else [split(text) for text in overrides]
    pairs = [(_whole_path(cls, path, value), value) for path, value in pairs]
    below = _without_rivals(cls, mapping, [path[0] for path, _ in pairs])
    return read(cls, place(below, pairs))


def _whole_path(cls: type, path: list[str], value: Any) -> list[str]:
    """The path of a section's main key, where text is given for the section itself: `data=chats.jsonl` is data.path."""
    text = parsed(value) if isinstance(value, Typed) else value
    if len(path) > 1 or not isinstance(text, str) or not has_key(cls, path[0]):
        return path
    main = getattr(section_of(typing.get_type_hints(cls)[path[0]]), "MAIN", None)
    return [*path, main] if main else path


def _with_base(path: Path, cls: type, above: tuple[Path, ...]) -> dict[str, Any]:
    if path in above:
        chain = " -> ".join(p.name for p in (*above, path))
        raise RecipeError(f"recipe {path.name}: `base` runs in a circle: {chain}")
    try:
        mapping = yaml_text.parse(path.read_text())
    except RecipeError as error:
        raise RecipeError(f"recipe {path}: {error}") from error
    if not isinstance(mapping, dict):
        raise RecipeError(f"recipe {path}: a recipe is a mapping of keys to values; this is {kind_of(mapping)}")
    if dataclasses.is_dataclass(cls):
        whole = {key: _whole_path(cls, [str(key)], value)[1:] for key, value in mapping.items()}
        mapping = {key: {whole[key][0]: value} if whole[key] else value for key, value in mapping.items()}
    base = mapping.pop("base", None)
    if base is None:
        return mapping
    if not isinstance(base, str):
        raise RecipeError(f"recipe {path}: base must be a recipe's name or path; got {base!r}")
    if base in _QUANTIZATIONS:
        raise RecipeError(
            f"recipe {path}: base is the name of a parent recipe, got {base!r}: set quantization: {base}", param="base"
        )
    return layer(cls, _with_base(find(base, path.parent), cls, (*above, path)), mapping)


def layer(cls: type, below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` over `below`: mappings merge, everything else is replaced."""
    return _merge(_without_rivals(cls, below, above), above)


def _without_rivals(cls: type, below: Mapping[str, Any], given: Collection[str]) -> Mapping[str, Any]:
    """Of keys that `cls` calls ALTERNATIVES, one that is given puts away the others below it: `steps=10` over a recipe
    that counts tokens."""
    for group in getattr(cls, "ALTERNATIVES", ()):
        if any(key in given for key in group):
            below = {k: v for k, v in below.items() if k not in group}
    return below


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


# --- mapping to dataclass ---------------------------------------------------------------------------------------------


def read(cls: type[T], mapping: Any, path: str = "", start: T | None = None) -> T:
    """`cls` from a mapping. Keys not given keep the value of `start`, or the class's default."""
    if isinstance(mapping, Typed):
        mapping = parsed(mapping)
    if not isinstance(mapping, Mapping):
        raise RecipeError(f"{path or 'the recipe'} must be a mapping of keys to values; got {kind_of(mapping)}")
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # pyright: ignore[reportArgumentType]
    for key in mapping:
        if key not in fields:
            raise RecipeError(_unknown(cls, path, key, fields))
    hints = typing.get_type_hints(cls, include_extras=True)
    given = {
        key: _convert(hints[key], value, _join(path, key), _default(fields[key], start))
        for key, value in mapping.items()
    }
    missing = [f.name for f in fields.values() if start is None and f.name not in given and _is_required(f)]
    if missing:
        raise RecipeError(f"{_join(path, missing[0])} is missing: it must be given ({_name(hints[missing[0]])})")
    try:
        return cls(**given) if start is None else dataclasses.replace(start, **given)  # pyright: ignore
    except UserError as error:  # a class's own checks start with the field's name
        raise RecipeError(_join(path, str(error)), param=_join(path, error.param) if error.param else None) from error


def _unknown(cls: type, path: str, key: Any, fields: Mapping[str, Any]) -> str:
    names = getattr(cls, "RENAMED", {}) | (IN_SECTION if path else OURS)  # a class may have renamed keys of its own
    full, ours = _join(path, key), names.get(str(key), "")
    if ours.startswith("--"):
        return f"{full} is not a key. Use the option {ours}."
    if ours and has_key(cls, ours):
        return f"{full} is not a key. Did you mean {_join(path, ours)}?"
    close = did_you_mean(key, fields)
    where = f"the keys of {path}" if path else "the keys of a recipe"
    known = "" if close else f" {where[0].upper()}{where[1:]} are {', '.join(fields)}."
    hint = re.sub(r"'(.*)'", lambda m: _join(path, m[1]), close)
    return f"{full} is not a key.{hint}{known}"


def has_key(cls: type, dotted: str) -> bool:
    """Return whether settings of this class have the key, such as `lora.r`."""
    name, _, rest = dotted.partition(".")
    hint = typing.get_type_hints(cls).get(name) if name in {f.name for f in dataclasses.fields(cls) if f.init} else None
    section = section_of(hint)
    return hint is not None and (not rest or (section is not None and has_key(section, rest)))


def section_of(hint: Any) -> type | None:
    """Return the settings class of a key that is a section, also of one that may be null; None of any other key."""
    members = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    return next((member for member in members if dataclasses.is_dataclass(member)), None)  # pyright: ignore


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _is_required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _default(field: dataclasses.Field, start: Any) -> Any:
    """What the field holds when it is not given: a section given in part keeps the rest of it."""
    if start is not None:
        return getattr(start, field.name)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _convert(hint: Any, value: Any, path: str, default: Any = None) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return read(hint, value, path, default if isinstance(default, hint) else None)  # pyright: ignore
    if origin is Annotated:
        return _count(value, path)
    if origin in (typing.Union, types.UnionType):
        return _member(args, value, path, default)
    if isinstance(value, Typed):
        plain = parsed(value)
        value = value.text if hint is str and not isinstance(plain, str) else plain
    if origin is tuple:
        return _tuple(args, value, path)
    if origin is Mapping:
        return _mapping(value, path)
    if hint is Any:
        return value
    return _scalar(str if origin is typing.Literal else hint, value, path)  # the class checks the choices


def _member(args: tuple, value: Any, path: str, default: Any) -> Any:
    """Of a union, the first member that takes the value."""
    plain = parsed(value) if isinstance(value, Typed) else value
    if plain is None and type(None) in args:
        return None
    members = [a for a in args if a is not type(None)]
    if len(members) == 1:
        return _convert(members[0], value, path, default)
    for member in members:
        try:
            return _convert(member, value, path, default)
        except UserError:
            continue
    raise RecipeError(_wrong(path, " or ".join(_name(a) for a in args), plain))


def _tuple(args: tuple, value: Any, path: str) -> tuple:
    if not isinstance(value, list | tuple):
        raise RecipeError(_wrong(path, "a list", value))
    if len(args) == 2 and args[1] is Ellipsis:
        args = (args[0],) * len(value)
    if len(args) != len(value):
        raise RecipeError(_wrong(path, f"a list of {len(args)}", value))
    return tuple(_convert(a, v, f"{path}.{i}") for i, (a, v) in enumerate(zip(args, value, strict=True)))


def _mapping(value: Any, path: str) -> dict[str, Any]:
    """Keys that belong to someone else, who checks them (a reward of `rewards`): any values that YAML can hold."""
    if not isinstance(value, Mapping):
        raise RecipeError(_wrong(path, "a mapping of keys to values", value))
    for key in value:
        if not isinstance(key, str):
            raise RecipeError(f"{path} must have text as keys; got {kind_of(key)}")
    return {key: _untyped(each) for key, each in value.items()}


def _untyped(value: Any) -> Any:
    """The same value with everything that was typed at a terminal read as YAML."""
    if isinstance(value, Typed):
        return parsed(value)
    if isinstance(value, Mapping):
        return {key: _untyped(each) for key, each in value.items()}
    return [_untyped(each) for each in value] if isinstance(value, list | tuple) else value


def _scalar(hint: Any, value: Any, path: str) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, float) and math.isfinite(value) and value == int(value):
        return int(value)  # 1e9 is a float to YAML and a count to people
    if hint not in (bool, int, float, str):
        raise TypeError(f"{path}: a recipe cannot hold a {hint}")
    if type(value) is not hint:
        raise RecipeError(_wrong(path, _name(hint), value))
    return value


def _count(value: Any, path: str) -> int:
    text = value.text if isinstance(value, Typed) else str(value)
    match = re.fullmatch(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE]\+?[0-9]+)?)\s*([kKMBT]?)\s*", text)
    number = float(match[1].replace("_", "")) * _SUFFIXES[match[2]] if match else math.nan
    if isinstance(value, bool) or number != round(number, 0):
        raise RecipeError(_wrong(path, "a whole number such as 4096, 300M, 10B or 1e9", value))
    exact = match and re.fullmatch(r"[0-9_]+", match[1])
    return int(match[1].replace("_", "")) * _SUFFIXES[match[2]] if exact and match else round(number)


def read_count(text: str, name: str) -> int:
    """`4M`, `1T`: a count as a recipe has it, of an option `name`."""
    return _count(Typed(text), name)


def _wrong(path: str, expected: str, value: Any) -> str:
    return f"{path} must be {expected}; got {kind_of(value)}"


def _name(hint: Any) -> str:
    if typing.get_origin(hint) is Annotated:
        return "a whole number"
    if typing.get_origin(hint) is tuple:
        return "a list"
    plain = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}
    return plain.get(hint, getattr(hint, "__name__", str(hint)).lower())


# --- and back ---------------------------------------------------------------------------------------------------------


def differences(before: Any, after: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """(dotted key, old value, new value) wherever two settings of one class differ; values as YAML holds them."""
    found = []
    for field in dataclasses.fields(after):
        old, new, key = getattr(before, field.name), getattr(after, field.name), _join(path, field.name)
        if dataclasses.is_dataclass(new) and type(old) is type(new):
            found += differences(old, new, key)
        elif old != new:
            found.append((key, _plain(old, None), _plain(new, None)))
    return found


def dump(settings: Any) -> dict[str, Any]:
    """What differs from the defaults, as a mapping that `read` turns into the same settings."""
    return _differing(settings, None)


def whole(settings: Any) -> Any:
    """Return every key with its value, defaults included, as a mapping that `read` turns into the same settings."""
    if dataclasses.is_dataclass(settings):
        return {f.name: whole(getattr(settings, f.name)) for f in dataclasses.fields(settings) if f.init}
    if isinstance(settings, Mapping):
        return {key: whole(value) for key, value in settings.items()}
    return [whole(value) for value in settings] if isinstance(settings, tuple | list) else settings


def to_yaml(settings: Any) -> str:
    return yaml_text.write(dump(settings))


def _differing(settings: Any, default: Any) -> dict[str, Any]:
    found = {}
    for field in dataclasses.fields(settings):
        value, usual = getattr(settings, field.name), _default(field, default)
        needed = default is None and _is_required(field)
        if needed or value != usual:
            found[field.name] = _plain(value, usual)
    return found


def _plain(value: Any, usual: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return _differing(value, usual if type(usual) is type(value) else None)
    if isinstance(value, Mapping):
        return {key: _plain(each, None) for key, each in value.items()}
    return [_plain(v, None) for v in value] if isinstance(value, tuple | list) else value
