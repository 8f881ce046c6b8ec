"""Test job specs: parsing, refusals, secrets, cost and the memory check."""

import os
import subprocess

import pytest
from jobs.cloud.loopback import Loopback, Troubles
from refusals import refuses

from dovetail.core.cloud import rate
from dovetail.core.errors import RecipeError
from dovetail.jobs import cost, preflight
from dovetail.jobs.script import script
from dovetail.jobs.secrets import shown, take
from dovetail.jobs.spec import from_text, load, make, to_text

pytestmark = pytest.mark.slow

FULL = """
name: llama-1b
recipe: llama3-1b
overrides: [steps=100]
accelerator: v6e-16
backend: gcp-tpu
tier: spot
zones: [us-east5-b, europe-west4-a]
env: [A=1]
secrets: [TOKEN=env:MY_TOKEN]
mounts: [{source: "gs://data", path: /data}]
ceiling: {dollars: 400, hours: 48}
retries: {faults: 3}
environment: {lock: requirements.lock, setup: [echo ready]}
"""
FULL_WITH_OTHERS = {
    "name": "x", "recipe": "llama3-1b", "backend": "gcp-tpu", "accelerator": "v6e-16", "others": ["v6e-8"],
    "zones": ["us-east5-b"],
}  # fmt: skip


def test_a_file_is_read_written_and_overridden(tmp_path):
    spec = from_text(FULL)
    assert from_text(to_text(spec)) == spec
    (tmp_path / "job.yaml").write_text(FULL)
    changed = load(tmp_path / "job.yaml", ["backend=local", "ceiling.hours=1"])
    assert (changed.backend, changed.ceiling.hours, changed.ceiling.dollars) == ("local", 1.0, 400.0)
    assert spec.processes == 4 and spec.device.chips == 16
    assert spec.line == 'exec python -m dovetail pretrain llama3-1b steps=100 --run-dir "$DOVETAIL_JOB_DIR/run"'


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"command": "ls", "recipe": "tiny"}, "command"),
        ({"command": "ls", "overrides": ["a=1"]}, "overrides"),
        ({"command": "ls", "backend": "slrum"}, "backend"),
        ({"command": "ls", "backend": "gke"}, "accelerator"),
        ({"command": "ls", "tier": "reservation"}, "reservation"),
        ({"command": "ls", "env": ["A B=1"]}, "env"),
        ({"command": "ls", "secrets": ["A=hunter2"]}, "secrets"),
        ({"command": "ls", "others": ["v6e-8"]}, "others"),
        ({"command": "ls", "ceiling": {"dollars": -1.0}}, "ceiling.dollars"),
        ({"command": "ls", "environment": {"venv": "a", "conda": "b"}}, "environment"),
        ({"command": "ls", "name": "a b"}, "name"),
    ],
)
def test_bad_specs_are_refused(given, param):
    with refuses(param, RecipeError):
        make({"name": "x"} | given)


def test_an_unknown_key_and_an_unknown_size_are_refused_with_the_closest_ones():
    with refuses(None, RecipeError, naming="v6e-16 and v6e-32"):
        make({"name": "x", "command": "ls", "accelerator": "v6e-17"})
    with refuses("nme", RecipeError, code="unknown_key", naming="Did you mean name?"):
        make({"nme": "x"})


def test_a_shell_line_is_kept_as_typed(tmp_path):
    line = """echo "a: b" '#c' {d}  # e: [f"""
    assert make(["name=x", f"command={line}"]).command == line
    (tmp_path / "job.yaml").write_text("name: x\ncommand: ls\n")
    assert load(tmp_path / "job.yaml", [f"command={line}"]).command == line


def test_a_secret_never_shows_its_value(monkeypatch):
    with refuses("secrets", RecipeError) as caught:
        make({"name": "x", "command": "ls", "secrets": ["A=hunter2"]})
    assert "hunter2" not in str(caught.value)
    spec = make({"name": "x", "command": "ls", "secrets": ["A=env:MY_SECRET"]})
    with refuses("secrets", naming="$MY_SECRET"):
        take(spec)
    monkeypatch.setenv("MY_SECRET", "hunter2")
    assert take(spec) == {"A": "hunter2"}
    assert "hunter2" not in script(spec) + to_text(spec)


def test_values_that_look_secret_are_masked_in_a_shown_spec():
    """Jobs of before tokens were refused are in the store too."""
    token = "hf_" + "a" * 34
    spec = make({"name": "x", "command": f"echo {token}", "env": ["DB_PASSWORD=hunter2", "MAX_TOKENS=9", f"X={token}"]})
    lines = shown(spec).splitlines()
    assert token not in shown(spec) and "command: echo ***" in lines
    assert [line for line in lines if line.startswith("- ")] == ["- DB_PASSWORD=***", "- MAX_TOKENS=9", "- X=***"]


def test_prices_and_traffic():
    spot = from_text(FULL)
    dearest = max(rate(spot.device.chip, True, region).dollars for region in ("us-east5", "europe-west4"))
    assert cost.hourly(spot) == pytest.approx(16 * dearest)
    assert cost.hourly(make({"name": "x", "command": "ls", "accelerator": "v6e-16"})) == 0.0  # one's own machine
    blind = make(
        {"name": "x", "command": "ls", "backend": "gke", "accelerator": "tpu7x-64", "ceiling": {"dollars": 9.0}}
    )
    with refuses("ceiling.dollars", RecipeError):
        cost.check_ceiling(blind)
    lines = cost._transfers(spot, {"gs://data": "us-east5"})
    assert len(lines) == 1 and "reading it from europe-west4-a costs $80 per TB" in lines[0]
    assert cost._transfers(spot, {"gs://data": "us"}) != []  # of Europe it is another continent's


