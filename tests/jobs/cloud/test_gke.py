"""Test the GKE backend with the Kubernetes client against a fake cluster on loopback."""

import io
import tarfile

import pytest
import yaml
from jobs.cloud.fake_kube import FakeKube
from jobs.cloud.loopback import FAULTS
from jobs.cloud.slices import OWNER
from jobs.cloud.test_jobset import attempt
from refusals import refuses

from dovetail.core.errors import RecipeError, UserError
from dovetail.jobs import secrets
from dovetail.jobs.backends.backend import UnavailableError
from dovetail.jobs.backends.gke import GkeBackend, preview, render
from dovetail.jobs.backends.kube import KubeNamespace
from dovetail.jobs.backends.tpu_ssh import SshResult
from dovetail.jobs.job import Attempt, Resource

pytestmark = pytest.mark.slow
NAME = "dt-a1b2-1"


@pytest.fixture(scope="module", autouse=True)
def _client():
    pytest.importorskip("kubernetes", reason="pip install 'dovetail[gke]'")


@pytest.fixture
def cluster():
    with FakeKube() as server:
        yield server


def backend(cluster, tmp_path, owner=OWNER, **given) -> GkeBackend:
    def connect(context: str, name: str) -> KubeNamespace:
        return KubeNamespace(context, name, cluster.address, timeout=5.0)

    return GkeBackend(tmp_path / "root", owner, connect, **{"current": lambda: "", **given})


def changed(one: Attempt, **more) -> Attempt:
    return type(one)(**{**vars(one), **more})


def test_from_the_request_to_the_end(cluster, tmp_path):
    held, one = backend(cluster, tmp_path), attempt(tmp_path / "home")
    one = changed(one, handle=held.create(one))
    assert one.handle == "default@" and cluster.world.made == [("ConfigMap", NAME), ("JobSet", NAME)]
    assert held.observe(one).detail == "0 of 1 slices are ready"
    cluster.run(NAME, phase="Pending")
    waiting = held.observe(one)
    assert waiting.state == "waiting" and "0/4 nodes are available" in waiting.detail
    cluster.run(NAME)
    seen = held.observe(one)
    assert (seen.state, seen.hosts) == ("running", ("node-0-0", "node-0-1", "node-0-2", "node-0-3"))
    cluster.world.logs[f"{NAME}-slice-0-1-0"] = b"step 1\n"
    assert held.logs(one, 1).text == "step 1\n"
    cluster.world.logs[f"{NAME}-slice-0-1-0"] = b"step 1\nstep 2\n"
    part = held.logs(one, 1, since=7)
    assert (part.text, part.position) == ("step 2\n", 14)
    assert held.command(one, 1) == ["kubectl", "--namespace=default", "exec", "-it", f"{NAME}-slice-0-1-0", "--", "sh"]
    cluster.finish(NAME, [0, 0, 0, 0])
    assert held.observe(one).state == "succeeded"
    held.delete(one.resource)
    assert held.observe(one).detail == "its pods are ending"
    held.delete(one.resource)
    cluster.end_pods(NAME)
    assert held.observe(one).state == "absent" and not cluster.world.held
    held.delete(one.resource)
    assert held.logs(one, 1).text == "step 1\nstep 2\n"


def test_a_replaced_pod_continues_the_same_log(cluster, tmp_path):
    held, one = backend(cluster, tmp_path), attempt(tmp_path / "home")
    held.create(one)
    for number, text in enumerate((b"first\n", b"second\n")):
        cluster.run(NAME, number)
        cluster.world.logs[f"{NAME}-slice-0-0-{number}"] = text
        held.logs(one, 0)
    assert held.logs(one, 0).text == "first\nsecond\n"
    seen = held.observe(one)
    assert "restarted 1 times" in seen.detail and seen.restarts == 1


