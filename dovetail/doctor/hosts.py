"""Many hosts beside each other: what one doctor found on each, and only where they differ."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dovetail.core.errors import UserError
from dovetail.doctor.finding import Finding


def report(findings: Sequence[Finding]) -> dict[str, Any]:
    """What `--json` prints, and `--compare` reads."""
    from dataclasses import asdict

    return {"host": platform.node(), "findings": [asdict(one) | {"values": dict(one.values)} for one in findings]}


def read(path: Path) -> dict[str, Any]:
    try:
        told = json.loads(path.read_text())
        assert isinstance(told["host"], str) and all("found" in one for one in told["findings"])
    except (OSError, ValueError, KeyError, TypeError, AssertionError):
        raise UserError(f"{path} is not what `dovetail doctor --json` prints: write one on each host") from None
    return told


def differences(reports: Sequence[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """(what was looked at, what each host said) where not all said the same. Speeds differ by their nature: these are
    told apart by how severe they are."""
    rows: dict[str, list[str]] = {}
    for i, one in enumerate(reports):
        for finding in one["findings"]:
            said = finding["severity"] if finding["values"] else f"{finding['severity']}: {finding['found']}"
            rows.setdefault(finding["about"], ["-"] * len(reports))[i] = said
    return [(about, said) for about, said in rows.items() if len(set(said)) > 1]
