"""The Terraform that is written for a spec: valid HCL, with the values of the accelerator's name."""

import pytest
from jobs.cloud.slices import spec

from dovetail.jobs.terraform import hcl, terraform

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


def test_tpu_vms_as_a_queued_resource():
    made = parsed(terraform(spec(accelerator="2 x v4-64")))
    node = first(first(first(made["google_tpu_v2_queued_resource.slice"]["tpu"])["node_spec"])["node"])
    assert (node["accelerator_type"], node["runtime_version"]) == ("v4-64", "tpu-ubuntu2204-base")
    assert "default     = 2" in terraform(spec(accelerator="2 x v4-64"))
    assert {"google_storage_bucket.jobs", "google_service_account.jobs"} <= made.keys()


@pytest.mark.parametrize(
    ("given", "key"), [({"tier": "spot"}, "spot"), ({"tier": "reservation", "reservation": "r"}, "reserved")]
)
def test_tpu_vms_of_another_tier(given, key):
    made = parsed(terraform(spec(**given)))
    assert "google_tpu_v2_queued_resource.slice" not in made
    assert first(made["google_tpu_v2_vm.slice"]["scheduling_config"])[key] is True


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
    assert pool["node_count"] == nodes
    placed = first(pool["placement_policy"])
    assert (placed["type"], placed["tpu_topology"]) == ("COMPACT", topology)
    config = first(pool["node_config"])
    assert (config["machine_type"], config["spot"]) == (machine, True)


def test_single_hosts_share_a_pool():
    made = parsed(terraform(gke(accelerator="v6e-8", slices=3)))
    pool = made["google_container_node_pool.slice"]
    assert "placement_policy" not in pool and "var.slices" in str(pool["node_count"])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"tier": "flex-start", "ceiling": {"hours": 2}},
            ["flex_start       = true", '"7200s"', "total_min_node_count"],
        ),
        ({"tier": "reservation", "reservation": "mine"}, ["SPECIFIC_RESERVATION", '["mine"]']),
        ({"gke": {"namespace": "lab", "service_account": "sa"}}, ["svc.id.goog[lab/sa]"]),
    ],
)
def test_what_else_a_spec_says(given, words):
    text = terraform(gke(**given))
    parsed(text)
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"backend": "local", "accelerator": ""}, "backend gcp-tpu and gke"),
        ({"tier": "flex-start"}, "flex-start"),
        ({"accelerator": "tpu7x-2x2x2"}, "backend gke"),
    ],
)
def test_what_there_is_no_terraform_for(given, words):
    with pytest.raises(ValueError, match=words):
        terraform(spec(**given))


def test_a_value_cannot_break_out():
    assert hcl('a"${file("x")}') == '"a\\"$${file(\\"x\\")}"'


def test_a_missing_project_is_asked_for():
    text = terraform(spec(gcp={}, zones=["us-east5-b"]))
    variables = {_bare(name): body for block in hcl2.loads(text)["variable"] for name, body in block.items()}
    assert "default" not in variables["project"] and _bare(variables["zone"]["default"]) == "us-east5-b"
