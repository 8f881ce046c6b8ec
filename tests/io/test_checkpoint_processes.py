"""Checkpoints of a process that is killed while saving, and of two processes that save together."""

import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from checkpoint_cases import exact, saved, state, target
from xla_flags import flags

pytestmark = pytest.mark.slow
TESTS = str(Path(__file__).parent.parent)  # where checkpoint_cases is

SAVE_FOREVER = """
    import itertools, sys
    sys.path.append(sys.argv[2])
    from checkpoint_cases import Checkpoints, state
    checkpoints = Checkpoints(sys.argv[1], keep=2)
    for step in itertools.count((checkpoints.latest() or 0) + 1):
        checkpoints.save(step, state(step, rows=4096), {"cursor": step})
        print(step, flush=True)
"""


def test_kill_9_during_save_leaves_the_last_good_one(tmp_path, open_at, problems):
    draw, last = random.Random(5), 0
    command = [sys.executable, "-c", textwrap.dedent(SAVE_FOREVER), str(tmp_path / "run"), TESTS]
    for _ in range(4):
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            assert process.stdout is not None
            for _ in range(3):
                begun = int(process.stdout.readline())
            time.sleep(draw.random() * 0.3)
            process.send_signal(signal.SIGKILL)
            begun = int((process.stdout.read().split() or [begun])[-1])
        got, meta, step = open_at().restore(target(state(0, rows=4096)))
        assert begun - 1 <= step <= begun + 1 and step > last, "at most the save under way is lost"
        assert meta == {"cursor": step} and exact(got, state(step, rows=4096))
        last = step
    assert problems == []


TWO_PROCESSES = """
    import resource, sys
    import jax
    process, port, folder, tests = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, process)
    sys.path.append(tests)
    import pathlib
    from checkpoint_cases import Checkpoints, flip, state, target
    problems = []
    checkpoints = Checkpoints(folder, keep=2, on_problem=problems.append)
    assert checkpoints.latest() == 5
    def held(got, step):  # each process can compare only what it holds
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(state(step))):
            assert all(bool((s.data == jax.device_get(b)[s.index]).all()) for s in a.addressable_shards)
    again, meta, step = checkpoints.restore(target(state(0), 4))
    held(again, 5); assert (meta, step) == ({"cursor": 50}, 5)
    for step in (6, 7, 8):
        checkpoints.save(step, again, {"cursor": step})
    checkpoints.wait()
    assert not problems, problems
    if process == 0:
        assert checkpoints.steps() == [7, 8]
        flip(pathlib.Path(folder) / "step_8")
    from jax.experimental import multihost_utils
    multihost_utils.sync_global_devices("damaged")
    again, meta, step = checkpoints.restore(target(state(0), 4))
    held(again, 5); assert step == 7 and len(problems) == 1, (step, problems)
    problems.clear()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if process == 1:  # one of the two cannot write; the other must not wait for it
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, limits[1]))
    checkpoints.save(9, again, {})
    checkpoints.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(problems) == 1 and "step 9 was not written" in problems[0], problems
    assert checkpoints.latest() == 8
    checkpoints.save(10, again, {})
    checkpoints.wait()
    assert checkpoints.latest() == 10 and len(problems) == 1
    checkpoints.close()
    print("agreed", flush=True)
"""


def test_two_processes_save_and_restore_what_one_saved(tmp_path, open_at):
    saved(open_at(), 5).close()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    env = os.environ | {"XLA_FLAGS": flags(2)}
    arguments = [port, str(tmp_path / "run"), TESTS]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(TWO_PROCESSES), str(i), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env,
        )
        for i in range(2)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=90) for process in running]
    finally:
        for process in running:
            process.kill()
            process.communicate()
    assert all(out.endswith("agreed\n") for out, _ in outputs), "\n---\n".join(err[-2500:] for _, err in outputs)
    got, _, step = open_at().restore(target(state(0)), step=7)  # and one process reads what two wrote
    assert step == 7 and exact(got, state(5))
