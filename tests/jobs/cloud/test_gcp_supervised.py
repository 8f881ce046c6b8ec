"""Test the supervisor with queued resources that fail in every way, with Google's client and a loopback server.

Whatever happens on the way: nothing is made twice, nothing is left behind, and every attempt is written down as what it
was. The server's clock is moved by the test; the VMs are a model of what the lines of tpu_worker do, which
test_tpu_program.py runs themselves.
"""

import tempfile
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from jobs.cloud.fake_tpu import FakeTpu, Story, World
from jobs.cloud.loopback import FAULTS
from jobs.cloud.slices import spec

from dovetail.jobs.backends.gcp_tpu import GcpTpuBackend
from dovetail.jobs.backends.queued_resources import QueuedResources
from dovetail.jobs.backends.tpu_ssh import SshResult, TpuHost
from dovetail.jobs.store import JobStore
from dovetail.jobs.supervisor import JobSupervisor, orphans, reap

TICKS = 200


@pytest.fixture(scope="module", autouse=True)
def _client():
    pytest.importorskip("google.cloud.tpu_v2", reason="pip install 'dovetail[gcp]'")


@dataclass
class Case:
    stories: list[Story]  # of the attempts, in order; the last is followed by quiet ones
    faults: list[str]  # of requests, in order
    silences: list[bool]  # of ssh, in order
    work: int  # seconds of the program
    code: int  # its end
    slices: int = 1
    forgets: bool = True
    busy: bool = False
    outage: tuple[int, int] = (0, 0)  # from, for how long
    cancel: int | None = None  # the tick at which a person does
    crashes: set[int] = field(default_factory=set)  # calls of the backend after which the supervisor is killed


STORIES = st.builds(
    Story,
    creating=st.integers(0, 2),
    waiting=st.integers(0, 3),
    provisioning=st.integers(0, 2),
    deleting=st.integers(0, 3),
    end=st.sampled_from(("none", "preempted", "vanished", "terminated", "suspended", "failed")),
    active=st.integers(0, 6),
    lag=st.integers(0, 3),
)
CASES = st.builds(
    Case,
    stories=st.lists(STORIES, max_size=3),
    faults=st.lists(st.sampled_from(("ok", "ok", *FAULTS)), max_size=25),
    silences=st.lists(st.booleans(), max_size=6),
    work=st.integers(0, 8),
    code=st.sampled_from((0, 0, 0, 1)),
    slices=st.integers(1, 2),
    forgets=st.booleans(),
    busy=st.booleans(),
    outage=st.tuples(st.integers(0, 12), st.sampled_from((0, 0, 60))),
    cancel=st.one_of(st.none(), st.none(), st.integers(0, 15)),
    crashes=st.sets(st.integers(1, 20), max_size=3),
)


class Killed(BaseException):
    """kill -9, as far as Python has it."""


class Vms:
    """`run` of the backend: what the lines of tpu_worker do, on VMs that are there while their node is READY."""

    def __init__(self, world: World, case: Case) -> None:
        self.world, self.case, self.silences = world, case, deque(case.silences)
        self.started: dict[tuple[str, str], float] = {}
        self.stopped: set[tuple[str, str]] = set()

    def ssh(self, worker: TpuHost, line: str | None) -> list[str]:
        return [worker.node, str(worker.index), line or ""]

    def run(self, words, given: bytes, timeout: float) -> SshResult:
        node, index, line = words
        silent = self.silences.popleft() if self.silences else False
        if silent or not self._is_up(node):
            return SshResult(255, b"", "ssh: no route to host")
        if line == "sh -s":
            if (node, index) not in self.stopped:
                self.started.setdefault((node, index), self.world.now)
        elif "kill -s TERM" in line:
            self.stopped.add((node, index))
        elif "tar xf" not in line:
            return SshResult(0, f"dovetail-worker {self._standing((node, index))}\n".encode(), "")
        return SshResult(0, b"", "")

    def _is_up(self, node: str) -> bool:
        id = node.rpartition("/")[2]
        return any(id in one.node_ids and one.node(self.world.now) == "READY" for one in self.world.live().values())

    def _standing(self, which: tuple[str, str]) -> str:
        if which not in self.started:
            return f"exited 143 {self.world.now}" if which in self.stopped else "absent"
        if self.world.now - self.started[which] >= self.case.work:
            return f"exited {self.case.code} {self.started[which] + self.case.work}"
        return f"exited 85 {self.world.now}" if which in self.stopped else "running"

    def has_run(self, name: str) -> bool:
        """Whether the program of an attempt was given its time."""
        began = [at for (node, _), at in self.started.items() if node.rpartition("/")[2].startswith(name)]
        return len(began) == self.case.slices and all(self.world.now - at >= self.case.work for at in began)


