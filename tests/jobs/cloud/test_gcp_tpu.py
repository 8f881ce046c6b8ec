"""Test the backend of queued resources with Google's client against a fake server on loopback."""

import time

import pytest
from jobs.cloud.fake_tpu import FakeTpu, Story
from jobs.cloud.loopback import FAULTS
from jobs.cloud.slices import OWNER, PROJECT, ZONE, attempt, vms
from refusals import refuses

from dovetail.jobs.backends.backend import RefusedJobError, UnavailableError
from dovetail.jobs.backends.gcp_tpu import GcpTpuBackend
from dovetail.jobs.backends.queued_resources import QueuedResources
from dovetail.jobs.backends.tpu_ssh import SshResult
from dovetail.jobs.job import Resource

NAME = f"projects/{PROJECT}/locations/{ZONE}/queuedResources/dt-a1b2-1"


@pytest.fixture(scope="module", autouse=True)
def _client():
    pytest.importorskip("google.cloud.tpu_v2", reason="pip install 'dovetail[gcp]'")


@pytest.fixture
def cloud():
    with FakeTpu() as server:
        yield server


def backend(cloud, tmp_path, **given) -> GcpTpuBackend:
    given.setdefault("ssh", vms(tmp_path))
    return GcpTpuBackend(tmp_path / "root", OWNER, QueuedResources(cloud.address, timeout=5.0), **given)


def handled(one, handle):
    return type(one)(**{**vars(one), "handle": handle})


def over(held, one, seconds=30.0):
    end = time.monotonic() + seconds
    while (seen := held.observe(one)).state == "running" and time.monotonic() < end:
        time.sleep(0.05)
    return seen


def test_from_the_request_to_the_end(cloud, tmp_path):
    held, one = backend(cloud, tmp_path), attempt(tmp_path / "home", command="echo done")
    one = handled(one, held.create(one))
    assert "/operations/" in one.handle
    states = []
    for now in range(4):
        cloud.world.now = now
        states.append(held.observe(one).detail)
    assert states == ["CREATING", "WAITING_FOR_RESOURCES", "WAITING_FOR_RESOURCES", "PROVISIONING"]
    cloud.world.now = 4
    assert held.observe(one).state == "running"
    assert over(held, one).state == "succeeded"
    assert held.logs(one, 0).text == "done\n"
    assert held.command(one, 0)[-1] == "sh"
    held.delete(one.resource)
    assert held.observe(one).detail == "it is being deleted"
    held.delete(one.resource)  # once more
    cloud.world.now = 6
    assert held.observe(one).state == "absent"
    held.delete(one.resource)  # and when it is gone
    assert held.logs(one, 0).text == "done\n"  # which came here while it ran


def body_of(cloud):
    (queued,) = cloud.world.made()
    return queued.body


@pytest.mark.parametrize(
    ("given", "tier"),
    [
        ({}, {}),
        ({"tier": "spot"}, {"spot": {}}),
        (
            {"tier": "reservation", "reservation": "mine"},
            {"guaranteed": {}, "reservationName": f"projects/{PROJECT}/locations/{ZONE}/reservations/mine"},
        ),
        ({"gcp": {"project": PROJECT, "wait_hours": 2}}, {"queueingPolicy": {"validUntilDuration": "7200s"}}),
    ],
)
def test_the_fields_of_a_request(cloud, tmp_path, given, tier):
    backend(cloud, tmp_path).create(attempt(tmp_path, **given))
    body = body_of(cloud)
    (node,) = body.pop("tpu")["nodeSpec"]
    assert body == tier
    assert node["nodeId"] == "dt-a1b2-1" and node["parent"] == f"projects/{PROJECT}/locations/{ZONE}"
    assert (node["node"]["acceleratorType"], node["node"]["runtimeVersion"]) == ("v5litepod-8", "v2-alpha-tpuv5-lite")
    assert node["node"]["labels"] == {"dovetail-owner": OWNER, "dovetail-job": "a1b2", "dovetail-attempt": "1"}


