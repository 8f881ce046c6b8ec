"""Reward functions in worker processes: their values, and their failures."""

import asyncio
import contextlib
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from refusals import refuses

from dovetail.core.errors import RecipeError
from dovetail.tune.rl.rewards.completion import NoReward, Problem
from dovetail.tune.rl.rewards.model_rewards import ModelReward
from dovetail.tune.rl.rewards.pool import Rewards
from dovetail.tune.rl.rewards.reward import RewardFunction, reward_of

pytestmark = pytest.mark.slow

SOME = (["p"] * 3, ["a", "bb", "ccc"])


def lengths(prompts, completions):
    return [len(c) for c in completions]


async def slowly(prompts, completions, answer):
    await asyncio.sleep(0.01)
    return tuple(float(c == a) for c, a in zip(completions, answer, strict=True))


def sometimes(prompts, completions):
    return [None if c == "bb" else 1.0 for c in completions]


def raises(prompts, completions):
    raise KeyError("no such thing")


def hangs(prompts, completions):
    time.sleep(600)


def dies(prompts, completions):
    os._exit(7)


def exits(prompts, completions):
    sys.exit("enough")


def wrong_length(prompts, completions):
    return [1.0]


def no_list(prompts, completions):
    return 1.0


def odd_values(prompts, completions):
    return [math.nan, "high", NoReward("weather", "it rains")]


def cannot_travel(prompts, completions):
    return [threading.Lock()] * len(completions)


def pids(prompts, completions):
    return [float(os.getpid())] * len(completions)


def has_jax(prompts, completions):
    return [float("jax" in sys.modules)] * len(completions)


def parents_a_process(prompts, completions, where):
    tempfile.mkdtemp()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(where[0]).write_text(str(child.pid))
    time.sleep(600)


@pytest.fixture(scope="module")
def many():
    """One pool for many tests: starting a process takes time."""
    functions = [lengths, slowly, sometimes, raises, exits, wrong_length, no_list, odd_values, cannot_travel, has_jax]
    functions += [RewardFunction("lambda", lambda prompts, completions: [0.5] * len(completions), weight=-2.0)]
    with Rewards(functions, workers=1) as rewards:
        yield rewards, rewards.score(*SOME, {"answer": ["a", "x", "ccc"], "unused": [1, 2, 3]})


def column(scored, name):
    return [row.values[name] for row in scored]


def test_values_in_the_order_of_the_rows(many):
    _, scored = many
    assert column(scored, "lengths") == [1, 2, 3] and column(scored, "slowly") == [1, 0, 1]
    assert column(scored, "sometimes") == [1, None, 1] and column(scored, "lambda") == [0.5] * 3
    assert "sometimes" not in scored[1].errors


def test_the_total_is_the_weighted_sum_of_the_values(many):
    _, scored = many
    assert [row.total for row in scored] == [1 + 1 + 1 - 1, 2 + 0 - 1, 3 + 1 + 1 - 1]


def test_a_failure_is_a_none_with_a_reason(many):
    rewards, scored = many
    for name in ("raises", "exits", "wrong_length", "no_list", "odd_values", "cannot_travel"):
        assert column(scored, name) == [None] * 3 and all(name in row.errors for row in scored)
    assert scored[0].errors["raises"] == "raised: KeyError: 'no such thing'"
    found = [(p.reward, p.kind, p.count) for p in rewards.problems]
    assert found == [
        ("raises", "raised", 3), ("exits", "raised", 3), ("wrong_length", "length", 3), ("no_list", "type", 3),
        ("odd_values", "nan", 1), ("odd_values", "type", 1), ("odd_values", "weather", 1),
        ("cannot_travel", "raised", 3),
    ]  # fmt: skip
    messages = {p.reward: p.message for p in rewards.problems}
    assert messages["wrong_length"] == "it must return a number for each of 3 completions; it returned 1"
    assert Problem("odd_values", "weather", "it rains", 1) in rewards.problems
    traces = {p.reward: p.trace for p in rewards.problems}
    assert "line" in traces["raises"] and traces["raises"].endswith("KeyError: 'no such thing'")
    assert traces["raises"].count("  File ") == 1, "the frames of the worker are not shown"
    assert traces["wrong_length"] == ""


