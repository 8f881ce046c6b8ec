"""The ledger of wall time: what counts, what is lost, and that it survives a restart."""

import json

import pytest

from dovetail.train.goodput import MARKS, SAVE_EVERY, Goodput


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def seconds(ledger: Goodput) -> dict[str, float]:
    return {kind: pytest.approx(value) for kind, value, _ in ledger.table()}


def test_the_share_of_steps_and_the_losses_by_name():
    clock = Clock()
    ledger = Goodput(clock=clock)
    assert ledger.share == 0 and ledger.table() == []
    with ledger.span("compile"):
        clock.now += 10
    for step in range(1, 9):
        clock.now += 10
        ledger.step(step, 10)
    clock.now += 6
    ledger.add("checkpoint", 6)
    clock.now += 4  # nobody says what for
    assert ledger.share == pytest.approx(0.8)
    assert [kind for kind, _, _ in ledger.table()] == ["step", "compile", "checkpoint", "other"]
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


def test_what_a_rollback_undoes_is_lost_not_productive():
    clock = Clock()
    ledger = Goodput(clock=clock)
    for step in range(1, 11):
        clock.now += step
        ledger.step(step, step)
    assert ledger.restored(7) == pytest.approx(8 + 9 + 10)
    assert seconds(ledger) == {"step": 28, "lost": 27}
    assert ledger.restored(7) == 0  # once is enough
    clock.now += 1
    ledger.step(8, 1)
    assert ledger.restored(0) == pytest.approx(29)
    assert ledger.share == 0


def test_it_goes_on_after_a_kill(tmp_path):
    clock, path = Clock(), tmp_path / "goodput.json"
    first = Goodput(path, clock)
    for step in range(1, 31):
        clock.now += 1
        first.step(step, 1)
    saved = json.loads(path.read_text())["seconds"]["step"]
    assert saved >= 30 - SAVE_EVERY  # killed here: no more than that is forgotten
    clock.now += 1000  # the time until someone starts it again is not the run's
    second = Goodput(path, clock)
    assert second.starts == 2
    second.restored(12)
    assert seconds(second) == {"step": 12, "lost": pytest.approx(saved - 12)}
    clock.now += 8
    second.step(13, 8)
    assert second.share == pytest.approx(20 / (saved + 8))


def test_a_long_run_keeps_a_short_file(tmp_path):
    ledger = Goodput(tmp_path / "goodput.json", Clock())
    for step in range(1, 5 * MARKS):
        ledger.step(step, 0.5)
    ledger.save()
    assert len(json.loads((tmp_path / "goodput.json").read_text())["marks"]) <= MARKS
    assert ledger.restored(1000) == pytest.approx((5 * MARKS - 1 - 1000) / 2)


def test_what_it_does_not_know_it_refuses(tmp_path):
    with pytest.raises(ValueError, match="goodput counts step, init"):
        Goodput().add("coffee", 1)
    with pytest.raises(ValueError, match="not negative"):
        Goodput().add("eval", -1)
    (tmp_path / "goodput.json").write_text("[]")
    with pytest.raises(ValueError, match="not a goodput ledger"):
        Goodput(tmp_path / "goodput.json")
