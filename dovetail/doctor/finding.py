"""One thing that was looked at, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

SEVERITIES = ("good", "note", "warning", "fault")


@dataclass(frozen=True)
class Finding:
    severity: str  # of SEVERITIES
    about: str  # what was looked at: "matmul bf16", "/dev/shm"
    found: str
    advice: str = ""  # what to do; empty where nothing is
    values: Mapping[str, float] = field(default_factory=dict)  # the numbers of it, for programs


def exit_code(findings: Iterable[Finding]) -> int:
    """0: all is well; 1: something is slower or riskier than it need be; 2: something is broken."""
    worst = max((SEVERITIES.index(one.severity) for one in findings), default=0)
    return max(0, worst - 1)
