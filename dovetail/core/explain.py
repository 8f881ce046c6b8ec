"""List the keys of a recipe with value, default and meaning, for `--show-config`.

The meaning of a key is the comment beside or above it in the class that declares it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dovetail.core import yaml_text
from dovetail.core.option import options_of
from dovetail.core.recipe import key_fields, section_of, whole

REQUIRED, OFF = "(required)", "-"  # in place of a default; in place of the value of a key whose section is not set
_FIELD = re.compile(r"    (\w+): .*?(?:  # (.*))?")


@dataclass(frozen=True)
class Key:
    """Describe one key of a recipe."""

    name: str  # dotted
    value: str
    default: str
    meaning: str

    @property
    def is_set(self) -> bool:
        """Return whether the value differs from the default."""
        return self.value not in (self.default, OFF)


def explained(cls: type, settings: Any = None) -> list[Key]:
    """Return the keys of a settings class with the values of `settings`, or with the defaults."""
    return list(_keys(cls, settings, None, "", settings is None))


def _keys(cls: type, values: Any, defaults: Any, path: str, unset: bool) -> Iterator[Key]:
    """Yield the keys of `cls`.

    `values` and `defaults` are instances of it or None, and `unset` means no values were given.
    """
    hints, texts = typing.get_type_hints(cls), meanings(cls)
    for field in key_fields(cls):
        name, section = path + field.name, section_of(hints[field.name])
        default = getattr(defaults, field.name) if defaults is not None else _default(field)
        value = getattr(values, field.name) if values is not None else default if unset else OFF
        is_text = str in typing.get_args(hints[field.name]) and not dataclasses.is_dataclass(value)
        if section is None or is_text:  # a model is a name, or a section
            shown = OFF if value is OFF else REQUIRED if value is dataclasses.MISSING else _text(value)
            yield Key(name, shown, REQUIRED if default is dataclasses.MISSING else _text(default), texts[field.name])
            continue
        given = value if dataclasses.is_dataclass(value) else None
        usual = default if dataclasses.is_dataclass(default) else None
        yield from _keys(section, given, usual, f"{name}.", unset=False)


def _default(field: dataclasses.Field) -> Any:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def _text(value: Any) -> str:
    """Return the value as YAML on one line."""
    plain = whole(value)
    return yaml_text.write_inline(plain) if isinstance(plain, list | dict | str) or plain is None else _number(plain)


def _number(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


@functools.cache
def meanings(cls: type) -> dict[str, str]:
    """Return the comment of each field, from the class that declared it last."""
    found = {field.name: "" for field in dataclasses.fields(cls)}
    for each in reversed(cls.__mro__):
        if dataclasses.is_dataclass(each):
            found |= {name: text for name, text in _comments(each).items() if text and name in found}
            found |= {name: option.help for name, option in options_of(each).items()}
    return found


def _comments(cls: type) -> dict[str, str]:
    found, above = {}, []
    for line in inspect.getsource(cls).splitlines():
        if line.startswith("    # "):
            above.append(line[6:])
        elif match := _FIELD.fullmatch(line):
            found[match[1]] = match[2] or " ".join(above)
            above = []
        else:
            above = []
    return found
