"""A reward for working code: run the completion's program against the row's tests, in the sandbox."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from dovetail.core.choice import not_negative, one_of, require
from dovetail.core.errors import UserError
from dovetail.tune.rl.rewards.completion import NoReward, block_of, text_of
from dovetail.tune.rl.rewards.sandbox import Limits, require_isolation, run_python
from dovetail.tune.rl.rewards.worker import seconds_left

PYTHON = ("python", "py", "python3")


@dataclass(frozen=True)
class CodeReward:
    """Give the share of a row's tests that the completion's last Python block passes.

    The tests of a row are a list of statements (`assert f(2) == 4`), each run after the program in its namespace; one
    text of statements, which counts as one test; or a list of {"input": ..., "output": ...}: the program's standard
    input and its expected output. JSON text of such a list is also read. The output, and the value in `assert
    EXPRESSION == LITERAL`, is compared outside of the program's process. Any other statement runs within it and can be
    forged: see `checks.py`.

    Attributes:
        column: The column that holds the tests.
        score: share: the share of tests that pass. all: 1 if all pass, else 0.
        program_seconds: Time limit of a program; see `sandbox.Limits` for this and the next three.
        memory: MB of address space.
        packages: Whether the program may import installed packages.
        isolation: kernel or any.
        threads: Programs at a time; 0: as many as this machine has cores.
    """

    column: str = "tests"
    score: str = "share"
    program_seconds: float = 5.0
    memory: int = 512
    packages: bool = False
    isolation: str = "kernel"
    threads: int = 0

    def __post_init__(self) -> None:
        one_of("score", self.score, ("share", "all"))
        not_negative(self, "threads")
        seconds = self.program_seconds
        require(seconds > 0, f"program_seconds must be above 0; got {seconds}", param="program_seconds")
        require_isolation(self.limits)

    @property
    def limits(self) -> Limits:
        """The limits of a program."""
        return Limits(self.program_seconds, self.memory, packages=self.packages, isolation=self.isolation)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it reads."""
        return (self.column,)

    def __call__(self, prompts: list, completions: list, **columns: list) -> list[float | NoReward | None]:
        """Return the reward of each completion."""
        score = partial(self._score, time.monotonic() + seconds_left())
        with ThreadPoolExecutor(self.threads or os.cpu_count() or 1) as threads:
            return list(threads.map(score, completions, columns[self.column]))

    def _score(self, end: float, completion: Any, tests: Any) -> float | NoReward | None:
        try:
            tests = _tests(tests)
        except ValueError as error:  # the other rows keep their rewards
            return NoReward("tests", str(error))
        if not tests:
            return None
        try:
            passed = self._passed(block_of(text_of(completion), *PYTHON), tests, end)
        except Exception as error:  # a fault of this machine or of ours; the other rows keep their rewards
            return NoReward("sandbox", f"{type(error).__name__}: {error}")
        if passed is None:
            return NoReward("time", "no time was left to run the program")
        return sum(passed) / len(passed) if self.score == "share" else float(all(passed))

    def _passed(self, program: str, tests: list[str] | list[Mapping], end: float) -> list[bool] | None:
        """Return whether each test passed; None if the reward's time limit ends before the program's."""
        passed: list[bool] = []
        statements = [test for test in tests if isinstance(test, str)]
        for test in [None] if statements else tests:
            if time.monotonic() + self.program_seconds > end:
                return None
            if isinstance(test, Mapping):
                result = run_python(program, stdin=str(test["input"]), limits=self.limits)
                passed.append(result.ok and _lines(result.stdout) == _lines(str(test["output"])))
            else:
                passed += run_python(program, tests=statements, limits=self.limits).passed
        return passed


def _tests(given: Any) -> list[Any]:
    """Return a row's tests as a list."""
    if isinstance(given, str):
        given = _parsed(given)
    tests = list(given or ())
    wrong = [test for test in tests if not isinstance(test, str) and not _is_pair(test)]
    if wrong or len({isinstance(test, str) for test in tests}) > 1:
        raise UserError(
            "tests must be statements, or pairs of input and output, all of one kind; got "
            f"{str((wrong or tests)[0])[:80]!r}",
            param="tests",
        )
    return tests


def _parsed(text: str) -> Sequence[Any]:
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
    """Return the lines without trailing spaces and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
