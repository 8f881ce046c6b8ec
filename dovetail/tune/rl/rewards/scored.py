"""What the rewards said of a completion, and what went wrong on the way."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class NoReward:
    """In place of a row's value: None, with why."""

    kind: str  # a word
    message: str
    trace: str = ""  # the traceback, where an exception was the reason


@dataclass(frozen=True)
class Problem:
    reward: str
    # raised, time, died, load, column, length, type, nan; or what a reward's NoReward says
    kind: str
    message: str
    count: int = 1  # rows
    trace: str = ""  # the first one's


@dataclass(frozen=True)
class Scored:
    values: dict[str, float | None]  # of each reward; None: it does not apply, or it failed
    total: float | None  # their sum by weight, without those that are None; None where all are
    errors: dict[str, str] = field(default_factory=dict)  # of those that failed, why


def scored_of(values: Mapping[str, float | None], weights: dict[str, float], errors: dict[str, str]) -> Scored:
    found = [weights[name] * value for name, value in values.items() if value is not None]
    return Scored(dict(values), sum(found) if found else None, errors)


def metrics_of(scored: Sequence[Scored]) -> dict[str, float]:
    """For each reward its mean and standard deviation over the rows it applies to, and the share of rows without."""
    found: dict[str, float] = {}
    columns = {name: [row.values[name] for row in scored] for name in (scored[0].values if scored else ())}
    for name, column in {"total": [row.total for row in scored], **columns}.items():
        values = [value for value in column if value is not None]
        prefix = "reward" if name == "total" else f"reward/{name}"
        if values:
            found[prefix], found[f"{prefix}/std"] = statistics.fmean(values), statistics.pstdev(values)
        if column:
            found[f"{prefix}/missing"] = 1 - len(values) / len(column)
    return found
