"""Put overrides into a recipe: `optimizer.lr=1e-3` from a terminal, `{"data.seed": 1}` from a program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from dovetail.core import yaml_text
from dovetail.core.errors import RecipeError


@dataclass(frozen=True)
class Typed:
    """Hold the text of a value; the type of its key decides what it means (007 may be a folder)."""

    text: str


def split(text: str) -> tuple[list[str], Typed]:
    """Split `a.0.b=value` into (["a", "0", "b"], value)."""
    key, equals, value = text.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise RecipeError(f"an override is key=value with a dotted key, such as optimizer.lr=1e-3; got {text!r}")
    return path, Typed(value)


def flat(overrides: Mapping[str, Any], path: Sequence[str] = ()) -> list[tuple[list[str], Any]]:
    """Return a program's overrides as (path, value); a nested mapping changes only the keys that it names."""
    found = []
    for key, value in overrides.items():
        at = [*path, *key.split(".")]
        found += flat(value, at) if isinstance(value, Mapping) else [(at, _text_of_path(value))]
    return found


def _text_of_path(value: Any) -> Any:
    return str(value) if isinstance(value, PurePath) else value


def place(mapping: Mapping[str, Any], pairs: Iterable[tuple[list[str], Any]]) -> dict[str, Any]:
    """Return a copy of the mapping with each value at its path."""
    tree = _copied(dict(mapping))
    for path, value in pairs:
        _put(tree, path, value)
    return tree


def _copied(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {k: _copied(v) for k, v in tree.items()}
    return [_copied(v) for v in tree] if isinstance(tree, list) else tree


def _put(tree: dict, path: list[str], value: Any) -> None:
    node: Any = tree
    for depth, part in enumerate(path[:-1]):
        key = _key(node, part, path[:depth])
        below = node[key] if isinstance(node, list) else node.get(key)
        below = parsed(below) if isinstance(below, Typed) else below
        if below is None:
            below = [] if path[depth + 1].isdecimal() else {}
        if not isinstance(below, dict | list):
            here = ".".join(path[: depth + 1])
            whole = ".".join(path)
            raise RecipeError(f"{whole} is not a key: {here} is {kind_of(below)}, which has no keys", param=whole)
        node[key] = below
        node = below
    node[_key(node, path[-1], path[:-1])] = value


def _key(node: dict | list, part: str, path: list[str]) -> Any:
    """Return a key, or an index into a list; one past the list's end adds an element."""
    if isinstance(node, dict):
        return part
    at = ".".join(path)
    if not part.isdecimal():
        raise RecipeError(f"{at} is a list: use an index, such as {at}.0; got {at}.{part}", param=at)
    if int(part) > len(node):
        end = len(node)
        raise RecipeError(f"{at}.{part} is past the end of {at}, which has {end}: {at}.{end} adds one", param=at)
    if int(part) == len(node):
        node.append(None)
    return int(part)


def parsed(value: Typed) -> Any:
    """Return the value read as YAML; empty text stays empty text."""
    return yaml_text.parse(value.text) if value.text else ""


_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def kind_of(value: Any) -> str:
    """Describe a value and its type, for a message."""
    if isinstance(value, Typed):
        value = value.text
    if value is None:
        return "nothing (null)"
    if isinstance(value, dict):
        return "a mapping (" + ", ".join(map(str, value)) + ")"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    return f"{value!r} ({_NAMES.get(type(value), type(value).__name__)})"