def test_a_worker_has_not_loaded_jax(many):
    assert column(many[1], "has_jax") == [0] * 3


def test_no_rows_and_columns_of_unequal_length(many):
    rewards, _ = many
    assert rewards.score([], []) == []
    with refuses("answer"):
        rewards.score(["p"], ["c"], {"answer": [1, 2]})


def test_a_missing_column_costs_only_its_reward(many):
    rewards, _ = many
    (row,) = rewards.score(["p"], ["c"])
    assert row.values["slowly"] is None and row.errors["slowly"] == "column: it needs the column 'answer'"
    assert row.values["lengths"] == 1


def test_concurrent_calls_get_their_own_values(many):
    rewards, _ = many
    futures = [rewards.submit(["p"], ["c" * n], {"answer": [""]}) for n in range(20)]
    assert [future.result(60)[0].values["lengths"] for future in futures] == list(range(20))


def test_a_worker_that_hangs_or_dies_is_replaced():
    begun, before = time.monotonic(), children()
    with Rewards([RewardFunction("hangs", hangs, seconds=0.5), dies, lengths, pids], workers=1) as rewards:
        first, second = rewards.score(*SOME), rewards.score(*SOME)
    assert column(first, "lengths") == column(second, "lengths") == [1, 2, 3]
    assert column(first, "hangs") == column(first, "dies") == [None] * 3
    assert column(first, "pids") != column(second, "pids")
    assert [(p.reward, p.kind, p.message, p.count) for p in rewards.problems] == [
        ("hangs", "time", "it took more than 0.5 s and was stopped", 6),
        ("dies", "died", "its process ended with exit code 7", 6),
    ]
    assert time.monotonic() - begun < 60
    wait_for(lambda: children() <= before)


