"""Test GKE's manifests against the schemas of Kubernetes and JobSet and the values of Google's tables."""

import os
import signal
import subprocess
import time

import jsonschema
import pytest
from jobs.cloud.jobset_schema import JOBSET
from jobs.cloud.slices import OWNER, spec
from refusals import refuses

from dovetail.jobs.backends import jobset as manifests
from dovetail.jobs.job import Attempt
from dovetail.train.distributed import detect

pytestmark = pytest.mark.slow

kubernetes_validate = pytest.importorskip("kubernetes_validate")

# accelerator -> label, topology, hosts, chips per host, as Google's pages of Cloud TPU and of TPUs in GKE have them
TABLE = {
    "v4-64": ("tpu-v4-podslice", "2x4x4", 8, 4),
    "v5litepod-8": ("tpu-v5-lite-podslice", "2x4", 1, 8),
    "v5litepod-16": ("tpu-v5-lite-podslice", "4x4", 4, 4),
    "v5p-128": ("tpu-v5p-slice", "4x4x4", 16, 4),
    "v6e-256": ("tpu-v6e-slice", "16x16", 64, 4),
    "tpu7x-2x2x2": ("tpu7x", "2x2x2", 2, 4),
}
FULL = {
    "tier": "spot", "zones": ["us-east5-b"], "env": ["A=1"], "secrets": ["KEY=env:HOME"],
    "mounts": [{"source": "gs://data/corpus", "path": "/data", "read_only": True}],
    "gke": {
        "namespace": "lab", "queue": "tpus", "priority": "high", "service_account": "trainer", "bucket": "gs://b/x",
        "labels": ["team=blue"],
    },
}  # fmt: skip


def attempt(home, exclude=(), snapshot="", **given) -> Attempt:
    own = {"backend": "gke", "accelerator": "v5litepod-16", "environment": {"image": "img:1"}, "zones": [], "gcp": {}}
    one = spec(**{**own, **given})
    zone = one.zones[0] if one.zones else ""
    return Attempt("a1b2", 1, one, home, OWNER, zone, exclude=exclude, snapshot=snapshot)


def validated(one: Attempt) -> dict:
    """The JobSet, checked by its own schema; each Job of it by that of batch/v1."""
    made = manifests.jobset(one)
    jsonschema.validate(made, JOBSET)
    for job in made["spec"]["replicatedJobs"]:
        as_job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": job["template"]["spec"]}
        kubernetes_validate.validate(as_job, "1.37", strict=True)
    kubernetes_validate.validate(manifests.config_map(one), "1.37", strict=True)
    return made


def job_and_pod(made: dict) -> tuple[dict, dict, dict]:
    (replicated,) = made["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    return replicated, job, job["template"]["spec"]


@pytest.mark.parametrize("accelerator", TABLE)
def test_accelerators_have_the_values_of_gkes_tables(tmp_path, accelerator):
    label, topology, hosts, chips = TABLE[accelerator]
    made = validated(attempt(tmp_path, accelerator=accelerator))
    replicated, job, pod = job_and_pod(made)
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": label,
        "cloud.google.com/gke-tpu-topology": topology,
    }
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"google.com/tpu": chips} == container["resources"]["requests"]
    assert (replicated["replicas"], job["parallelism"], job["completions"], job["backoffLimit"]) == (1, hosts, hosts, 0)
    assert (job["completionMode"], pod["restartPolicy"]) == ("Indexed", "Never")
    alone = "alpha.jobset.sigs.k8s.io/exclusive-topology"
    assert made["metadata"].get("annotations") == ({alone: "cloud.google.com/gke-nodepool"} if hosts > 1 else None)
    assert made["spec"]["network"] == {"enableDNSHostnames": True}
    assert "suspend" not in made["spec"]


