"""The checks of `dovetail doctor`: what was found on this machine, and the comparison of several hosts."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dovetail.core.errors import FileError

SEVERITIES = ("good", "note", "warning", "fault")


@dataclass(frozen=True)
class Finding:
    """Hold the result of one check."""

    severity: str  # of SEVERITIES
    about: str  # what was checked: "matmul bf16", "/dev/shm"
    found: str
    advice: str = ""  # what to do; "" if there is nothing to do
    values: Mapping[str, float] = field(default_factory=dict)  # its numbers, for programs


def exit_code(findings: Iterable[Finding]) -> int:
    """Return 0 if everything is well, 1 after a warning, 2 after a fault."""
    worst = max((SEVERITIES.index(one.severity) for one in findings), default=0)
    return max(0, worst - 1)


def report(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return what `--json` prints and `--compare` reads."""
    return {"host": platform.node(), "findings": [asdict(one) | {"values": dict(one.values)} for one in findings]}


def read_report(path: Path) -> dict[str, Any]:
    """Read a file that `dovetail doctor --json` wrote."""
    try:
        found = json.loads(path.read_text())
        assert isinstance(found["host"], str) and all("found" in one for one in found["findings"])
    except (OSError, ValueError, KeyError, TypeError, AssertionError):
        raise FileError(
            f"{path} is not the output of `dovetail doctor --json`: write one on each host", param="--compare"
        ) from None
    return found


def differences(reports: Sequence[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """Return (what was checked, the result of each host) where hosts differ.

    Of measurements only the severities are compared, because speeds always differ.
    """
    rows: dict[str, list[str]] = {}
    for i, one in enumerate(reports):
        for finding in one["findings"]:
            result = finding["severity"] if finding["values"] else f"{finding['severity']}: {finding['found']}"
            rows.setdefault(finding["about"], ["-"] * len(reports))[i] = result
    return [(about, result) for about, result in rows.items() if len(set(result)) > 1]
