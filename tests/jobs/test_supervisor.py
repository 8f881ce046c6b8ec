"""Test the supervisor's reaction to every end of an attempt, with a scripted backend."""

import json
import time
from dataclasses import replace

import pytest
from jobs.scripted import Scripted
from refusals import refuses

from dovetail.cli import job_output
from dovetail.core.errors import RecipeError
from dovetail.jobs import actions
from dovetail.jobs.backends.backend import Observed, RefusedJobError
from dovetail.jobs.job import Resource
from dovetail.jobs.outcome import deciding, error_line, outcome
from dovetail.jobs.spec import make
from dovetail.jobs.supervisor import JobSupervisor, orphans, reap

RUNNING = Observed("running", "", ("h0", "h1"))
DONE = Observed("succeeded", "", ("h0",), 0)
LOST = Observed("preempted", "taken away")


def failed(code: int) -> Observed:
    return Observed("failed", "", ("h0",), code, 0)


class World:
    """A store, a scripted backend and a supervisor whose clock does not wait."""

    def __init__(self, store):
        self.store, self.script = store, {}
        self.backend = Scripted(store.root / "cloud.json", self.script)
        self.supervisor = JobSupervisor(store, lambda name: self.backend, looks=0.0)

    def add(self, name: str, *ends: Observed, first=RUNNING, **given) -> str:
        for number, end in enumerate(ends, 1):
            self.script[(name, number)] = [first, end]
        spec = {"command": "true"} | {"name": name, "code": {"path": ""}, "retries": {"backoff": 0.0}} | given
        return actions.create(self.store, make({k: v for k, v in spec.items() if v is not None})).id

    def run(self, until=lambda: False, ticks: int = 60):
        for _ in range(ticks):
            if not self.supervisor.tick() or until():
                return

    def ends(self, id: str) -> list[str]:
        return [row.outcome for row in self.store.attempts(id)]

    @property
    def held(self) -> list[str]:
        return [name for name, one in self.backend.read().items() if not one["deleted"]]


@pytest.fixture
def world(store, monkeypatch) -> World:
    monkeypatch.setattr("dovetail.jobs.preflight.check", lambda spec, code: None)  # it would ask the real backends
    return World(store)


def test_each_kind_of_end_has_its_own_retry_budget(world):
    job = world.add("x", LOST, failed(89), LOST, failed(1), DONE, retries={"faults": 1, "failures": 1, "backoff": 0.0})
    world.run()
    found = world.store.job(job)
    assert world.ends(job) == ["preemption", "fault", "preemption", "failure", "success"]
    assert (found.status, found.preemptions, found.faults, found.failures) == ("succeeded", 2, 1, 1)
    assert world.held == []


@pytest.mark.parametrize(
    ("budget", "end"), [("preemptions", LOST), ("faults", failed(87)), ("failures", failed(1))]
)  # fmt: skip
def test_a_spent_budget_fails_the_job_and_is_named(world, budget, end):
    job = world.add("x", end, end, end, retries={budget: 1, "backoff": 0.0})
    world.run()
    found = world.store.job(job)
    assert (found.status, found.attempts) == ("failed", 2) and f"retries.{budget}: 1" in found.detail


def test_a_requeue_by_the_backend_counts_as_a_preemption(world):
    again, waiting = replace(RUNNING, restarts=1), Observed("waiting", "PENDING", restarts=1)
    once = world.add("once", DONE, retries={"preemptions": 1, "backoff": 0.0})
    world.script[("once", 1)] = [RUNNING, waiting, waiting, again, DONE]
    often = world.add("often", DONE, retries={"preemptions": 1, "backoff": 0.0})
    world.script[("often", 1)] = [RUNNING, replace(again, restarts=2)]  # twice between two looks
    world.run()
    found = world.store.job(once)
    assert (found.status, found.attempts, found.preemptions) == ("succeeded", 1, 1)
    found = world.store.job(often)
    assert (found.status, found.attempts, found.preemptions) == ("failed", 1, 2)
    assert "retries.preemptions: 1" in found.detail and world.held == []