def test_all_fields_of_a_spec(tmp_path):
    one = attempt(tmp_path, exclude=("bad-node",), **FULL)
    made = validated(one)
    _, job, pod = job_and_pod(made)
    assert made["metadata"]["namespace"] == "lab" and made["spec"]["suspend"] is True
    assert made["metadata"]["labels"] == {
        "kueue.x-k8s.io/queue-name": "tpus", "dovetail-owner": OWNER, "dovetail-job": "a1b2", "dovetail-attempt": "1",
        "team": "blue",
    }  # fmt: skip
    assert pod["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    assert pod["nodeSelector"]["topology.kubernetes.io/zone"] == "us-east5-b"
    spot = {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"}
    assert spot in pod["tolerations"]
    assert (pod["priorityClassName"], pod["serviceAccountName"]) == ("high", "trainer")
    assert "bad-node" in str(pod["affinity"]) and "NotIn" in str(pod["affinity"])
    assert pod["containers"][0]["envFrom"] == [{"secretRef": {"name": "dt-a1b2-1"}}]
    buckets = {v["name"]: v["csi"]["volumeAttributes"] for v in pod["volumes"] if "csi" in v}
    assert (buckets["bucket"]["bucketName"], buckets["mount0"]["bucketName"]) == ("b", "data")
    assert "only-dir=corpus" in buckets["mount0"]["mountOptions"]
    assert job["template"]["metadata"]["annotations"] == {"gke-gcsfuse/volumes": "true"}
    (rule,) = made["spec"]["failurePolicy"]["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts" and made["spec"]["failurePolicy"]["maxRestarts"] == 0
    values = {"KEY": "x"}
    kubernetes_validate.validate(manifests.secret(one, values), "1.37", strict=True)


@pytest.mark.parametrize(
    ("given", "selector"),
    [
        ({"tier": "reservation", "reservation": "r"}, {"cloud.google.com/reservation-name": "r"}),
        ({"tier": "flex-start"}, {"cloud.google.com/gke-flex-start": "true"}),
    ],
)
def test_the_other_tiers(tmp_path, given, selector):
    _, _, pod = job_and_pod(validated(attempt(tmp_path, **given)))
    assert selector.items() <= pod["nodeSelector"].items()


def environment(container: dict, job: int, index: int) -> dict[str, str]:
    """What a pod finds, as Kubernetes works it out."""
    found = {"JOB_COMPLETION_INDEX": str(index)}
    for entry in container["env"]:
        path = entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
        if path:
            found[entry["name"]] = str(job if "job-index" in path else index)
        else:
            found[entry["name"]] = entry["value"].replace("$(JOB_INDEX)", found.get("JOB_INDEX", ""))
    return found


@pytest.mark.parametrize("given", [{"slices": 2}, {"accelerator": "2 x v5litepod-16"}])
def test_the_processes_of_several_slices_find_each_other(tmp_path, given):
    replicated, _, pod = job_and_pod(validated(attempt(tmp_path, **given)))
    assert replicated["replicas"] == 2
    clusters = [detect(environment(pod["containers"][0], job, index)) for job in range(2) for index in range(4)]
    assert [one.index for one in clusters] == list(range(8))
    assert {(one.coordinator, one.processes) for one in clusters} == {("dt-a1b2-1-slice-0-0.dt-a1b2-1:8476", 8)}


def test_a_single_host_is_alone(tmp_path):
    _, _, pod = job_and_pod(validated(attempt(tmp_path, accelerator="v6e-8")))
    assert detect(environment(pod["containers"][0], 0, 0)) is None


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"environment": {}}, "environment.image"),
        ({"accelerator": "v2-8"}, "accelerator"),
        ({"mounts": [{"source": "/data", "path": "/d"}]}, "mounts"),
        ({"gke": {"bucket": "b"}}, "gke.bucket"),
        ({"gke": {"labels": ["Team"]}}, "gke.labels"),
    ],
)
def test_specs_without_a_valid_jobset_are_refused(tmp_path, given, param):
    with refuses(param):
        manifests.check(attempt(tmp_path, **given).spec)


def start(tmp_path, command: str) -> subprocess.Popen:
    """start.sh as a container's first process, with its folders below tmp_path."""
    one = attempt(tmp_path, command=command)
    held = manifests.config_map(one)["data"]
    (tmp_path / "job").mkdir()
    for name, text in held.items():
        (tmp_path / "job" / name).write_text(text.replace("/dovetail", str(tmp_path)))
    told = {"JOB_INDEX": "1", "HOSTS": "4", "JOB_COMPLETION_INDEX": "2", "DOVETAIL_JOB_DIR": str(tmp_path / "run")}
    return subprocess.Popen(
        ["sh", str(tmp_path / "job" / "start.sh")], env=os.environ | told, stdout=subprocess.PIPE, text=True
    )


def test_the_container_runs_the_command_and_reports_its_exit_code(tmp_path):
    process = start(tmp_path, "echo rank $DOVETAIL_RANK; exit 7")
    assert (process.communicate(timeout=30)[0], process.returncode) == ("rank 6\n", 7)


def test_hosts_at_fault_are_in_the_pods_status(tmp_path):
    process = start(
        tmp_path, 'mkdir "$DOVETAIL_JOB_DIR/run"; echo found > "$DOVETAIL_JOB_DIR/run/health.jsonl"; exit 86'
    )
    assert process.communicate(timeout=30) == ("", None) and process.returncode == 86
    assert (tmp_path / "message").read_text() == "found\n"


def test_the_containers_signal_reaches_the_program_which_may_save(tmp_path):
    ready = tmp_path / "ready"
    process = start(tmp_path, f"sh -c \"trap 'echo saved; exit 85' TERM; touch {ready}; while :; do sleep 0.05; done\"")
    end = time.monotonic() + 30
    while not ready.exists() and time.monotonic() < end:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert (process.communicate(timeout=30)[0], process.returncode) == ("saved\n", 85)
