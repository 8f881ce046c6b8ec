"""Provide a backend whose attempts follow a script; its state is a file, so that it outlives its process."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from dovetail.jobs.backends.backend import LogPart, Observed, UnavailableError
from dovetail.jobs.job import Attempt, Resource
from dovetail.jobs.spec import Spec


class Scripted:
    """`script`: (job's name, attempt's number) -> what observe says, one after another; the last one stays. The word
    `fail` is an UnavailableError create whose resource was made all the same. `point` is called around every effect."""

    def __init__(
        self, path: Path, script: dict[tuple[str, int], list[Observed]], point: Callable[[], None] = lambda: None
    ) -> None:
        self.path, self.script, self.point = path, script, point
        self.lost_answers: set[tuple[str, int]] = set()
        self.full: set[str] = set()

    def read(self) -> dict:
        return json.loads(self.path.read_text()) if self.path.exists() else {}

    def _write(self, held: dict) -> None:
        beside = self.path.with_suffix(f".{os.getpid()}")
        beside.write_text(json.dumps(held))
        beside.replace(self.path)

    def check(self, spec: Spec) -> None:
        pass

    def create(self, attempt: Attempt) -> str:
        self.point()
        if attempt.zone in self.full:
            raise UnavailableError(f"no stock in {attempt.zone}", elsewhere=True)
        held = self.read()
        if attempt.name not in held:
            held[attempt.name] = {
                "made": 1, "looks": 0, "stopped": False, "deleted": False, "key": [attempt.spec.name, attempt.number],
                "zone": attempt.zone, "accelerator": attempt.spec.accelerator, "exclude": list(attempt.exclude),
            }  # fmt: skip
            self._write(held)
            if (attempt.spec.name, attempt.number) in self.lost_answers:
                raise UnavailableError("the answer was lost")
        elif held[attempt.name]["deleted"]:
            held[attempt.name]["made"] += 1  # made a second time after it was given back: a fault
            self._write(held)
        self.point()
        return f"h-{attempt.name}"

    def observe(self, attempt: Attempt) -> Observed:
        held = self.read()
        one = held.get(attempt.name)
        if one is None or one["deleted"]:
            return Observed("absent")
        if one["stopped"]:
            return Observed("failed", "stopped", ("h0",), 85)
        states = self.script[tuple(one["key"])]
        seen = states[min(one["looks"], len(states) - 1)]
        one["looks"] += 1
        self._write(held)
        return seen

    def stop(self, attempt: Attempt, grace: float) -> None:
        self.point()
        held = self.read()
        held[attempt.name]["stopped"] = True
        self._write(held)
        self.point()

    def delete(self, resource: Resource) -> None:
        self.point()
        held = self.read()
        if resource.name in held:
            held[resource.name]["deleted"] = True
            self._write(held)
        self.point()

    def list(self) -> Sequence[Resource]:
        return [Resource(name) for name, one in self.read().items() if not one["deleted"]]

    def logs(self, attempt: Attempt, rank: int, since: int = 0) -> LogPart:
        return LogPart("", since)

    def command(self, attempt: Attempt, rank: int) -> list[str]:
        return ["true"]
