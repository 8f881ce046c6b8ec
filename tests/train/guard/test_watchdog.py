"""Test that only a hang ends the process, with its own exit code and every thread's stack."""

import subprocess
import sys
import textwrap

import pytest
from refusals import refuses

from dovetail.core.errors import RecipeError
from dovetail.train.guard.exits import HUNG
from dovetail.train.guard.watch import Watchdog

pytestmark = pytest.mark.slow


def run(tmp_path, body: str) -> subprocess.CompletedProcess:
    program = (
        "import sys, threading, time\nfrom types import SimpleNamespace\n"
        "from dovetail.train.guard.watch import Watchdog\nrun_dir = sys.argv[1]\n"
    )
    return subprocess.run(
        [sys.executable, "-c", program + textwrap.dedent(body), str(tmp_path)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def test_a_hang_is_reported_with_stacks_and_exits(tmp_path):
    found = run(tmp_path, """
        def stuck_in_a_collective():
            time.sleep(60)

        def another_thread():
            time.sleep(60)

        threading.Thread(target=another_thread, daemon=True).start()
        peers = SimpleNamespace(tell=lambda code, message: print("TOLD", message, flush=True))
        with Watchdog(0.4, run_dir, peers) as watchdog:
            watchdog.beat(41)
            stuck_in_a_collective()
    """)  # fmt: skip
    assert found.returncode == HUNG, found.stderr
    (file,) = tmp_path.glob("hang-*.txt")
    for text in (file.read_text(), found.stderr):
        assert "since step 41" in text and "stuck_in_a_collective" in text and "another_thread" in text
    assert found.stdout.startswith("TOLD no step has ended")


def test_a_callback_that_hangs_too_does_not_keep_the_process(tmp_path):
    found = run(tmp_path, """
        from dovetail.train.guard import watch as module
        module.GOODBYE_SECONDS = 0.2
        with Watchdog(0.3, run_dir, SimpleNamespace(tell=lambda code, message: time.sleep(60))):
            time.sleep(60)
    """)  # fmt: skip
    assert found.returncode == HUNG and "since the start" in found.stderr


def test_a_folder_that_cannot_be_written_still_ends_the_process(tmp_path):
    (tmp_path / "file").write_text("")
    found = run(tmp_path / "file", "with Watchdog(0.3, run_dir):\n    time.sleep(60)")
    assert found.returncode == HUNG and "could not be written" in found.stderr and "Thread" in found.stderr


def test_beats_suspension_and_the_end_do_not_trigger_it(tmp_path):
    found = run(tmp_path, """
        with Watchdog(0.5, run_dir) as watchdog:
            for step in range(8):
                time.sleep(0.1)
                watchdog.beat(step)
            with watchdog.suspend("compilation"), watchdog.suspend("evaluation"):
                time.sleep(1.2)
            time.sleep(0.2)
        time.sleep(0.8)
        print("done")
    """)  # fmt: skip
    assert (found.returncode, found.stdout) == (0, "done\n"), found.stderr
    assert not list(tmp_path.iterdir())


def test_zero_disables_the_watchdog_and_negative_values_are_refused(tmp_path):
    with Watchdog(0, tmp_path) as watchdog:
        assert watchdog._thread is None
        watchdog.beat(1)
    with refuses("hang_seconds", RecipeError):
        Watchdog(-1, tmp_path)