class Watched:
    """The backend, whose supervisor is killed after some of its calls."""

    def __init__(self, backend: GcpTpuBackend, crashes: set[int]) -> None:
        self._backend, self._crashes, self.calls = backend, crashes, 0

    def __getattr__(self, name):
        def call(*args):
            self.calls += 1
            found = getattr(self._backend, name)(*args)
            if self.calls in self._crashes:
                raise Killed
            return found

        return call


@pytest.fixture(scope="module")
def cloud():
    with FakeTpu(slow=0.25) as server:
        yield server


def play(cloud: FakeTpu, case: Case, root: Path) -> None:
    world = cloud.world = World(forgets_request_ids=case.forgets, busy_while_creating=case.busy)
    world.stories, world.faults = deque(case.stories), deque(case.faults)
    vms, store = Vms(world, case), JobStore(root)
    service = QueuedResources(cloud.address, timeout=0.15)
    backend = Watched(GcpTpuBackend(root, store.owner, service, vms.ssh, vms.run), case.crashes)
    quick = {"backoff": 0, "preemptions": 50, "faults": 0}
    id = store.add(spec(tier="spot", slices=case.slices, retries=quick, zones=["a-a", "b-b"])).id
    supervisor = JobSupervisor(store, lambda _: backend, looks=0.0)
    try:
        for tick in range(TICKS):
            if tick == case.outage[0]:
                world.down_until = world.now + case.outage[1]
            if tick == case.cancel:
                store.change(id, wanted="stop")
            try:
                supervisor.tick()
            except Killed:
                supervisor = JobSupervisor(store, lambda _: backend, looks=0.0)
            unwanted = [one for one in world.live().values() if one.deleted is None]
            assert len(unwanted) <= 1, "two slices are paid for at once"
            if store.job(id).is_over:
                break
            world.now += 5 if world.now < world.down_until else 1
        check(store, id, world, vms, case)
        leave_nothing(store, backend, world)
    finally:
        store.close()


def check(store: JobStore, id: str, world: World, vms: Vms, case: Case) -> None:
    """Every attempt is what it was."""
    job = store.job(id)
    assert job.is_over, f"{job.status} for ever: {job.detail}"
    names = Counter(one.name for one in world.made())
    assert all(count == 1 for count in names.values()), f"made twice: {names}"
    told = {one.name.rpartition("/")[2]: one for one in world.made()}
    for row in store.attempts(id):
        name = f"dt-{id}-{row.number}"
        assert row.phase == "gone"
        if row.outcome == "preemption":
            assert told[name].story.end != "none", f"{row.detail}, and it was not taken away"
        elif row.outcome in ("success", "failure"):
            assert vms.has_run(name) and (row.outcome == "success") == (case.code == 0)
        else:
            assert row.outcome == "stopped" and case.cancel is not None, f"{row.outcome}: {row.detail}"
    last = store.attempts(id)[-1:]
    if job.status == "cancelled":
        assert case.cancel is not None
    else:
        assert job.status == {"success": "succeeded", "failure": "failed"}[last[0].outcome]


def leave_nothing(store: JobStore, backend: Watched, world: World) -> None:
    """What is held when the job is over, if anything, is an orphan, and the reaper gives it back."""
    backend._crashes, world.down_until = set(), -1.0
    world.faults.clear()
    for _ in range(5):
        world.now += 10
        reap(store, lambda _: backend)
    assert not world.live() and not orphans(store, lambda _: backend)


@pytest.mark.slow
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(CASES)
@example(Case([Story(end="preempted", lag=1)], [], [], work=8, code=0))
@example(Case([], ["ok", "ok", "lost", "lost", "500"], [], work=2, code=0, forgets=False))
@example(Case([Story(deleting=0)], ["lost"], [], work=3, code=0, outage=(6, 60), crashes={1, 2, 4}))
@example(Case([Story(end="vanished"), Story(end="failed")], ["429"] * 6, [True] * 4, work=7, code=1, slices=2))
@example(Case([], ["slow"] * 4, [], work=5, code=0, busy=True, cancel=1))
@example(Case([], [], [], work=8, code=0, cancel=7))
def test_no_resource_leaks_or_doubles_and_every_attempt_ends_in_its_true_state(cloud, case):
    with tempfile.TemporaryDirectory() as root:
        play(cloud, case, Path(root))


@pytest.mark.thorough
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(CASES)
def test_no_resource_leaks_in_long_runs(cloud, case):
    with tempfile.TemporaryDirectory() as root:
        play(cloud, case, Path(root))