def test_permanent_failures_are_not_retried(world):
    trouble = world.add("trouble", failed(88), retries={"failures": 9, "backoff": 0.0})
    mistake = world.add("mistake", failed(2), command=None, recipe="tiny", retries={"failures": 9, "backoff": 0.0})
    world.run()
    assert [world.store.job(one).attempts for one in (trouble, mistake)] == [1, 1]
    assert world.store.job(trouble).status == world.store.job(mistake).status == "failed"


def test_a_refused_create_ends_the_job_even_if_the_backend_is_unreachable(world, monkeypatch):
    """No credentials, no client, no project: nor can it be looked for."""

    def create(attempt):
        raise RefusedJobError("no credentials are here")

    monkeypatch.setattr(world.backend, "observe", lambda attempt: Observed("unknown", "no credentials are here"))
    answered = world.add("answered", backend="slurm")
    world.run(lambda: world.store.last(answered).phase == "live")
    monkeypatch.setattr(world.backend, "create", create)
    job = world.add("x", backend="slurm")
    world.run(lambda: world.store.job(job).is_over)
    assert (world.store.job(job).status, world.store.job(job).detail) == ("failed", "no credentials are here")
    assert world.ends(job) == ["mistake"] and not world.store.job(answered).is_over
    # the answer to an earlier call may have been lost: that one is looked for
    world.store.change_attempt(answered, 1, phase="creating")
    world.run(ticks=5)
    assert (
        world.store.last(answered).phase == "ending" and world.store.job(answered).detail == "no credentials are here"
    )


def broken(*given):
    raise TypeError("got an unexpected keyword argument 'filter'")


def test_a_lasting_exception_of_the_supervisor_fails_the_job(world, monkeypatch, capsys):
    """It is seen at once, and a job that cannot begin does not wait for ever."""
    monkeypatch.setattr(world.backend, "create", broken)
    job = world.add("x")
    world.run(ticks=2)
    found = world.store.job(job)
    assert (found.status, found.detail) == (
        "error", "the supervisor failed: TypeError: got an unexpected keyword argument 'filter'",
    )  # fmt: skip
    job_output.show(world.store, (), 0)
    listed = capsys.readouterr().out
    assert "  error  " in listed and f"{job} x: the supervisor failed: TypeError" in listed
    job_output.show_one(world.store, found)
    assert "the supervisor failed: TypeError" in capsys.readouterr().out
    world.run()
    found = world.store.job(job)
    assert found.status == "failed" and "the supervisor failed: TypeError" in found.detail
    assert [event.what for event in world.store.events(job)].count(found.detail) == 1 and world.held == []


def test_a_passing_exception_of_the_supervisor_leaves_the_job_unchanged(world, monkeypatch):
    job = world.add("x", DONE)
    world.script[("x", 1)] = [RUNNING, RUNNING, DONE]
    world.run(lambda: world.store.job(job).status == "running")
    with monkeypatch.context() as patched:
        patched.setattr(world.backend, "observe", broken)
        world.run(ticks=20)
        assert world.store.job(job).status == "error" and world.held == [f"dt-{job}-1"]
    world.run()
    found = world.store.job(job)
    assert (found.status, found.detail, world.ends(job)) == ("succeeded", "", ["success"])


def test_a_job_that_makes_the_supervisor_fail_can_be_cancelled(world, monkeypatch):
    monkeypatch.setattr(world.backend, "create", broken)
    job = world.add("x")
    world.run(ticks=2)
    actions.cancel(world.store, world.store.job(job))
    world.run()
    assert world.store.job(job).status == "cancelled"


def test_a_job_cancelled_in_the_backend_is_cancelled(world):
    job = world.add("x", Observed("cancelled", "cancelled in Slurm (scancel)", ("h0",), 85), backend="slurm")
    later = world.add("later", after=[job])
    world.run()
    found = world.store.job(job)
    assert (found.status, found.detail, found.attempts) == ("cancelled", "cancelled in Slurm (scancel)", 1)
    assert world.store.job(later).status == "failed" and world.held == []


def test_a_failed_observation_changes_nothing(world):
    job = world.add("x", DONE)
    world.script[("x", 1)] = [RUNNING] + [Observed("unknown", "503")] * 10 + [DONE]
    world.run()
    assert world.ends(job) == ["success"] and world.backend.read()[f"dt-{job}-1"]["made"] == 1


