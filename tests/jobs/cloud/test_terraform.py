"""Test the Terraform written for a spec: valid HCL, with the values of the accelerator."""

import pytest
from jobs.cloud.slices import spec
from refusals import refuses

from dovetail.core.errors import RecipeError, UnsupportedError
from dovetail.jobs.terraform import hcl, terraform

pytestmark = pytest.mark.slow

hcl2 = pytest.importorskip("hcl2")


def gke(**given):
    return spec(**{"backend": "gke", "environment": {"image": "i"}, "gcp": {"project": "p"}, **given})


def parsed(text: str) -> dict[str, dict]:
    """Resources by `type.name`. The parser keeps the quotes of text."""
    found = {}
    for block in hcl2.loads(text)["resource"]:
        for kind, named in block.items():
            for name, body in named.items():
                found[f"{_bare(kind)}.{_bare(name)}"] = body
    return found


def _bare(text):
    return text.strip('"') if isinstance(text, str) else text


def values(body) -> dict:
    return {key: _bare(value) for key, value in body.items()}


def first(block):
    return values(block[0] if isinstance(block, list) else block)


DATA = {"source": "gs://corpus/text", "path": "/data", "read_only": True}
OUT = {"source": "gs://out", "path": "/out"}


def grants(made: dict[str, dict]) -> dict[str, str]:
    """Bucket -> role, of all that the job's programs are granted."""
    found = [values(body) for name, body in made.items() if name.startswith("google_storage_bucket_iam_member.")]
    assert all(body["member"] == "${local.member}" for body in found)
    return {body["bucket"]: body["role"].removeprefix("roles/storage.") for body in found}


def test_terraform_for_tpu_vms_has_only_what_the_job_does_not_create():
    """It asks for its queued resources by itself: nothing is billed from `terraform apply` on."""
    account = "trainer@lab.iam.gserviceaccount.com"
    gcp = {"project": "lab", "bucket": "gs://lab-jobs/a", "service_account": account}
    text = terraform(spec(gcp=gcp, mounts=[DATA, OUT], secrets=["T=gcp:hf", "U=env:U"], tier="spot"))
    made = parsed(text)
    assert {name.partition(".")[0] for name in made} == {
        "google_project_service", "google_storage_bucket", "google_storage_bucket_iam_member", "google_service_account",
        "google_secret_manager_secret_iam_member",
    }  # fmt: skip
    assert _bare(made["google_storage_bucket.jobs"]["name"]) == "lab-jobs"
    assert grants(made) == {"lab-jobs": "objectUser", "corpus": "objectViewer", "out": "objectUser"}
    assert values(made["google_service_account.jobs"])["account_id"] == "trainer"
    assert f'member = "serviceAccount:{account}"' in text
    assert _bare(made["google_secret_manager_secret_iam_member.secret_0"]["secret_id"]) == "hf"


@pytest.mark.parametrize("given", [{"tier": "flex-start"}, {"accelerator": "v4:4x4x16"}, {"accelerator": "2 x v4-64"}])
def test_a_job_without_buckets_needs_the_service_alone(given):
    assert set(parsed(terraform(spec(**given)))) == {"google_project_service.tpu"}


def test_a_job_that_names_no_account_acts_as_the_projects_own():
    text = terraform(spec(mounts=[DATA]))
    assert "google_compute_default_service_account" in text and "google_service_account" not in str(parsed(text))


def test_pods_are_granted_the_buckets_that_they_mount():
    """The driver uses the pod's Kubernetes account, which has no Google service account."""
    given = {"bucket": "gs://lab-jobs", "namespace": "lab", "service_account": "sa"}
    text = terraform(gke(gke=given, mounts=[DATA, {"source": "gs://lab-jobs/x", "path": "/x", "read_only": True}]))
    made = parsed(text)
    assert grants(made) == {"lab-jobs": "objectUser", "corpus": "objectViewer"}
    assert "principal://iam.googleapis.com/${local.pool}/subject/ns/${local.namespace}/sa/${local.account}" in text
    assert 'namespace = "lab"' in text and 'account   = "sa"' in text
    assert not any(name.startswith("google_service_account") for name in made)
    assert "google_storage_bucket.jobs" not in parsed(terraform(gke()))


@pytest.mark.parametrize(
    ("accelerator", "machine", "nodes", "topology"),
    [
        ("v4-64", "ct4p-hightpu-4t", 8, "2x4x4"),
        ("v5litepod-16", "ct5lp-hightpu-4t", 4, "4x4"),
        ("v5p-128", "ct5p-hightpu-4t", 16, "4x4x4"),
        ("v6e-256", "ct6e-standard-4t", 64, "16x16"),
        ("tpu7x-2x2x2", "tpu7x-standard-4t", 2, "2x2x2"),
    ],
)
def test_a_cluster_with_a_node_pool_for_each_slice(accelerator, machine, nodes, topology):
    made = parsed(terraform(gke(accelerator=accelerator, tier="spot")))
    pool = made["google_container_node_pool.slice"]
    assert "node_count" not in pool and scaling(pool) == (0, 0, nodes)
    placed = first(pool["placement_policy"])
    assert (placed["type"], placed["tpu_topology"]) == ("COMPACT", topology)
    config = first(pool["node_config"])
    assert (config["machine_type"], config["spot"]) == (machine, True)


def test_single_hosts_share_a_pool():
    made = parsed(terraform(gke(accelerator="v6e-8", slices=3)))
    pool = made["google_container_node_pool.slice"]
    assert "placement_policy" not in pool and scaling(pool) == (0, 0, "${var.slices}")


def scaling(pool) -> tuple:
    """(nodes at first, the fewest, the most): none is billed before a job wants it."""
    found = first(pool["autoscaling"])
    return pool["initial_node_count"], found["total_min_node_count"], found["total_max_node_count"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"tier": "flex-start", "ceiling": {"hours": 2}},
            ["flex_start       = true", '"7200s"'],
        ),
        ({"tier": "reservation", "reservation": "mine"}, ["SPECIFIC_RESERVATION", '["mine"]']),
        ({"gke": {"queue": "tpus"}}, ["charts/kueue"]),
    ],
)
def test_further_fields_of_a_spec(given, words):
    text = terraform(gke(**given))
    parsed(text)
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    ("given", "kind", "param"),
    [
        ({"backend": "local", "accelerator": ""}, RecipeError, "backend"),
        ({"accelerator": "tpu7x-2x2x2"}, UnsupportedError, "accelerator"),
    ],
)
def test_specs_without_terraform_are_refused(given, kind, param):
    with refuses(param, kind):
        terraform(spec(**given))


def test_values_are_escaped():
    assert hcl('a"${file("x")}') == '"a\\"$${file(\\"x\\")}"'


def test_a_missing_project_is_a_variable():
    text = terraform(spec(gcp={}, zones=["us-east5-b"]))
    variables = {_bare(name): body for block in hcl2.loads(text)["variable"] for name, body in block.items()}
    assert "default" not in variables["project"] and _bare(variables["zone"]["default"]) == "us-east5-b"
