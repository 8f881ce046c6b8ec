"""Where a step's seconds went, where it does more than train: `rollout_seconds` beside `seconds` is such a part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

PART = "_seconds"
REST = "train"


def parts(line: Mapping[str, Any]) -> dict[str, float]:
    """What a line says that they went to, by name."""
    return {name.removesuffix(PART): value for name, value in line.items() if name.endswith(PART) and value is not None}


def split(line: Mapping[str, Any]) -> dict[str, float]:
    """All of a line's `seconds`; empty where it names no part of them. Parts that ran beside the training can be more
    than all of them together."""
    named = parts(line)
    return named | {REST: max(0.0, line["seconds"] - sum(named.values()))} if named and "seconds" in line else {}


def added(lines: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The parts of several steps together, as a line names them."""
    total: dict[str, float] = {}
    for line in lines:
        for name, seconds in parts(line).items():
            total[name + PART] = total.get(name + PART, 0.0) + seconds
    return total