def test_the_first_rank_that_failed_is_named(cluster, tmp_path):
    held, one = backend(cluster, tmp_path), attempt(tmp_path / "home")
    held.create(one)
    cluster.run(NAME)
    cluster.world.logs[f"{NAME}-slice-0-2-0"] = b"ValueError: no\n"
    cluster.finish(NAME, [89, 0, 3, 134])
    seen = held.observe(one)
    assert (seen.state, seen.exit_code, seen.failed_rank) == ("failed", 3, 2)
    assert one.log(2).read_text() == "ValueError: no\n"  # before the pods are deleted


def test_an_evicted_pod_is_a_preemption(cluster, tmp_path):
    held, one = backend(cluster, tmp_path), attempt(tmp_path / "home")
    held.create(one)
    cluster.run(NAME)
    cluster.finish(NAME, [143] * 4, disrupted=True)
    assert held.observe(one).state == "preempted"


def test_a_job_suspended_by_kueue_is_queued(cluster, tmp_path):
    held, one = backend(cluster, tmp_path), attempt(tmp_path / "home", gke={"queue": "tpus"})
    held.create(one)
    assert held.observe(one).detail == "in Kueue's queue tpus"


def test_a_stop_signals_the_pods_and_deletes_the_jobset_after_them(cluster, tmp_path):
    held, one = backend(cluster, tmp_path), attempt(tmp_path / "home", ceiling={"grace": 45})
    held.create(one)
    pod = cluster.jobset(NAME)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 45
    cluster.run(NAME)
    held.stop(one, 45)
    assert held.observe(one).detail == "its pods are ending"
    cluster.end_pods(NAME)
    assert held.observe(one).state == "absent"


def test_a_stop_without_grace_ends_the_pods_at_once(cluster, tmp_path):
    held, one = backend(cluster, tmp_path), attempt(tmp_path / "home", ceiling={"grace": 3600})
    held.create(one)
    cluster.run(NAME)
    held.stop(one, 3600)
    assert cluster.pods(NAME) != []
    held.stop(one, 0.0)
    assert cluster.pods(NAME) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failed_observation_is_unknown(cluster, tmp_path, fault):
    held, one = backend(cluster, tmp_path), attempt(tmp_path / "home")
    held.create(one)
    held._space(one)._timeout = 0.2 if fault == "slow" else 5.0
    cluster.world.faults.append(fault)
    assert held.observe(one).state == "unknown"
    held._space(one)._timeout = 5.0
    assert held.observe(one).state == "waiting"


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("after", [0, 1])
def test_a_create_is_repeated_and_makes_one(cluster, tmp_path, fault, after):
    held, one = backend(cluster, tmp_path), attempt(tmp_path / "home")
    held._space(one)._timeout = 0.2 if fault == "slow" else 5.0
    cluster.world.faults.extend(["ok"] * after + [fault])
    with pytest.raises(UnavailableError):
        held.create(one)
    held._space(one)._timeout = 5.0
    held.create(one)
    assert sorted(cluster.world.made) == [("ConfigMap", NAME), ("JobSet", NAME)]


@pytest.mark.parametrize(
    ("refusal", "kind", "code"),
    [((403, "exceeded quota"), UnavailableError, "backend_unavailable"), ((422, "no"), UserError, "cloud_refused")],
)
def test_refusals_of_the_cluster_are_reported(cluster, tmp_path, refusal, kind, code):
    cluster.world.refusal = refusal
    with refuses(None, kind, code, naming=refusal[1]):
        backend(cluster, tmp_path).create(attempt(tmp_path / "home"))


def test_objects_of_another_owner_are_neither_used_nor_deleted(cluster, tmp_path):
    backend(cluster, tmp_path).create(attempt(tmp_path / "home"))
    theirs, one = backend(cluster, tmp_path / "other", "them"), changed(attempt(tmp_path), owner="them")
    with refuses(code="not_ours"):
        theirs.create(one)
    assert theirs.observe(one).state == "absent" and theirs.list() == []
    theirs.delete(one.resource)
    assert len(cluster.world.held) == 2


