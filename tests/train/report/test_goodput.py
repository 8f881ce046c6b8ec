"""Test the ledger of wall time: categories, lost time, restarts and kills."""

import json
import signal
import subprocess
import sys
import time

import pytest
from refusals import refuses

from dovetail.core.errors import FileError, UserError
from dovetail.train.report.goodput import MARKS, Goodput

pytestmark = pytest.mark.slow


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def seconds(ledger: Goodput) -> dict[str, float]:
    return {kind: pytest.approx(value) for kind, value, _ in ledger.table()}


def stepping(path=None) -> tuple[Goodput, Clock]:
    """A ledger of a run whose first step is launched."""
    clock = Clock()
    ledger = Goodput(path, clock)
    ledger.begin()
    return ledger, clock


def take(ledger: Goodput, clock: Clock, first: int, last: int, each: float = 1.0) -> None:
    for step in range(first, last + 1):
        clock.now += each
        ledger.step(step)


def test_every_second_is_attributed():
    clock = Clock()
    ledger = Goodput(clock=clock, age=2)
    clock.now += 1
    with ledger.span("compile"):
        clock.now += 10
    ledger.begin()
    for step in range(1, 9):
        with ledger.span("data"):
            clock.now += 1
        clock.now += 9
        ledger.step(step)
    with ledger.span("checkpoint"):
        clock.now += 6
    clock.now += 1  # between the last save and the end
    ledger.end()
    clock.now += 4
    assert seconds(ledger) == {"step": 72, "compile": 10, "data": 8, "checkpoint": 6, "end": 5, "start": 3}
    assert next(iter(seconds(ledger))) == "step" and ledger.wall == 104
    assert ledger.share == pytest.approx(72 / 104)
    assert sum(share for *_, share in ledger.table()) == pytest.approx(1)


def test_a_span_within_a_span_counts_once():
    clock = Clock()
    ledger = Goodput(clock=clock)
    with ledger.span("eval"):
        clock.now += 3
        with pytest.raises(KeyError), ledger.span("compile"):
            clock.now += 5
            raise KeyError  # a span that fails took its time all the same
        clock.now += 2
    assert seconds(ledger) == {"compile": 5, "eval": 5}


def test_steps_undone_by_a_rollback_are_lost():
    ledger, clock = stepping()
    for step in range(1, 11):
        take(ledger, clock, step, step, each=step)
    assert ledger.restored(7) == pytest.approx(8 + 9 + 10)
    assert seconds(ledger) == {"step": 28, "lost": 27}
    assert ledger.restored(7) == 0  # once is enough
    take(ledger, clock, 8, 8)
    assert ledger.restored(0) == pytest.approx(29)
    assert ledger.share == 0


def test_a_skipped_step_is_lost():
    ledger, clock = stepping()
    take(ledger, clock, 1, 3)
    clock.now += 5
    ledger.undone()
    take(ledger, clock, 4, 4)
    assert seconds(ledger) == {"step": 4, "lost": 5}


def test_the_ledger_continues_after_a_kill(tmp_path):
    path = tmp_path / "goodput.json"
    first, clock = stepping(path)
    take(first, clock, 1, 30)
    clock.now += 0.5  # the step that the kill breaks off
    first.save()
    clock.now += 1000  # until it is started again: reported, and not counted
    second = Goodput(path, clock, calendar=lambda: time.time() + 1000)
    assert second.starts == 2 and second.between == pytest.approx(1000, abs=60)
    second.restored(12)
    assert seconds(second) == {"step": 12, "lost": 18.5}
    second.begin()
    take(second, clock, 13, 13, each=8)
    assert second.share == pytest.approx(20 / 38.5)


def test_a_ledger_of_an_older_version_is_read(tmp_path):
    path = tmp_path / "goodput.json"
    path.write_text('{"wall": 10.0, "starts": 2, "seconds": {"step": 6.0}, "marks": [[0, 0.0], [6, 6.0]]}')
    assert seconds(Goodput(path, Clock())) == {"step": 6, "other": 4}
    assert Goodput.stored(path).starts == 2


CHILD = """
import sys, time
from dovetail.core.errors import FileError, UserError
from dovetail.train.report.goodput import Goodput
with Goodput(sys.argv[1]) as ledger:
    print("open", flush=True)
    with ledger.span("compile"):
        time.sleep(60)
"""


def test_a_killed_process_counts_as_a_start_and_its_time_is_attributed(tmp_path):
    path = tmp_path / "run" / "goodput.json"
    alive = 0.0
    for least in (0.0, 1.5):  # killed at once; and amid a span that a write has seen
        begun = time.monotonic()
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE)
        assert child.stdout and child.stdout.readline() == b"open\n"
        while Goodput.stored(path).wall < least:
            time.sleep(0.05)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        alive += time.monotonic() - begun
    ledger = Goodput(path)
    assert ledger.starts == 3
    assert 1.5 <= ledger.wall < alive, "what was written before the kill is kept"
    shares = {kind: share for kind, _, share in ledger.table()}
    assert max(shares, key=shares.__getitem__) == "compile" and "other" not in shares, shares


def test_a_refused_start_leaves_the_ledger_as_it_was(tmp_path):
    path = tmp_path / "goodput.json"
    with pytest.raises(UserError), Goodput(path):
        raise UserError("no such key")
    assert not path.exists()
    with Goodput(path):
        pass
    kept = path.read_text()
    with pytest.raises(UserError), Goodput(path):
        raise UserError("no such key")
    assert path.read_text() == kept


def test_a_long_run_keeps_a_short_file(tmp_path):
    ledger, clock = stepping(tmp_path / "goodput.json")
    take(ledger, clock, 1, 5 * MARKS - 1, each=0.5)
    ledger.save()
    assert len(json.loads((tmp_path / "goodput.json").read_text())["marks"]) <= MARKS
    assert ledger.restored(1000) == pytest.approx((5 * MARKS - 1 - 1000) / 2)


def test_unknown_spans_and_other_files_are_refused(tmp_path):
    with pytest.raises(AssertionError, match="coffee"), Goodput().span("coffee"):
        pass
    (tmp_path / "goodput.json").write_text("[]")
    with refuses(None, FileError, naming="goodput.json"):
        Goodput(tmp_path / "goodput.json")