@pytest.mark.parametrize("given", [{"slices": 2}, {"accelerator": "2 x v5litepod-8"}])
def test_several_slices_are_one_request_and_their_hosts_are_ranked_by_slice(cloud, tmp_path, given):
    held, one = backend(cloud, tmp_path), attempt(tmp_path / "home", command="echo $DOVETAIL_RANK", **given)
    held.create(one)
    (node,) = body_of(cloud)["tpu"]["nodeSpec"]
    assert node["multisliceParams"] == {"nodeCount": 2, "nodeIdPrefix": "dt-a1b2-1"} and "nodeId" not in node
    cloud.world.now = 10
    assert held.observe(one).hosts == ("127.0.0.0", "127.0.0.1")
    assert over(held, one).state == "succeeded"
    assert [one.log(rank).read_text() for rank in range(2)] == ["0\n", "1\n"]


def test_a_topology_and_all_fields_of_gcp(cloud, tmp_path):
    gcp = {
        "project": PROJECT, "runtime": "my-image", "network": "n", "subnetwork": "s", "external_ips": False,
        "service_account": "a@b", "labels": ["team=blue"],
    }  # fmt: skip
    backend(cloud, tmp_path).create(attempt(tmp_path, accelerator="v4:4x4x16", gcp=gcp))
    (node,) = body_of(cloud)["tpu"]["nodeSpec"]
    node = node["node"]
    assert "acceleratorType" not in node and node["acceleratorConfig"]["topology"] == "4x4x16"
    assert node["runtimeVersion"] == "my-image" and node["labels"]["team"] == "blue"
    assert node["networkConfig"]["network"] == "n" and not node["networkConfig"].get("enableExternalIps")
    assert node["serviceAccount"]["email"] == "a@b"


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"zones": []}, "zones"),
        ({"accelerator": "tpu7x-2x2x2"}, "accelerator"),
        ({"environment": {"image": "x"}}, "environment.image"),
        ({"mounts": [{"source": "/data", "path": "/data"}]}, "mounts"),
        ({"gcp": {"project": PROJECT, "labels": ["Team=x"]}}, "gcp.labels"),
        ({"secrets": ["KEY=env:NOT_SET_ANYWHERE"]}, "secrets"),
    ],
)
def test_bad_specs_are_refused_before_any_request(cloud, tmp_path, given, param):
    with refuses(param, RefusedJobError):
        backend(cloud, tmp_path).create(attempt(tmp_path, **given))
    assert not cloud.world.requests


def test_a_project_must_be_known(cloud, tmp_path, monkeypatch):
    monkeypatch.delenv("GOOGLE_CLOUD_PROJECT", raising=False)
    with refuses("gcp.project", RefusedJobError, naming="GOOGLE_CLOUD_PROJECT"):
        backend(cloud, tmp_path).create(attempt(tmp_path, gcp={}))


def test_an_attempt_stays_in_the_project_of_its_creation(cloud, tmp_path, monkeypatch):
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "first")
    held, one = backend(cloud, tmp_path), attempt(tmp_path, gcp={})
    one = handled(one, held.create(one))
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "second")
    assert held.observe(one).state == "waiting"
    held.delete(one.resource)
    cloud.world.now = 5
    assert not cloud.world.live()