def test_listed_resources_are_ours_and_can_be_deleted_by_handle(cluster, tmp_path):
    held = backend(cluster, tmp_path)
    held.create(attempt(tmp_path / "home"))
    held.create(changed(attempt(tmp_path / "home", gke={"namespace": "lab"}), number=2))
    cluster.world.faults.extend(["ok", "500"])  # of the third, only the ConfigMap is made
    with pytest.raises(UnavailableError):
        held.create(changed(attempt(tmp_path / "home"), number=3))
    listed = backend(cluster, tmp_path).list()
    assert sorted(one.attempt for one in listed) == [("a1b2", 1), ("a1b2", 2), ("a1b2", 3)]
    for one in listed:
        backend(cluster, tmp_path).delete(one)
    assert not cluster.world.held


def test_an_attempt_stays_on_the_cluster_of_its_creation(cluster, tmp_path):
    chosen = ["first"]
    held, one = backend(cluster, tmp_path, current=lambda: chosen[0]), attempt(tmp_path / "home")
    one = changed(one, handle=held.create(one))
    chosen[0] = "second"
    assert one.handle == "default@first"
    assert held._space(one).context == "first" and held.list()[0].handle == "default@first"
    cluster.run(NAME)
    assert "--context=first" in held.command(one, 0)


def test_an_attempt_without_a_handle_is_searched_on_every_cluster(cluster, tmp_path):
    held, one = backend(cluster, tmp_path), attempt(tmp_path / "home", gke={"namespace": "lab"})
    held.create(one)
    held.delete(Resource(one.name))
    assert not cluster.world.held


def test_secrets_are_in_a_secret_and_are_not_shown(cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("TOKEN_HERE", "s3cret")
    one = attempt(tmp_path / "home", secrets=["TOKEN=env:TOKEN_HERE"])
    one.home.mkdir()
    secrets.keep(one.home, secrets.take(one.spec))
    monkeypatch.delenv("TOKEN_HERE")  # a supervisor has its own environment
    backend(cluster, tmp_path).create(one)
    assert cluster.world.held["default", "Secret", NAME]["stringData"] == {"TOKEN": "s3cret"}
    assert "s3cret" not in str(cluster.jobset(NAME)) + render(one)
    for text in (render(one), preview(one.spec)):
        assert [body["kind"] for body in yaml.safe_load_all(text)] == ["ConfigMap", "Secret", "JobSet"]


def with_code(home, size: int) -> None:
    home.mkdir(parents=True, exist_ok=True)
    with tarfile.open(home / "code.tar.gz", "w") as tar:
        entry = tarfile.TarInfo("data.bin")
        entry.size = size
        tar.addfile(entry, io.BytesIO(b"x" * size))


def test_small_code_is_in_the_config_map_and_large_code_in_the_bucket(cluster, tmp_path):
    home, copied = tmp_path / "home", []

    def run(words, given, timeout):
        copied.append(list(words))
        return SshResult(0, b"", "")

    with_code(home, 1000)
    backend(cluster, tmp_path, run=run).create(attempt(home, snapshot="d"))
    assert "code.tar.gz" in cluster.world.held["default", "ConfigMap", NAME]["binaryData"] and not copied
    with_code(home, 2_000_000)
    with refuses("gke.bucket", RecipeError):
        backend(cluster, tmp_path, run=run).create(changed(attempt(home, snapshot="d"), number=2))
    large = changed(attempt(home, snapshot="d", gke={"bucket": "gs://b/x"}), number=3)
    backend(cluster, tmp_path, run=run).create(large)
    assert copied == [["gcloud", "storage", "cp", str(home / "code.tar.gz"), "gs://b/x/jobs/a1b2/"]]
    assert "binaryData" not in cluster.world.held["default", "ConfigMap", large.name]


def test_hosts_at_fault_are_fetched(cluster, tmp_path):
    held, one = backend(cluster, tmp_path), attempt(tmp_path / "home")
    held.create(one)
    cluster.run(NAME)
    cluster.finish(NAME, [86, 86, 0, 0], message='{"what": "quarantine", "at_fault": {"hosts": ["n7"]}}\n')
    assert held.observe(one).exit_code == held.observe(one).exit_code == 86
    assert (one.home / "run" / "health.jsonl").read_text().count("n7") == 1  # reported by two pods, and fetched twice