def test_absence_counts_only_when_observed_twice(world):
    job = world.add("x", DONE)
    world.script[("x", 1)] = [RUNNING, Observed("absent"), RUNNING, Observed("absent"), RUNNING, DONE]
    supervisor = world.supervisor
    supervisor._looks = supervisor.reconciler.settle = 0.05
    for _ in range(200):
        supervisor._next_look.clear()
        if not supervisor.tick():
            break
    assert world.ends(job) == ["success"]


def test_the_next_zone_and_then_another_size(world):
    job = world.add(
        "x", LOST, LOST, LOST, DONE, backend="gcp-tpu", recipe="tiny", command=None, accelerator="v6e-16",
        others=["v6e-8"], zones=["us-east5-b", "europe-west4-a"], tier="spot",
    )  # fmt: skip
    world.backend.full = {"us-east5-b"}
    world.run()
    rows = [(row.accelerator, row.zone, row.outcome) for row in world.store.attempts(job)]
    assert rows == [
        ("v6e-16", "us-east5-b", "unavailable"),
        ("v6e-16", "europe-west4-a", "preemption"),
        ("v6e-8", "us-east5-b", "unavailable"),
        ("v6e-8", "europe-west4-a", "success"),
    ]
    assert world.store.job(job).status == "succeeded" and world.held == []


def test_a_lost_answer_to_create_makes_no_second_resource(world):
    job = world.add("x", DONE)
    world.backend.lost_answers = {("x", 1)}
    world.run()
    assert world.ends(job) == ["success"] and [one["made"] for one in world.backend.read().values()] == [1]


def test_a_cancelled_job_is_signalled_first_and_can_be_resumed(world):
    job = world.add("x", RUNNING, DONE)
    world.run(lambda: world.store.job(job).status == "running")
    actions.cancel(world.store, world.store.job(job))
    world.run()
    assert world.store.job(job).status == "cancelled" and world.backend.read()[f"dt-{job}-1"]["stopped"]
    assert world.ends(job) == ["stopped"] and world.held == []
    actions.resume(world.store, world.store.job(job))
    world.run()
    assert world.store.job(job).status == "succeeded" and world.store.job(job).preemptions == 0
    with refuses("JOB", code="job_over"):
        actions.resume(world.store, world.store.job(job))


@pytest.mark.parametrize("ceiling", [{"dollars": 5.0}, {"hours": 0.5}])
def test_a_job_at_its_ceiling_is_stopped_with_a_signal(world, ceiling):
    job = world.add("x", RUNNING, DONE, backend="gcp-tpu", accelerator="v6e-8", zones=["us-east5-b"], ceiling=ceiling)
    world.run(lambda: world.store.job(job).status == "running")
    world.store.change_attempt(job, 1, started=time.time() - 1700)  # v6e-8 is $21.60 an hour
    world.run()
    found = world.store.job(job)
    (name,) = ceiling
    assert found.status == "stopped" and f"ceiling.{name}" in found.detail
    assert world.backend.read()[f"dt-{job}-1"]["stopped"] and found.dollars == pytest.approx(10.2, rel=0.1)
    actions.resume(world.store, found)  # the ceiling has not moved: nothing more is spent
    world.run()
    assert world.store.job(job).status == "stopped" and world.store.job(job).attempts == 1
    with refuses("backend", RecipeError):
        actions.resume(world.store, world.store.job(job), ["backend=local"])
    actions.resume(world.store, world.store.job(job), [f"ceiling.{name}=1000"])
    world.run()
    assert world.store.job(job).status == "succeeded"


def test_hosts_with_wrong_results_are_quarantined(world):
    job = world.add("x", failed(86), DONE, backend="slurm")
    run = world.store.home(job) / "run"
    run.mkdir()
    found = {"what": "quarantine", "time": time.time() + 60, "reason": "two results", "at_fault": {"hosts": ["bad7"]}}
    earlier = found | {"time": 0.0, "at_fault": {"hosts": ["old"]}}
    run.joinpath("health.jsonl").write_text(json.dumps(earlier) + "\n{torn\n" + json.dumps(found) + "\n")
    world.run()
    made = world.backend.read()
    assert [made[f"dt-{job}-{n}"]["exclude"] for n in (1, 2)] == [[], ["bad7"]]
    assert world.store.quarantined("slurm") == ["bad7"] and world.store.release("bad7") == 1