# --- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failed_observation_is_unknown_and_the_next_one_succeeds(cloud, tmp_path, fault):
    held, one = backend(cloud, tmp_path), attempt(tmp_path)
    held._service._timeout = 0.2 if fault == "slow" else 5.0
    held.create(one)
    cloud.world.faults.append(fault)
    assert held.observe(one).state == "unknown"
    held._service._timeout = 5.0
    assert held.observe(one).state == "waiting"
    cloud.world.faults.append("500")
    with pytest.raises(UnavailableError):
        held.list()


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("forgets", [True, False])
def test_a_create_is_repeated_and_makes_one(cloud, tmp_path, fault, forgets):
    held, one = backend(cloud, tmp_path), attempt(tmp_path)
    held._service._timeout = 0.2 if fault == "slow" else 5.0
    cloud.world.forgets_request_ids = forgets
    cloud.world.faults.append(fault)
    with pytest.raises(UnavailableError) as error:
        held.create(one)
    assert not error.value.elsewhere
    held._service._timeout = 5.0
    held.create(one)
    held.create(one)
    assert len(cloud.world.made()) == 1


def test_a_resource_of_another_owner_is_neither_used_nor_deleted(cloud, tmp_path):
    backend(cloud, tmp_path).create(attempt(tmp_path))
    theirs = GcpTpuBackend(tmp_path / "other", "them", QueuedResources(cloud.address), vms(tmp_path))
    one = attempt(tmp_path)
    one = type(one)(**{**vars(one), "owner": "them"})
    with refuses(code="not_ours"):
        theirs.create(one)
    assert theirs.observe(one).state == "absent" and theirs.list() == []
    theirs.delete(one.resource)
    assert list(cloud.world.live()) == [NAME]


@pytest.mark.parametrize(
    ("refusal", "elsewhere"),
    [((429, "Quota 'TPUV5sPreemptible' exhausted"), True), ((429, "slow down"), False), ((503, "later"), False)],
)
def test_a_temporary_refusal_is_unavailable(cloud, tmp_path, refusal, elsewhere):
    cloud.world.refusal = refusal
    with pytest.raises(UnavailableError) as error:
        backend(cloud, tmp_path).create(attempt(tmp_path))
    assert error.value.elsewhere is elsewhere and refusal[1] in str(error.value)


@pytest.mark.parametrize("refusal", [(400, "no such accelerator here"), (403, "permission denied"), (404, "no zone")])
def test_a_permanent_refusal_is_a_user_error(cloud, tmp_path, refusal):
    cloud.world.refusal = refusal
    with refuses(code="cloud_refused", naming=refusal[1]):
        backend(cloud, tmp_path).create(attempt(tmp_path))


@pytest.mark.parametrize(
    ("end", "seen"),
    [
        ("preempted", ["running", "preempted", "suspended", "suspended"]),
        ("vanished", ["running", "preempted", "suspended", "suspended"]),
        ("terminated", ["running", "preempted", "suspended", "suspended"]),
        ("suspended", ["running", "suspended", "suspended", "suspended"]),
        ("failed", ["suspended", "suspended", "suspended", "suspended"]),  # no capacity: another zone may have it
    ],
)
def test_how_a_slice_is_lost(cloud, tmp_path, end, seen):
    cloud.world.stories.append(Story(end=end))
    held, one = backend(cloud, tmp_path), attempt(tmp_path / "home", command="sleep 0.1")
    held.create(one)
    found = []
    for now in (4, 9, 11, 14):
        cloud.world.now = now
        found.append(held.observe(one).state)
    assert found == seen
    held.delete(one.resource)
    cloud.world.now = 20
    assert held.observe(one).state == "absent" and not cloud.world.live()


def test_an_early_delete_is_not_taken_as_done(cloud, tmp_path):
    cloud.world.busy_while_creating = True
    held, one = backend(cloud, tmp_path), attempt(tmp_path)
    held.create(one)
    with pytest.raises(UnavailableError):
        held.delete(one.resource)
    cloud.world.now = 2
    held.delete(one.resource)
    cloud.world.now = 4
    assert not cloud.world.live()


def test_a_waiting_request_is_deleted_on_stop(cloud, tmp_path):
    held, one = backend(cloud, tmp_path), attempt(tmp_path)
    held.create(one)
    held.stop(one, 60)
    assert held.observe(one).state == "preempted"
    cloud.world.now = 5
    assert not cloud.world.live() and held.observe(one).state == "absent"
    held.stop(one, 60)  # nothing happens: it is gone


