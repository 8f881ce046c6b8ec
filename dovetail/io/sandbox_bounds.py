"""Bound the results of single operations of a chat template: text of MAX_TEXT characters, lists of MAX_ITEMS.

Each check computes the size of a result before it is made, from the sizes of its parts. A value that holds another many
times counts it as often: a list of lists of lists that takes no memory may be gigabytes as text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from string import Formatter
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

MAX_TEXT = 1 << 26
MAX_ITEMS = 1 << 21
MAX_PARTS = 1 << 19  # values within a value that is written as text
MAX_WIDTH = 100_000
_CONTAINERS = (list, tuple, set, frozenset)


def check_size(size: float, most: float = MAX_TEXT) -> None:
    """Raise SecurityError if the size is above the bound."""
    if size > most:
        raise SecurityError(f"a result of more than {most:,} characters or items")


def check_text(*values: Any) -> int:
    """Return the approximate length of these values as text; raise SecurityError if that is too long."""
    size, count, rest = 0, 0, list(values)
    while rest:
        value = rest.pop()
        count += 1
        size += 4
        if isinstance(value, str | bytes):
            size += len(value)
        elif isinstance(value, Mapping):
            rest += (*value.keys(), *value.values())
        elif isinstance(value, _CONTAINERS):
            rest += value
        elif isinstance(value, Namespace):
            rest.append(vars(value))
        if size > MAX_TEXT or count + len(rest) > MAX_PARTS:
            check_size(size)
            raise SecurityError(f"text of a value with more than {MAX_PARTS:,} parts")
    return size


def bounded(items: Iterable[Any], between: Any = "") -> Iterator[Any]:
    """Yield the items until they, with the text between them, are too long."""
    size = 0
    for item in items:
        size += len(item) + len(between) if type(item) is str else check_text(item, between)
        check_size(size)
        yield item


def check_widths(args: Iterable[Any]) -> None:
    """Refuse arguments that would pad a text beyond the bound."""
    for value in args:
        if isinstance(value, int) and abs(value) > MAX_WIDTH:
            raise SecurityError(f"a width of {value:,} (at most {MAX_WIDTH:,})")


def check_repeat(left: Any, right: Any) -> None:
    """Check `left * right`, of numbers, text or lists."""
    check_size(
        _count(left) * _count(right), MAX_ITEMS if isinstance(left, list) or isinstance(right, list) else MAX_TEXT
    )


def check_sum(left: Any, right: Any) -> None:
    """Check `left + right`."""
    if isinstance(left, str | bytes):
        check_size(len(left) + _count(right))
    elif isinstance(left, _CONTAINERS):
        check_size(len(left) + _count(right), MAX_ITEMS)


def check_power(base: Any, exponent: Any) -> None:
    """Check `base ** exponent`."""
    if _count(base) > MAX_TEXT or abs(exponent) > 64:
        raise SecurityError("a power of numbers this large")


def _count(value: Any) -> int | float:
    if isinstance(value, int | float):
        return 1 if isinstance(value, bool) else abs(value)
    return len(value) if hasattr(value, "__len__") else 1


def check_percent(text: Any, values: Any) -> None:
    """Check `text % values`: every field may be a value, or as wide as it says."""
    fields = re.findall(r"%[^%a-zA-Z]*", text if isinstance(text, str) else text.decode("latin-1"))
    if any(re.search(r"\d{6}|\*", field) for field in fields):
        raise SecurityError("a format with a field this wide")
    check_size(len(text) + len(fields) * check_text(values) + sum(map(_widths, fields)))


def check_format(text: str, values: Any) -> None:
    """Check `text.format(values)` in the same way."""
    specs = [spec or "" for _, name, spec, _ in Formatter().parse(text) if name is not None]
    if any(re.search(r"\d{6}|\{", spec) for spec in specs):
        raise SecurityError("a format with a field this wide, or of a width that is itself a field")
    check_size(len(text) + len(specs) * check_text(values) + sum(map(_widths, specs)))


def _widths(spec: str) -> int:
    return sum(map(int, re.findall(r"\d+", spec)))


def check_replace(text: Any, old: Any, new: Any, count: int | None = -1) -> None:
    """Check `text.replace(old, new, count)`."""
    found = text.count(old) if old else len(text) + 1
    found = found if count is None or count < 0 else min(found, count)
    check_size(len(text) + found * len(new))


def _check_tabs(text: Any, tabsize: int = 8) -> None:
    check_size(len(text) + text.count("\t" if isinstance(text, str) else b"\t") * tabsize)


def _check_translate(text: Any, table: Any, *_: Any) -> None:
    longest = max((_count(each) for each in table.values() if isinstance(each, str)), default=1) if table else 1
    check_size(len(text) * longest)


# Methods of str and bytes that may make more than they are given, besides widths.
METHODS: dict[str, Callable[..., None]] = {
    "replace": check_replace,
    "expandtabs": _check_tabs,
    "translate": _check_translate,
}
