"""Rewards: call the functions that score completions, in worker processes with a time limit.

    with Rewards([my_reward, {"kind": "number", "column": "answer"}]) as rewards:
        scored = rewards.score(prompts, completions, {"answer": answers})

A function that raises, hangs, dies or returns anything but rewards loses its own values, never the step: they are None,
and `problems` has the reasons.
"""

from __future__ import annotations

import math
import queue
import threading
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from dovetail.core.choice import require
from dovetail.core.errors import UserError
from dovetail.tune.rl.failures import describe, traceback_of
from dovetail.tune.rl.rewards import worker as worker_module
from dovetail.tune.rl.rewards.completion import NoReward, Problem, Scored
from dovetail.tune.rl.rewards.reward import RewardFunction, reward_of
from dovetail.tune.rl.rewards.worker import RewardFailure, Worker, call, pickled_forms

Values = list[float | NoReward | None]
REPLACED_AFTER = ("time", "died")  # kinds of failures after which a worker is replaced


@dataclass(frozen=True)
class _Rows:
    prompts: list
    completions: list
    columns: dict[str, list]


class Rewards:
    """A pool of worker processes that call reward functions.

    A reward model (`in_process`) runs in this process, on the thread that calls `score`. A function that cannot be
    pickled runs in this process too, on a thread of its own and without a time limit.

    Args:
        rewards: Functions, RewardFunctions or mappings: see `reward_of`.
        workers: Processes.
        seconds: Time limit of a call, for the rewards without one of their own.
    """

    def __init__(self, rewards: Sequence[Any], workers: int = 2, seconds: float = 60.0):
        require(workers >= 1, f"workers must be 1 or more; got {workers}", param="workers")
        require(0 < seconds < math.inf, f"seconds must be above 0; got {seconds}", param="seconds")
        self.rewards: tuple[RewardFunction, ...] = tuple(reward_of(each) for each in rewards)
        self.seconds, self._workers = seconds, workers
        _check_names([reward.name for reward in self.rewards])
        self._forms = [_forms(reward) for reward in self.rewards]
        self._problems: dict[tuple[int, str, str], Problem] = {}
        self._lock = threading.Lock()
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self._all: set[Worker] = set()
        self._threads: ThreadPoolExecutor | None = None
        self._local_thread: ThreadPoolExecutor | None = None

    # --- start and end ------------------------------------------------------------------------------------------------

    def __enter__(self) -> Rewards:
        if self._threads is not None:
            raise UserError("these rewards are already open: create another pool for a second use")
        self._threads = ThreadPoolExecutor(self._workers, thread_name_prefix="reward")
        self._local_thread = ThreadPoolExecutor(1, thread_name_prefix="reward-local")
        for _ in range(self._workers if any(self._forms) else 0):
            self._idle.put(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the workers and their child processes.

        A running call ends with None; a waiting call is cancelled.
        """
        with self._lock:
            threads, local, workers = self._threads, self._local_thread, self._all
            self._threads, self._local_thread, self._all = None, None, set()
        if threads is None or local is None:
            return
        for worker in workers:
            worker.kill()
        threads.shutdown(wait=True, cancel_futures=True)
        local.shutdown(wait=False, cancel_futures=True)  # a call that hangs in this process cannot be ended
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
        """The names of the rewards."""
        return tuple(reward.name for reward in self.rewards)

    @property
    def problems(self) -> list[Problem]:
        """The failures so far, each with the number of rows that it cost, in the order of the rewards."""
        with self._lock:
            return [problem for _, problem in sorted(self._problems.items())]

    def score(
        self, prompts: Sequence, completions: Sequence, columns: Mapping[str, Sequence] | None = None
    ) -> list[Scored]:
        """Return the scores of each row, in their order.

        Args:
            prompts: A prompt per row: text or messages.
            completions: A completion per row.
            columns: For each column of the data a value per row.
        """
        rows = _rows(prompts, completions, columns)
        own = [i for i, reward in enumerate(self.rewards) if _is_in_process(reward)]
        waiting = {i: self._begin(i, rows) for i in range(len(self.rewards)) if i not in own}
        values = {i: self._values(i, rows) for i in own}
        values |= {i: future.result() for i, future in waiting.items()}
        return self._scored(rows, [values[i] for i in range(len(self.rewards))])

    def submit(
        self, prompts: Sequence, completions: Sequence, columns: Mapping[str, Sequence] | None = None
    ) -> Future[list[Scored]]:
        """Start to score the rows; as `score`, but a reward model runs on a thread of its own."""
        rows = _rows(prompts, completions, columns)
        return _gather(
            [self._begin(i, rows) for i in range(len(self.rewards))], lambda values: self._scored(rows, values)
        )

    def _begin(self, index: int, rows: _Rows) -> Future[Values]:
        threads = self._threads if self._forms[index] else self._local_thread
        if threads is None:
            raise UserError("these rewards are closed: use them within `with Rewards(...) as rewards:`")
        return threads.submit(self._values, index, rows)

    def _values(self, index: int, rows: _Rows) -> Values:
        """Return the values of one reward, one per row: a number, None, or the reason why there is none."""
        reward, count = self.rewards[index], len(rows.completions)
        if not count:
            return []
        if missing := reward.arguments.missing(rows.columns):
            return [NoReward("column", f"it needs the column {missing[0]!r}")] * count
        try:
            return _checked(self._call(index, rows), count)
        except RewardFailure as failure:
            return [NoReward(failure.kind, failure.message, failure.trace)] * count

    def _call(self, index: int, rows: _Rows) -> Any:
        reward = self.rewards[index]
        positional, named = reward.arguments.bind(rows.prompts, rows.completions, rows.columns)
        seconds = reward.seconds or self.seconds
        if self._forms[index]:
            return self._call_worker(index, positional, named, seconds)
        try:
            return call(reward.function, positional, named, seconds)
        except Exception as error:
            trace = traceback_of(error, __file__, worker_module.__file__)
            raise RewardFailure("raised", describe(error), trace) from None

    def _call_worker(self, index: int, positional: list, named: dict[str, Any], seconds: float) -> Any:
        worker = self._idle.get()  # there are as many workers as threads
        try:
            return worker.call(index, positional, named, seconds)
        except RewardFailure as failure:
            if failure.kind in REPLACED_AFTER:
                worker = self._replaced(worker)
            raise
        finally:
            self._idle.put(worker)

    def _replaced(self, worker: Worker) -> Worker:
        with self._lock:
            if worker not in self._all:  # the pool is being closed
                return worker
            self._all.remove(worker)
        worker.close()
        return self._start()

    def _scored(self, rows: _Rows, columns: list[Values]) -> list[Scored]:
        weights = {reward.name: reward.weight for reward in self.rewards}
        scored = []
        for row in range(len(rows.completions)):
            values = dict(zip(self.names, (column[row] for column in columns), strict=True))
            errors = {name: f"{v.kind}: {v.message}" for name, v in values.items() if isinstance(v, NoReward)}
            numbers = {name: None if isinstance(v, NoReward) else v for name, v in values.items()}
            scored.append(Scored.weighted(numbers, weights, errors))
        self._record(columns)
        return scored

    def _record(self, columns: list[Values]) -> None:
        with self._lock:
            for index, column in enumerate(columns):
                for value in column:
                    if isinstance(value, NoReward):
                        self._count(index, value)

    def _count(self, index: int, row: NoReward) -> None:
        name, key = self.rewards[index].name, (index, row.kind, row.message)
        before = self._problems.get(key) or Problem(name, row.kind, row.message, 0, row.trace)
        self._problems[key] = replace(before, count=before.count + 1)


def _check_names(names: list[str]) -> None:
    twice = next((name for name in names if names.count(name) > 1), None)
    require(not twice, f"rewards must have different names; two are called {twice!r}", param="rewards.name")


def _is_in_process(reward: RewardFunction) -> bool:
    return getattr(reward.function, "in_process", False)


def _forms(reward: RewardFunction) -> list[bytes]:
    """Return the pickled forms of a reward for a worker; [] if it runs in this process."""
    if _is_in_process(reward):
        return []
    forms = pickled_forms(reward.function)
    if not forms:
        warnings.warn(
            f"the reward {reward.name!r} cannot be pickled and runs in this process, where its time limit cannot be "
            "enforced: put it in a module, or install cloudpickle",
            stacklevel=3,
        )
    return forms


def _rows(prompts: Sequence, completions: Sequence, columns: Mapping[str, Sequence] | None) -> _Rows:
    rows = _Rows(list(prompts), list(completions), {name: list(values) for name, values in (columns or {}).items()})
    for name, values in {"prompts": rows.prompts, **rows.columns}.items():
        if len(values) != len(rows.completions):
            raise UserError(
                f"{name} must have a value for each of the {len(rows.completions)} completions; got {len(values)}",
                param=name,
            )
    return rows


def _checked(returned: Any, count: int) -> Values:
    if not isinstance(returned, list):
        raise RewardFailure("type", f"it must return a list of numbers; it returned a {type(returned).__name__}")
    if len(returned) != count:
        message = f"it must return a number for each of {count} completions; it returned {len(returned)}"
        raise RewardFailure("length", message)
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


def _gather(futures: list[Future[Values]], make: Any) -> Future[list[Scored]]:
    """Return a future of `make(results)`, done after the last of the futures; cancelled if one of them is."""
    result: Future[list[Scored]] = Future()
    left, lock = len(futures), threading.Lock()

    def finish() -> None:
        if any(future.cancelled() for future in futures):
            result.cancel()
            result.set_running_or_notify_cancel()  # wakes the threads that wait for it
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
