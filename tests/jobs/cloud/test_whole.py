"""Run a job on each cloud from creation to end through the supervisor, with fake clouds."""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from jobs.cloud.fake_kube import FakeKube
from jobs.cloud.fake_tpu import FakeTpu, Story
from jobs.cloud.slices import spec
from refusals import refuses

import dovetail as dt
from dovetail.core.errors import RecipeError
from dovetail.jobs import call
from dovetail.jobs.backends import chooser
from dovetail.jobs.store import JobStore
from dovetail.jobs.supervisor import JobSupervisor, orphans

pytestmark = pytest.mark.slow

# gcloud compute tpus tpu-vm ssh NODE ...: a folder for each VM. gcloud storage cp: a folder for all buckets.
GCLOUD = """#!/bin/sh
if [ "$1" = storage ]; then
    shift 2; for word in "$@"; do to=$(echo "$word" | sed "s,gs://,$VMS/,"); done; mkdir -p "$to"
    while [ $# -gt 1 ]; do cp $(echo "$1" | sed "s,gs://,$VMS/,") "$to" || exit 1; shift; done; exit 0
fi
for word in "$@"; do case "$word" in --worker=*) worker=${word#*=};; --command=*) line=${word#*=};; esac; done
export HOME="$VMS/$5-$worker"; mkdir -p "$HOME"; exec sh -c "$line"
"""


@pytest.fixture
def store(tmp_path):
    made = JobStore(tmp_path / "root")
    yield made
    made.close()


def supervise(store: JobStore, id: str, step, seconds=40.0) -> None:
    supervisor, end = JobSupervisor(store, chooser(store.root, store.owner), looks=0.0), time.monotonic() + seconds
    while not store.job(id).is_over:
        assert time.monotonic() < end, store.job(id)
        supervisor.tick()
        step(store.last(id))
        time.sleep(0.02)
    assert orphans(store, supervisor.backend) == []


@pytest.fixture
def gcloud(tmp_path, monkeypatch) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "gcloud").write_text(GCLOUD)
    (tmp_path / "bin" / "gcloud").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("VMS", str(tmp_path / "vms"))


@pytest.fixture
def remote(store, monkeypatch, gcloud):
    """@dt.remote into this store, whose supervisor is the test."""
    monkeypatch.setenv("DOVETAIL_JOBS", str(store.root))
    monkeypatch.setattr("dovetail.jobs.presence.ensure", lambda root: None)
    return dt.remote


def test_a_function_runs_on_a_slice(store, remote, tmp_path, monkeypatch):
    """The environment there is a venv of the slice's own, and nothing of it is this machine's but the code."""
    pytest.importorskip("google.cloud.tpu_v2", reason="pip install 'dovetail[gcp]'")
    activate = tmp_path / "venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.write_text(f"PATH={Path(sys.executable).parent}:$PATH; export PYTHONPATH={Path(dt.__file__).parents[1]}\n")
    where = {"backend": "gcp-tpu", "accelerator": "v5litepod-8", "zones": ["us-east5-b"], "gcp": {"project": "p"}}
    with FakeTpu() as cloud:
        monkeypatch.setenv("DOVETAIL_TPU_ENDPOINT", cloud.address)
        scale = np.arange(300_000)
        handle = remote(**where, environment={"venv": str(tmp_path / "venv")})(
            lambda x: (x * scale, os.environ["HOME"])
        )
        handle = handle.submit(2)
        supervise(store, handle.id, lambda last: setattr(cloud.world, "now", cloud.world.now + 1))
        value, home = handle.result()
        assert np.array_equal(value, 2 * scale) and home.startswith(str(tmp_path / "vms"))
    with refuses("environment", RecipeError):
        remote(**where)(print)


def test_a_function_runs_on_gke(store, remote, tmp_path, monkeypatch):
    pytest.importorskip("kubernetes", reason="pip install 'dovetail[gke]'")
    where = {"backend": "gke", "accelerator": "v6e-8", "environment": {"image": "i"}}
    with FakeKube() as cluster:
        monkeypatch.setenv("DOVETAIL_KUBE_ENDPOINT", cluster.address)
        handle = remote(**where, gke={"bucket": "gs://b"})(lambda x: {}[x]).submit("nothing")
        name = f"dt-{handle.id}-1"

        def step(last) -> None:
            """What the pod does in its image, with the bucket mounted."""
            if last.phase == "live" and last.state == "waiting":
                cluster.run(name)
            elif last.phase == "live":
                (secret,) = [one for (_, kind, _), one in cluster.world.held.items() if kind == "Secret"]
                monkeypatch.setenv("DOVETAIL_CALL_KEY", secret["stringData"]["DOVETAIL_CALL_KEY"])
                assert '"secretRef"' in json.dumps(cluster.jobset(name))
                cluster.finish(name, [call.main(tmp_path / "vms" / "b" / "jobs" / handle.id / "call")])
            elif last.phase == "ending":
                cluster.end_pods(name)

        supervise(store, handle.id, step)
        with pytest.raises(KeyError, match="nothing"):
            handle.result()
    with refuses("gke.bucket", RecipeError):
        remote(**where)(print)


@pytest.mark.usefixtures("gcloud")
def test_a_spot_slice_is_preempted_and_the_next_zone_finishes(store, tmp_path, monkeypatch):
    pytest.importorskip("google.cloud.tpu_v2", reason="pip install 'dovetail[gcp]'")
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
