"""Hosts whose hardware computed wrong, as a run's health.jsonl names them (train/guard/doctor.py writes it)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from dovetail.jobs.attempt import Attempt
from dovetail.jobs.job import Try

FILE = "health.jsonl"


def hosts_at_fault(attempt: Attempt, row: Try) -> Iterator[tuple[str, str]]:
    """(host, reason) found during this attempt."""
    path = attempt.home / "run" / FILE
    if not path.is_file():
        return
    for line in path.read_text().splitlines():
        found = _record(line)
        if found.get("what") == "quarantine" and found.get("time", 0.0) >= row.created:
            for host in found.get("at_fault", {}).get("hosts", ()):
                yield str(host), str(found.get("reason", ""))


def _record(line: str) -> dict[str, Any]:
    """A line that a full disk cut short is passed over."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