def test_listed_resources_are_ours_and_can_be_deleted_by_handle(cloud, tmp_path):
    held = backend(cloud, tmp_path)
    assert held.list() == []
    for number in (1, 2):
        held.create(attempt(tmp_path, number))
    held.create(attempt(tmp_path, 3, zones=["europe-west4-a"]))
    other = GcpTpuBackend(tmp_path / "other", "them", QueuedResources(cloud.address), vms(tmp_path))
    theirs = attempt(tmp_path, 4)
    other.create(type(theirs)(**{**vars(theirs), "owner": "them"}))
    # another process, which shares the home of jobs alone
    listed = backend(cloud, tmp_path).list()
    assert sorted(one.attempt for one in listed) == [("a1b2", 1), ("a1b2", 2), ("a1b2", 3)]
    assert {one.zone for one in listed} == {ZONE, "europe-west4-a"}
    for one in listed:
        backend(cloud, tmp_path).delete(one)
    cloud.world.now = 10
    assert [name.rpartition("/")[2] for name in cloud.world.live()] == ["dt-a1b2-4"]


def test_a_partial_list_is_unavailable(cloud, tmp_path):
    held = backend(cloud, tmp_path)
    held.create(attempt(tmp_path))
    cloud.world.unreachable = [f"projects/p/locations/{ZONE}"]
    with refuses(None, UnavailableError, code="backend_unavailable"):
        held.list()


def test_a_node_is_an_orphan_only_when_its_queued_resource_is_gone(cloud, tmp_path):
    held = backend(cloud, tmp_path)
    held.create(attempt(tmp_path, slices=2))
    cloud.world.now = 5
    assert [one.attempt for one in held.list()] == [("a1b2", 1)]
    (queued,) = cloud.world.live().values()
    queued.hidden = True  # deleted without its nodes
    nodes = held.list()
    assert [one.attempt for one in nodes] == [("a1b2", 1)] * 2 and all("/nodes/" in one.handle for one in nodes)


def test_a_resource_of_an_unanswered_create_is_deleted_by_name(cloud, tmp_path):
    held, one = backend(cloud, tmp_path), attempt(tmp_path)
    cloud.world.faults.append("lost")
    with pytest.raises(UnavailableError):
        held.create(one)
    assert cloud.world.live()
    held.delete(Resource(one.name, one.zone))
    cloud.world.now = 10
    assert not cloud.world.live()


# --- flex-start -------------------------------------------------------------------------------------------------------


def test_flex_start_is_asked_of_gcloud(cloud, tmp_path):
    asked = []

    def run(words, given, timeout):
        asked.append(words)
        return SshResult(0, b"", "")

    one = attempt(tmp_path, tier="flex-start", accelerator="2 x v6e-16", ceiling={"hours": 4})
    assert backend(cloud, tmp_path, run=run).create(one) == NAME
    (words,) = asked
    assert words[:6] == ["gcloud", "alpha", "compute", "tpus", "queued-resources", "create"]
    assert {
        "--provisioning-model=flex-start", "--max-run-duration=14400s", "--accelerator-type=v6e-16", "--node-count=2",
        f"--zone={ZONE}", "--runtime-version=v2-alpha-tpuv6e",
    } <= set(words)  # fmt: skip


@pytest.mark.parametrize(
    ("says", "error"),
    [
        ("ERROR: INVALID_ARGUMENT: no", ValueError),
        ("ERROR: could not reach", UnavailableError),
        ("ERROR: Quota exceeded", UnavailableError),
    ],
)
def test_errors_of_gcloud_are_reported(cloud, tmp_path, says, error):
    held = backend(cloud, tmp_path, run=lambda *_: SshResult(1, b"", says))
    with pytest.raises(error):
        held.create(attempt(tmp_path, tier="flex-start"))