@pytest.fixture
def storage(monkeypatch):
    """As much of Cloud Storage as is asked, on loopback."""
    places = {"data": "US-EAST5", "lab": "EUR4"}

    def act(method, path, body):
        name = path.partition("?")[0].rpartition("/")[2]
        return (200, {"location": places[name]}) if name in places else (404, {})

    with Loopback(act, Troubles, lambda code, message: {"error": message}, 0.1) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.address)
        yield


@pytest.mark.usefixtures("storage")
def test_the_region_of_a_bucket_is_looked_up_or_reported_unknown():
    pytest.importorskip("requests", reason="pip install 'dovetail[gcp]'")
    sources = [("gs://data/corpus", ""), ("gs://mine", "us-west1"), ("gs://nobodys", ""), ("/here", "")]
    mounts = [{"source": one, "path": "/d", "region": region} for one, region in sources]
    found = cost.locations(
        make(FULL_WITH_OTHERS | {"mounts": mounts, "gcp": {"bucket": "gs://lab"}, "zones": ["us-east5-b"]})
    )
    assert found == {"gs://data/corpus": "us-east5", "gs://mine": "us-west1", "gs://nobodys": "", "gs://lab": "eu"}
    (line,) = cost._unknown(found)
    assert "the region of gs://nobodys is not known" in line and "$20 to $80 per TB" in line
    assert cost.locations(make({"name": "x", "command": "ls", "mounts": mounts})) == {}  # one's own machine


def test_a_cloud_recipe_without_a_bucket_is_warned_of():
    (line,) = cost._unsaved(make(FULL_WITH_OTHERS))
    assert "gcp.bucket is not set" in line
    kept = ({"gcp": {"bucket": "gs://b"}}, {"backend": "slurm", "accelerator": "h100x8", "others": []})
    assert [cost._unsaved(make(FULL_WITH_OTHERS | one)) for one in kept] == [[], []]


def test_the_script_runs_the_command_with_its_environment():
    made = script(from_text(FULL))
    assert "export A=1" in made and "pip" in made and "{ echo ready\n} || exit 91" in made
    assert made.rstrip().endswith('--run-dir "$DOVETAIL_JOB_DIR/run"')


def test_a_lock_file_with_hashes_is_installed_with_them(tmp_path):
    """A stand-in for Python makes the venv, with a pip that prints its arguments."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nmkdir -p "$3/bin" && cp "$0.pip" "$3/bin/pip" && touch "$3/bin/activate"\n')
    (tmp_path / "python.pip").write_text('#!/bin/sh\necho "$@"\n')
    for path in (python, tmp_path / "python.pip"):
        path.chmod(0o755)

    def installed(lock: str) -> str:
        (tmp_path / "req.lock").write_text(lock)
        given = {"name": "x", "command": "true", "environment": {"lock": "req.lock", "python": str(python)}}
        environment = {**os.environ, "DOVETAIL_HOME": str(tmp_path / "home"), "DOVETAIL_CODE_DIR": str(tmp_path)}
        return subprocess.check_output(["sh", "-c", script(make(given))], env=environment, text=True).strip()

    assert installed("a==1 --hash=sha256:00\n") == "install --quiet --require-hashes -r req.lock"
    assert installed("a==1\n") == "install --quiet -r req.lock"


def test_a_training_that_does_not_fit_is_refused_before_it_starts():
    given = {"name": "x", "recipe": "llama3-8b", "backend": "gke", "accelerator": "v5litepod-4"}
    with refuses("recipe", naming="llama3-8b does not run on v5litepod-4: it does not fit"):
        preflight.check_fit(make(given))


def test_a_fine_tuning_that_does_not_fit_is_refused_before_it_starts(tmp_path):
    path = tmp_path / "chat.yaml"
    path.write_text("{model: llama3-8b, data: {path: x.jsonl}, batch: 8, length: 4096, steps: 9, lora: {r: 16}}")
    given = {"name": "x", "recipe": str(path), "training": "sft", "backend": "gke"}
    with refuses("recipe", naming="v5litepod-1"):
        preflight.check_fit(make(given | {"accelerator": "v5litepod-1"}))
    assert preflight.check_fit(make(given | {"accelerator": "v5litepod-8"})) == ""


def test_check_fit_plans_each_size_and_compiles_where_libtpu_is_installed(monkeypatch):
    spec, called, installed = make(FULL_WITH_OTHERS), [], {"jax", "libtpu"}

    def run(command, **options):
        called.append(command[3:])
        compiles = command[3] == "compile"
        return subprocess.CompletedProcess(command, 2 * compiles, "", "compiling\nerror: 40 GiB, and 31 GiB is there\n")

    monkeypatch.setattr("dovetail.jobs.preflight.subprocess.run", run)
    monkeypatch.setattr("dovetail.jobs.preflight.importlib.util.find_spec", lambda name: name in installed or None)
    with refuses("recipe", naming="llama3-1b does not run on v6e-16: 40 GiB, and 31 GiB is there"):
        preflight.check_fit(spec)
    plan = ["recipes", "llama3-1b", "--chip", "v6e", "--devices"]
    assert called[:2] == [[*plan, "16", "--slices", "1"], [*plan, "8", "--slices", "1"]]
    assert called[2:] == [["compile", "recipe", "llama3-1b", "--topology", "v6e:4x4", "--json"]]
    installed.remove("libtpu")
    assert "planned, and not compiled" in preflight.check_fit(spec) and len(called) == 5
    installed.remove("jax")
    assert (
        "not planned" in preflight.check_fit(spec) and preflight.check_fit(make({"name": "x", "command": "ls"})) == ""
    )
    assert len(called) == 5