def test_closing_a_pool_kills_its_workers_and_their_children(tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    before = children()
    with Rewards([parents_a_process, lengths], workers=1) as rewards:
        running = rewards.submit(["p"], ["c"], {"where": [str(tmp_path / "pid")]})
        waiting = rewards.submit(["p"], ["c"], {"where": [str(tmp_path / "other")]})
        grandchild = int(wait_for(lambda: read(tmp_path / "pid")))
    assert all(one.cancelled() or one.result(0)[0].total is None for one in (running, waiting))
    wait_for(lambda: is_gone(grandchild))
    assert list((tmp_path / "temporary").iterdir()) == []
    wait_for(lambda: children() <= before)
    with refuses(naming="closed"):
        rewards.score(*SOME)
    with rewards:  # and again
        assert column(rewards.score(["p"], ["c"]), "lengths") == [1]


SCRIPT = """
import os, sys
print("begun", flush=True)
import dovetail.tune.rl.rewards.pool as pool
WORTH = 4.0
class Mine:
    def __call__(self, prompts, completions, **columns):
        return [WORTH] * len(completions)
def pid(prompts, completions):
    return [os.getpid()] * len(completions)
with pool.Rewards([Mine(), pid, lambda p, c: [WORTH / 2]], workers=1) as rewards:
    (row,) = rewards.score(["p"], ["c"])
    print(row.values["Mine"], row.values["<lambda>"], row.values["pid"] != os.getpid(), rewards.problems, flush=True)
    print(int(row.values["pid"]), flush=True)
    sys.stdin.read()
"""


def test_workers_do_not_run_the_script_again_and_end_with_it(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    script = subprocess.Popen(
        [sys.executable, str(tmp_path / "train.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    try:
        assert script.stdout is not None
        assert script.stdout.readline() == "begun\n"
        assert script.stdout.readline() == "4.0 2.0 True []\n"
        worker = int(script.stdout.readline())
        assert not is_gone(worker)
    finally:
        script.send_signal(signal.SIGKILL)
        script.communicate()
    wait_for(lambda: is_gone(worker))
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


class Counter:
    """A model that scores; it holds what cannot be sent to another process."""

    def __init__(self):
        self.lock, self.calls = threading.Lock(), []

    def score(self, texts):
        self.calls.append((threading.current_thread() is threading.main_thread(), texts))
        return [len(text) for text in texts]  # of a conversation, its messages


def test_a_reward_model_runs_in_this_process():
    model, before = Counter(), children()
    with Rewards([ModelReward(model), RewardFunction("half", ModelReward(model), 0.5)]) as rewards:
        assert children() <= before, "no reward needs a worker"
        scored = rewards.score([[{"role": "user", "content": "hi"}]], [[{"role": "assistant", "content": "ho"}]])
        assert [row.values for row in rewards.submit(["p"], ["c"]).result(30)] == [{"model": 2, "half": 2}]
    conversation = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    assert scored[0].total == 3 and model.calls[0] == (True, [conversation])
    assert ModelReward(model, suffix="</s>")(["ab", [{"role": "user", "content": "x"}]], ["c", "d"]) == [7, 2]
    with refuses("options", RecipeError):
        ModelReward(model, options={"seed": 1})
    with refuses("rewards.model.model", RecipeError):
        reward_of({"kind": "model", "model": 3})


def test_a_function_that_cannot_be_pickled_runs_in_this_process_with_a_warning():
    lock = threading.Lock()

    def locked(prompts, completions):
        with lock:
            return [1.0] * len(completions)

    async def locked_too(prompts, completions):
        with lock:
            raise ValueError("not today")

    with pytest.warns(UserWarning, match="'locked(_too)?' cannot be pickled"):
        rewards = Rewards([locked, locked_too])
    with rewards:
        (row,) = rewards.score(["p"], ["c"])
    assert row.values == {"locked": 1, "locked_too": None} and "not today" in row.errors["locked_too"]


def test_kinds_run_in_workers_too():
    from dovetail.tune.rl.rewards import sandbox

    kinds = [{"kind": "number"}, {"kind": "exact", "weight": 0.5}, {"kind": "regex", "pattern": r"\d"}]
    kinds.append({"kind": "judge", "url": "http://127.0.0.1:9", "model": "m", "retries": 0})  # nothing listens there
    if sandbox.ENFORCED.issubset(sandbox.isolation_here()):
        kinds.append({"kind": "code"})
    with Rewards(kinds, workers=2) as rewards:
        scored = rewards.score(["p"] * 2, ["x = 4", "4"], {"answer": ["4", "4"], "tests": [["assert x == 4"]] * 2})
    assert [row.values["number"] for row in scored] == [1, 1] and column(scored, "exact") == [0, 1]
    assert "could not be reached" in scored[0].errors["judge"]
    if len(kinds) > 4:
        assert column(scored, "code") == [1, 0] and [row.total for row in scored] == [3, 2.5]


def test_wrong_settings_of_a_pool_are_refused():
    with refuses("rewards.name", RecipeError, naming="'exact'"):
        Rewards([{"kind": "exact"}, {"kind": "exact", "column": "b"}])
    with refuses("workers", RecipeError):
        Rewards([lengths], workers=0)
    with refuses("seconds", RecipeError):
        Rewards([lengths], seconds=0)


# --- helpers ----------------------------------------------------------------------------------------------------------


def children() -> set[int]:
    """Return the child processes, those of other tests too, which may end at any time."""
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,comm="], capture_output=True, text=True)
    rows = [line.split() for line in listed.stdout.splitlines()]
    return {int(row[0]) for row in rows if int(row[1]) == os.getpid() and not row[2].endswith("ps")}


def is_gone(pid: int) -> bool:
    listed = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return listed.stdout.strip()[:1] in ("", "Z")


def read(path: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        return path.read_text()
    return ""


def wait_for(holds, seconds: float = 60.0):
    end = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)
    return found
