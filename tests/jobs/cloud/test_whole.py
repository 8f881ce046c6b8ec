"""A job on each cloud from its creation to its end, as the daemon would run it: only the far ends are stand-ins."""

import os
import time
from pathlib import Path

import pytest
from jobs.cloud.fake_kube import FakeKube
from jobs.cloud.fake_tpu import FakeTpu, Story
from jobs.cloud.slices import spec

from dovetail.jobs.backends.choose import chooser
from dovetail.jobs.reaper import orphans
from dovetail.jobs.store import Store
from dovetail.jobs.supervisor import Supervisor

# gcloud compute tpus tpu-vm ssh NODE ...: a folder for each VM
GCLOUD = """#!/bin/sh
for word in "$@"; do case "$word" in --worker=*) worker=${word#*=};; --command=*) line=${word#*=};; esac; done
export HOME="$VMS/$5-$worker"; mkdir -p "$HOME"; exec sh -c "$line"
"""


@pytest.fixture
def store(tmp_path):
    made = Store(tmp_path / "root")
    yield made
    made.close()


def supervise(store: Store, id: str, step, seconds=40.0) -> None:
    supervisor, end = Supervisor(store, chooser(store.root, store.owner), looks=0.0), time.monotonic() + seconds
    while not store.job(id).is_over:
        assert time.monotonic() < end, store.job(id)
        supervisor.tick()
        step(store.last(id))
        time.sleep(0.02)
    assert orphans(store, supervisor.backend) == []


def test_a_spot_slice_is_preempted_and_the_next_zone_finishes(store, tmp_path, monkeypatch):
    pytest.importorskip("google.cloud.tpu_v2", reason="pip install 'dovetail[gcp]'")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "gcloud").write_text(GCLOUD)
    (tmp_path / "bin" / "gcloud").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("VMS", str(tmp_path / "vms"))
    command = 'echo attempt $DOVETAIL_ATTEMPT; [ "$DOVETAIL_ATTEMPT" = 2 ] || sleep 60'
    with FakeTpu() as cloud:
        monkeypatch.setenv("DOVETAIL_TPU_ENDPOINT", cloud.address)
        cloud.world.stories.append(Story(end="preempted"))
        wanted = spec(command=command, tier="spot", zones=["us-east5-b", "us-west1-c"], retries={"backoff": 0})
        id = store.add(wanted).id

        def step(last) -> None:
            """The second has all the time it needs."""
            if not (last.number == 2 and last.phase == "live" and last.state == "running"):
                cloud.world.now += 1

        supervise(store, id, step)
        job, tries = store.job(id), store.attempts(id)
        assert (job.status, job.preemptions, job.attempts) == ("succeeded", 1, 2)
        assert [(one.outcome, one.zone) for one in tries] == [("preemption", "us-east5-b"), ("success", "us-west1-c")]
        assert [(store.home(id) / "attempts" / n / "rank0.log").read_text() for n in "12"] == [
            "attempt 1\n",
            "attempt 2\n",
        ]
        cloud.world.now += 10
        assert not cloud.world.live()
    for pid in (tmp_path / "vms").glob("*/.dovetail/attempts/*/pid"):  # the preempted VM's, which is still here
        if not (Path(pid).parent / "exit").exists():
            os.killpg(int(pid.read_text()), 9)


def test_a_program_that_fails_on_gke_is_tried_again(store, monkeypatch):
    pytest.importorskip("kubernetes", reason="pip install 'dovetail[gke]'")
    with FakeKube() as cluster:
        monkeypatch.setenv("DOVETAIL_KUBE_ENDPOINT", cluster.address)
        retries = {"backoff": 0, "failures": 1}
        wanted = spec(
            backend="gke", environment={"image": "i"}, gcp={}, zones=[], retries=retries, accelerator="v5e-16"
        )
        id = store.add(wanted).id

        def step(last) -> None:
            """What the cluster does between two looks."""
            name = f"dt-{id}-{last.number}"
            if last.phase == "live" and last.state == "waiting" and ("default", "JobSet", name) in cluster.world.held:
                cluster.run(name)
            elif last.state == "running" and last.phase == "live":
                cluster.finish(name, [0, 3, 0, 0] if last.number == 1 else [0] * 4)
            elif last.phase == "ending":
                cluster.end_pods(name)

        supervise(store, id, step)
        first, second = store.attempts(id)
        assert (first.outcome, first.exit_code, first.failed_rank) == ("failure", 3, 1)
        assert (second.outcome, store.job(id).status) == ("success", "succeeded")
        assert not cluster.world.held