def test_a_job_waits_for_the_jobs_in_after(world):
    first = world.add("first", DONE)
    second = world.add("second", DONE, after=[first])
    bad = world.add("bad", failed(1))
    never = world.add("never", after=[bad])
    world.run()
    events = {name: world.store.events(id)[-1].at for name, id in (("first", first), ("second", second))}
    assert events["first"] < events["second"] and world.store.job(second).status == "succeeded"
    assert world.store.job(never).status == "failed" and bad in world.store.job(never).detail
    with refuses("JOB", code="no_job", naming="'nothing'"):
        world.add("x", after=["nothing"])


def test_a_notification_is_sent_at_the_end(world, tmp_path):
    job = world.add("x", DONE, notify=f'echo "$DOVETAIL_JOB_NAME $DOVETAIL_JOB_STATUS" > {tmp_path}/told')
    world.run()
    world.supervisor.tick()
    until = time.monotonic() + 10
    while not (tmp_path / "told").exists() and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(0.05)
    assert (tmp_path / "told").read_text() == "x succeeded\n" and world.store.job(job).is_over
    assert world.store.open_intents() == []


def test_orphaned_resources_are_found_and_released(world):
    job = world.add("x", DONE)
    world.run(lambda: world.store.job(job).status == "running")
    held = world.backend.read()
    held["dt-zzz-3"] = held[f"dt-{job}-1"] | {"key": ["zzz", 3]}
    world.backend._write(held)
    choose = lambda name: world.backend  # noqa: E731
    assert [one.resource for one in orphans(world.store, choose)] == [Resource("dt-zzz-3")]
    assert [one.resource.name for one in reap(world.store, choose)] == ["dt-zzz-3"]
    assert world.held == [f"dt-{job}-1"]


def test_backoff_doubles_and_is_kept(world):
    job = world.add("x", LOST, LOST, LOST, DONE, retries={"backoff": 100.0, "backoff_max": 250.0})
    waits = []
    for _ in range(3):
        world.run(lambda: world.store.job(job).not_before > time.time())
        waits.append(world.store.job(job).not_before - time.time())
        world.run(ticks=3)
        assert world.store.job(job).attempts == len(waits)  # not before its time
        world.store.change(job, not_before=0.0)
    world.run()
    assert all(0.9 * low <= wait <= 1.2 * low for low, wait in zip((100, 200, 250), waits, strict=True))
    assert world.store.job(job).status == "succeeded"


SPEC = make({"name": "x", "command": "true", "hosts": 2})


@pytest.mark.parametrize(
    ("codes", "order", "found"),
    [
        ([0, 0], [0, 1], (0, None)),
        ([89, 1], [0, 1], (1, 1)),  # the one that lost its peer ended first, and is not to blame
        ([134, 89], [1, 0], (89, 1)),
        ([85, 86], [0, 1], (86, 1)),
        ([85, 85], [1, 0], (85, 1)),
        ([1, 3], [1, 0], (3, 1)),
    ],
)
def test_the_exit_code_that_decides(codes, order, found):
    assert deciding(codes, order) == found


@pytest.mark.parametrize(
    ("seen", "tail", "kind"),
    [
        (failed(85), "", "preemption"),
        (failed(143), "", "preemption"),
        (failed(137), "", "fault"),
        (failed(134), "", "fault"),
        (failed(86), "", "fault"),
        (failed(1), "ValueError: no", "failure"),
        (failed(1), "Xid 79: GPU has fallen off the bus\nRuntimeError: x", "fault"),
        (failed(127), "", "mistake"),
        (Observed("failed", "NODE_FAIL"), "", "fault"),
        (Observed("suspended"), "", "preemption"),
    ],
)
def test_the_cause_of_an_end(seen, tail, kind):
    assert outcome(seen, SPEC, tail).kind == kind
    if kind in ("preemption", "fault"):
        assert outcome(seen, SPEC, tail, stop_sent=True).kind == "stopped"


def test_the_last_error_is_the_one_shown():
    assert error_line("Traceback\n  File x\nValueError: shape\nbye\n\n") == "ValueError: shape"
    assert error_line("one\ntwo\n") == "two" and error_line("") == ""
