"""Rewards: the functions that score completions, called in worker processes with a time limit.

    with Rewards([my_reward, {"kind": "number", "column": "answer"}]) as rewards:
        scored = rewards.score(prompts, completions, {"answer": answers})

A function that raises, hangs, dies, or returns what are no rewards costs its own values, never the step: they are None,
and `problems` says why.
"""

from __future__ import annotations

import math
import queue
import threading
import warnings
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from dovetail.core.choice import require
from dovetail.core.errors import UserError
from dovetail.tune.rl.failures import traceback_of
from dovetail.tune.rl.rewards import worker_process
from dovetail.tune.rl.rewards.reward import Reward, reward_of
from dovetail.tune.rl.rewards.scored import NoReward, Problem, Scored, scored_of
from dovetail.tune.rl.rewards.worker import Failed, Worker, forms_of
from dovetail.tune.rl.rewards.worker_process import call, told

Values = list[float | NoReward | None]
USELESS = ("time", "died")  # after these a worker is replaced


@dataclass(frozen=True)
class _Rows:
    prompts: list
    completions: list
    columns: dict[str, list]


class Rewards:
    """`workers` processes call the functions; one call may take `seconds`, unless its reward says otherwise.

    A reward model (`in_process`) runs in this process, on the thread that calls `score`. So does, on a thread of its
    own and without a time limit, a function that cannot be sent to another process.
    """

    def __init__(self, rewards: Sequence[Any], workers: int = 2, seconds: float = 60.0):
        require(workers >= 1, f"workers must be 1 or more; got {workers}")
        require(0 < seconds < math.inf, f"seconds must be above 0; got {seconds}")
        self.rewards: tuple[Reward, ...] = tuple(reward_of(one) for one in rewards)
        self.seconds, self._workers = seconds, workers
        _check_names([reward.name for reward in self.rewards])
        self._forms = [_forms(reward) for reward in self.rewards]
        self._problems: dict[tuple[int, str, str], Problem] = {}
        self._lock = threading.Lock()
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self._all: set[Worker] = set()
        self._threads: ThreadPoolExecutor | None = None
        self._here: ThreadPoolExecutor | None = None

    # --- from start to end --------------------------------------------------------------------------------------------

    def __enter__(self) -> Rewards:
        require(self._threads is None, "these rewards are open already; make others for a second use at the same time")
        self._threads = ThreadPoolExecutor(self._workers, thread_name_prefix="reward")
        self._here = ThreadPoolExecutor(1, thread_name_prefix="reward-here")
        for _ in range(self._workers if any(self._forms) else 0):
            self._idle.put(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the workers with all that they have started. A call that runs ends as a None; one that waits is
        cancelled.
        """
        with self._lock:
            threads, here, workers = self._threads, self._here, self._all
            self._threads, self._here, self._all = None, None, set()
        if threads is None or here is None:
            return
        for worker in workers:
            worker.kill()
        threads.shutdown(wait=True, cancel_futures=True)
        here.shutdown(wait=False, cancel_futures=True)  # what hangs here cannot be ended
        for worker in workers:
            worker.close()
        self._idle = queue.SimpleQueue()

    def _start(self) -> Worker:
        worker = Worker(self._forms)
        with self._lock:
            closed = self._threads is None
            if not closed:
                self._all.add(worker)
        if closed:
            worker.close()
        return worker

    # --- scoring ------------------------------------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(reward.name for reward in self.rewards)

    @property
    def problems(self) -> list[Problem]:
        """What went wrong so far, each with the number of rows that it cost, in the order of the rewards."""
        with self._lock:
            return [problem for _, problem in sorted(self._problems.items())]

    def check(self, columns: Collection[str]) -> None:
        """ValueError where a reward asks for a column that the data has not."""
        for reward in self.rewards:
            reward.check(columns)

    def score(
        self, prompts: Sequence, completions: Sequence, columns: Mapping[str, Sequence] | None = None
    ) -> list[Scored]:
        """One Scored for each row, in their order."""
        rows = _rows(prompts, completions, columns)
        own = [i for i, reward in enumerate(self.rewards) if _stays(reward)]
        waiting = {i: self._begin(i, rows) for i in range(len(self.rewards)) if i not in own}
        found = {i: self._values(i, rows) for i in own}
        found |= {i: future.result() for i, future in waiting.items()}
        return self._scored(rows, [found[i] for i in range(len(self.rewards))])

    def submit(
        self, prompts: Sequence, completions: Sequence, columns: Mapping[str, Sequence] | None = None
    ) -> Future[list[Scored]]:
        """As `score`, at once and without waiting. A reward model then runs on a thread of its own."""
        rows = _rows(prompts, completions, columns)
        return _gathered(
            [self._begin(i, rows) for i in range(len(self.rewards))], lambda values: self._scored(rows, values)
        )

    def _begin(self, index: int, rows: _Rows) -> Future[Values]:
        threads = self._threads if self._forms[index] else self._here
        if threads is None:
            raise UserError("these rewards are closed; use them within `with Rewards(...) as rewards:`")
        return threads.submit(self._values, index, rows)

    def _values(self, index: int, rows: _Rows) -> Values:
        """Of one reward, as many as there are rows: a float, or why there is none."""
        reward, count = self.rewards[index], len(rows.completions)
        if not count:
            return []
        if missing := reward.arguments.missing(rows.columns):
            return [NoReward("column", f"it needs the column {missing[0]!r}")] * count
        try:
            return _checked(self._call(index, rows), count)
        except Failed as failed:
            return [NoReward(failed.kind, failed.message, failed.trace)] * count

    def _call(self, index: int, rows: _Rows) -> Any:
        reward = self.rewards[index]
        positional, named = reward.arguments.bind(rows.prompts, rows.completions, rows.columns)
        seconds = reward.seconds or self.seconds
        if self._forms[index]:
            return self._call_worker(index, positional, named, seconds)
        try:
            return call(reward.function, positional, named, seconds)
        except Exception as error:
            raise Failed("raised", told(error), traceback_of(error, __file__, worker_process.__file__)) from None

    def _call_worker(self, index: int, positional: list, named: dict[str, Any], seconds: float) -> Any:
        worker = self._idle.get()  # there are as many as threads
        try:
            return worker.call(index, positional, named, seconds)
        except Failed as failed:
            if failed.kind in USELESS:
                worker = self._replaced(worker)
            raise
        finally:
            self._idle.put(worker)

    def _replaced(self, worker: Worker) -> Worker:
        with self._lock:
            if worker not in self._all:  # they are being closed
                return worker
            self._all.remove(worker)
        worker.close()
        return self._start()

    def _scored(self, rows: _Rows, found: list[Values]) -> list[Scored]:
        weights = {reward.name: reward.weight for reward in self.rewards}
        scored = []
        for row in range(len(rows.completions)):
            values = dict(zip(self.names, (column[row] for column in found), strict=True))
            errors = {name: f"{v.kind}: {v.message}" for name, v in values.items() if isinstance(v, NoReward)}
            numbers = {name: None if isinstance(v, NoReward) else v for name, v in values.items()}
            scored.append(scored_of(numbers, weights, errors))
        self._record(found)
        return scored

    def _record(self, found: list[Values]) -> None:
        with self._lock:
            for index, column in enumerate(found):
                for value in column:
                    if isinstance(value, NoReward):
                        self._count(index, value)

    def _count(self, index: int, row: NoReward) -> None:
        name, key = self.rewards[index].name, (index, row.kind, row.message)
        before = self._problems.get(key) or Problem(name, row.kind, row.message, 0, row.trace)
        self._problems[key] = replace(before, count=before.count + 1)


def _check_names(names: list[str]) -> None:
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise UserError(f"two rewards are called {twice!r}; give one of them a name of its own")


def _stays(reward: Reward) -> bool:
    return getattr(reward.function, "in_process", False)


def _forms(reward: Reward) -> list[bytes]:
    """How it travels to a worker; none where it stays here."""
    if _stays(reward):
        return []
    forms = forms_of(reward.function)
    if not forms:
        warnings.warn(
            f"the reward {reward.name!r} cannot be sent to another process and runs in this one, where its time limit "
            "cannot be enforced; put it in a module, or install cloudpickle",
            stacklevel=3,
        )
    return forms


def _rows(prompts: Sequence, completions: Sequence, columns: Mapping[str, Sequence] | None) -> _Rows:
    rows = _Rows(list(prompts), list(completions), {name: list(values) for name, values in (columns or {}).items()})
    for name, values in {"prompts": rows.prompts, **rows.columns}.items():
        if len(values) != len(rows.completions):
            raise UserError(
                f"{name} must have a value for each of the {len(rows.completions)} completions; got {len(values)}"
            )
    return rows


def _checked(returned: Any, count: int) -> Values:
    if not isinstance(returned, list):
        raise Failed("type", f"it must return a list of numbers; it returned a {type(returned).__name__}")
    if len(returned) != count:
        raise Failed("length", f"it must return a number for each of {count} completions; it returned {len(returned)}")
    return [_value(value) for value in returned]


def _value(value: Any) -> float | NoReward | None:
    if value is None or isinstance(value, NoReward):
        return value
    try:
        number = float(value) if not isinstance(value, str | bytes) else None
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None:
        return NoReward("type", f"a reward must be a number or None; it returned a {type(value).__name__}")
    return number if math.isfinite(number) else NoReward("nan", f"a reward must be finite; it returned {number}")


def _gathered(futures: list[Future[Values]], make: Any) -> Future[list[Scored]]:
    """What `make` makes of all their results, once the last is there; cancelled where one of them is."""
    result: Future[list[Scored]] = Future()
    left, lock = len(futures), threading.Lock()

    def finish() -> None:
        if any(future.cancelled() for future in futures):
            result.cancel()
            result.set_running_or_notify_cancel()  # tells those who wait for it
        elif result.set_running_or_notify_cancel():
            try:
                result.set_result(make([future.result() for future in futures]))
            except BaseException as error:
                result.set_exception(error)

    def one_done(_: Future) -> None:
        nonlocal left
        with lock:
            left -= 1
            last = not left
        if last:
            finish()

    for future in futures:
        future.add_done_callback(one_done)
    if not futures:
        finish()
    return result
