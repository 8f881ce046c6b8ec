"""A reward for code that works: the completion's program passes the row's tests, in the sandbox."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from dovetail.core.choice import not_negative, one_of
from dovetail.core.errors import UserError
from dovetail.tune.rl.rewards.deadline import seconds_left
from dovetail.tune.rl.rewards.sandbox import Limits, require_isolation, run_python
from dovetail.tune.rl.rewards.scored import NoReward
from dovetail.tune.rl.rewards.text import block_of, text_of

PYTHON = ("python", "py", "python3")


@dataclass(frozen=True)
class Code:
    """The share of a row's tests that the completion's last block of Python passes; or 1 where it passes all, else 0.

    A row's tests are a list of statements (`assert f(2) == 4`), each run after the program, in its names; one text of
    them, which counts as one; or a list of {"input": ..., "output": ...}: what the program reads, and what it must
    print. JSON text of such a list will do. What is printed, and the value in `assert EXPRESSION == LITERAL`, is
    compared outside of the program's process; any other statement runs within it and can be forged (see `checks.py`).
    """

    column: str = "tests"
    score: str = "share"
    program_seconds: float = 5.0  # and the limits of sandbox.Limits
    memory: int = 512
    packages: bool = False
    isolation: str = "kernel"
    threads: int = 0  # programs at a time; 0: as many as this machine has cores

    def __post_init__(self) -> None:
        one_of("score", self.score, ("share", "all"))
        not_negative(self, "threads")
        require_isolation(self.limits)

    @property
    def limits(self) -> Limits:
        return Limits(self.program_seconds, self.memory, packages=self.packages, isolation=self.isolation)

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    def __call__(self, prompts: list, completions: list, **columns: list) -> list[float | NoReward | None]:
        one = partial(self._one, time.monotonic() + seconds_left())
        with ThreadPoolExecutor(self.threads or os.cpu_count() or 1) as threads:
            return list(threads.map(one, completions, columns[self.column]))

    def _one(self, end: float, completion: Any, tests: Any) -> float | NoReward | None:
        try:
            tests = _tests(tests)
        except ValueError as error:  # one bad row does not cost the others
            return NoReward("tests", str(error))
        if not tests:
            return None
        try:
            passed = self._passed(block_of(text_of(completion), *PYTHON), tests, end)
        except Exception as error:  # this machine's trouble or a fault of ours; the other rows keep their rewards
            return NoReward("sandbox", f"{type(error).__name__}: {error}")
        if passed is None:
            return NoReward("time", "no time was left to run its program")
        return sum(passed) / len(passed) if self.score == "share" else float(all(passed))

    def _passed(self, program: str, tests: list[str] | list[Mapping], end: float) -> list[bool] | None:
        """Of each test; None where the reward's time limit comes before the program's."""
        passed: list[bool] = []
        statements = [test for test in tests if isinstance(test, str)]
        for test in [None] if statements else tests:
            if time.monotonic() + self.program_seconds > end:
                return None
            if isinstance(test, Mapping):
                ran = run_python(program, stdin=str(test["input"]), limits=self.limits)
                passed.append(ran.ok and _lines(ran.stdout) == _lines(str(test["output"])))
            else:
                passed += run_python(program, tests=statements, limits=self.limits).passed
        return passed


def _tests(given: Any) -> list[Any]:
    """A row's tests as a list; ValueError where they are of no form that is known."""
    if isinstance(given, str):
        given = _of_text(given)
    tests = list(given or ())
    wrong = [test for test in tests if not isinstance(test, str) and not _is_pair(test)]
    if wrong or len({isinstance(test, str) for test in tests}) > 1:
        raise UserError(
            "tests must be statements, or pairs of input and output, all of one kind; got "
            f"{str((wrong or tests)[0])[:80]!r}"
        )
    return tests


def _of_text(text: str) -> Sequence[Any]:
    if text.lstrip().startswith("["):
        try:
            found = json.loads(text)
        except ValueError:
            return [text]
        return found if isinstance(found, list) else [text]
    return [text] if text.strip() else []


def _is_pair(test: Any) -> bool:
    return isinstance(test, Mapping) and {"input", "output"} <= test.keys()


def _lines(text: str) -> list[str]:
    """Without spaces at the ends of lines and empty lines at the end of the text."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
