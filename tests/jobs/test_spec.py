"""What a job's file may say, and what is said to one that is wrong."""

import subprocess

import pytest

from dovetail.jobs import gate, price
from dovetail.jobs.script import script, secrets
from dovetail.jobs.spec import from_text, load, make, to_text

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


def test_a_file_is_read_written_and_overridden(tmp_path):
    spec = from_text(FULL)
    assert from_text(to_text(spec)) == spec
    (tmp_path / "job.yaml").write_text(FULL)
    changed = load(tmp_path / "job.yaml", ["backend=local", "ceiling.hours=1"])
    assert (changed.backend, changed.ceiling.hours, changed.ceiling.dollars) == ("local", 1.0, 400.0)
    assert spec.processes == 4 and spec.device.chips == 16
    assert spec.line == 'exec python -m dovetail pretrain llama3-1b steps=100 --run-dir "$DOVETAIL_JOB_DIR/run"'


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"nme": "x"}, "nme is not a key. Did you mean name"),
        ({"command": "ls", "recipe": "tiny"}, "command or recipe must be given, and not both"),
        ({"command": "ls", "overrides": ["a=1"]}, "overrides belong to a recipe"),
        ({"command": "ls", "backend": "slrum"}, "backend must be one of .* Did you mean 'slurm'"),
        ({"command": "ls", "accelerator": "v6e-17"}, "accelerator 'v6e-17': no slice of v6e has that size"),
        ({"command": "ls", "backend": "gke"}, "accelerator must be a TPU"),
        ({"command": "ls", "tier": "reservation"}, "reservation must be named"),
        ({"command": "ls", "env": ["A B=1"]}, "env must be NAME=value"),
        ({"command": "ls", "secrets": ["A=hunter2"]}, "secrets must say where each value is"),
        ({"command": "ls", "others": ["v6e-8"]}, "others needs a recipe"),
        ({"command": "ls", "ceiling": {"dollars": -1.0}}, "ceiling.dollars must be 0 or more"),
        ({"command": "ls", "environment": {"venv": "a", "conda": "b"}}, "exclude each other"),
        ({"command": "ls", "name": "a b"}, "name must be letters"),
    ],
)
def test_what_is_wrong_is_refused_with_a_reason(given, message):
    with pytest.raises(ValueError, match=message):
        make({"name": "x"} | given)


def test_a_line_of_sh_is_taken_as_it_is_typed(tmp_path):
    line = """echo "a: b" '#c' {d}  # e: [f"""
    assert make(["name=x", f"command={line}"]).command == line
    (tmp_path / "job.yaml").write_text("name: x\ncommand: ls\n")
    assert load(tmp_path / "job.yaml", [f"command={line}"]).command == line


def test_a_secret_never_shows_its_value(monkeypatch):
    with pytest.raises(ValueError) as caught:
        make({"name": "x", "command": "ls", "secrets": ["A=hunter2"]})
    assert "hunter2" not in str(caught.value)
    spec = make({"name": "x", "command": "ls", "secrets": ["A=env:MY_SECRET"]})
    with pytest.raises(ValueError, match="MY_SECRET, which is not set"):
        secrets(spec)
    monkeypatch.setenv("MY_SECRET", "hunter2")
    assert secrets(spec) == {"A": "hunter2"}
    assert "hunter2" not in script(spec) + to_text(spec)


def test_prices_and_traffic():
    spot = from_text(FULL)
    assert price.hourly(spot) == pytest.approx(16 * 1.54)
    assert price.hourly(make({"name": "x", "command": "ls", "accelerator": "v6e-16"})) == 0.0  # one's own machine
    blind = make(
        {"name": "x", "command": "ls", "backend": "gke", "accelerator": "tpu7x-64", "ceiling": {"dollars": 9.0}}
    )
    with pytest.raises(ValueError, match=r"ceiling\.dollars cannot be kept"):
        price.refuse_blind_ceiling(blind)
    lines = price.transfer_warnings(spot, {"gs://data": "us-east5"})
    assert len(lines) == 1 and "read from europe-west4-a it costs $80 per TB" in lines[0]
    assert price.transfer_warnings(spot, {"gs://data": "us"}) != []  # of Europe it is another continent's


def test_the_script_runs_the_command_with_its_environment():
    made = script(from_text(FULL))
    assert "export A=1" in made and "pip" in made and "{ echo ready\n} || exit 91" in made
    assert made.rstrip().endswith('--run-dir "$DOVETAIL_JOB_DIR/run"')


def test_what_will_not_fit_is_found_before_it_is_paid_for(monkeypatch):
    spec, called = from_text(FULL), []

    def run(command, **options):
        called.append(command)
        return subprocess.CompletedProcess(command, 2, "", "compiling\nerror: 40 GiB, and 31 GiB is there\n")

    monkeypatch.setattr("dovetail.jobs.gate.subprocess.run", run)
    monkeypatch.setattr("dovetail.jobs.gate.importlib.util.find_spec", lambda name: object())
    with pytest.raises(ValueError, match="llama3-1b does not run on v6e-16: 40 GiB, and 31 GiB is there"):
        gate.check(spec)
    assert called[0][3:] == ["compile", "recipe", "llama3-1b", "steps=100", "--topology", "v6e:4x4", "--json"]
    monkeypatch.setattr("dovetail.jobs.gate.importlib.util.find_spec", lambda name: None)
    assert "libtpu is not installed" in gate.check(spec)
    assert gate.check(make({"name": "x", "command": "ls"})) == "" and len(called) == 1
