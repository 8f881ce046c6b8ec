"""Test that jobs that can never start are refused at creation."""

import os
import re
import subprocess
import sys

import pytest
from jobs.cloud.fake_kube import FakeKube
from jobs.cloud.fake_tpu import FakeTpu
from refusals import refuses
from typer.testing import CliRunner

import dovetail as dt
from dovetail.cli.job import app
from dovetail.core.errors import (
    FileError,
    MissingFileError,
    MissingPackageError,
    NotPermittedError,
    RecipeError,
    UnsupportedError,
    UserError,
)
from dovetail.jobs import actions, preflight
from dovetail.jobs.backends.kube import NoClusterError
from dovetail.jobs.spec import make

pytestmark = pytest.mark.slow

TPU = ("backend=gcp-tpu", "accelerator=v6e-8", "command=true", "gcp.ssh_user=me")
GKE = ["backend=gke", "accelerator=v6e-8", "command=true", "environment.image=i"]
ZONE, PROJECT = "zones=[us-east5-b]", "gcp.project=p"
TOKEN = "hf_" + "a" * 34
# case -> (words, class, param); the messages themselves are pinned in MESSAGES
REFUSED = {
    "recipe": (["recipe=tinyy"], UserError, "recipe"),
    "recipe's file": (["recipe=mine.yaml"], UserError, "recipe"),
    "override": (["recipe=tiny", "overrides=[stepz=3]"], RecipeError, "recipe"),
    "training": (["recipe=smollm2-135m-sft"], RecipeError, "training"),
    "lock": (["command=true", "environment.lock=req.lock"], MissingFileError, "environment.lock"),
    "ignored lock": (["command=true", "environment.lock=left.lock"], UserError, "environment.lock"),
    "lock without code": (["command=true", "environment.lock=x", "code.path="], UserError, "environment.lock"),
    "absolute lock": (["command=true", "environment.lock=/none/x"], MissingFileError, "environment.lock"),
    "venv": (["command=true", "environment.venv=/none"], MissingFileError, "environment.venv"),
    "secret": (["command=true", "secrets=[T=env:NOT_SET]"], UserError, "secrets"),
    "secret's file": (["command=true", "secrets=[T=file:/none/t]"], FileError, "secrets"),
    "secret in Google": (["command=true", "secrets=[T=gcp:t]"], UserError, "secrets"),
    "mount": (["command=true", "mounts=[{source: 'gs://b', path: /b}]"], UnsupportedError, "mounts"),
    "image": (["command=true", "environment.image=i"], UnsupportedError, "environment.image"),
    "token": (["command=true", f"env=[HF_TOKEN={TOKEN}]"], UserError, "env"),
    "token in the command": ([f"command=login {TOKEN}"], UserError, "command"),
    "Slurm": (["command=true", "backend=slurm"], UnsupportedError, "backend"),
    "zone": ([*TPU, PROJECT], RecipeError, "zones"),
    "project": ([*TPU, ZONE], RecipeError, "gcp.project"),
    "gcloud": ([*TPU[:3], ZONE, PROJECT], MissingPackageError, None),
    "client": ([*TPU, ZONE, PROJECT], MissingPackageError, "backend"),
    "credentials": ([*TPU, ZONE, PROJECT], UserError, None),
    "cluster": (GKE, NoClusterError, "gke.context"),
    "context": ([*GKE, "gke.context=none"], NoClusterError, "gke.context"),
    "no image": (["backend=gke", "accelerator=v6e-8", "command=true"], RecipeError, "environment.image"),
}
MESSAGES = {
    "recipe": "no recipe 'tinyy'.* Did you mean 'tiny'",
    "override": "recipe tiny: stepz is not a key. Did you mean steps",
    "training": "recipe smollm2-135m-sft is for training=sft, .* set training=sft",
    "ignored lock": r"left.lock is not part of the job's code, because .gitignore or `code.exclude` excludes it",
    "token": r"HF_TOKEN in env .*`secrets: \[HF_TOKEN=env:HF_TOKEN\]`",
    "client": r"pip install 'dovetail\[gcp\]'",
    "credentials": "gcloud auth application-default login",
}


@pytest.fixture
def place(home, tmp_path, monkeypatch):
    """A folder of code, and a machine with no clouds, no Slurm and no gcloud."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / ".gitignore").write_text("left.lock\n")
    (tmp_path / "code" / "left.lock").touch()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").touch(0o755)
    monkeypatch.chdir(tmp_path / "code")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for name in ("GOOGLE_CLOUD_PROJECT", "GOOGLE_APPLICATION_CREDENTIALS", "NOT_SET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_GCE_CHECK", "true")  # google-auth would look for a metadata server
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "none"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    return tmp_path


# an override is read by another process, which takes seconds: once is enough
@pytest.mark.parametrize(
    ("case", "more"),
    [(case, []) for case in REFUSED] + [(case, ["--dry-run"]) for case in REFUSED if case != "override"],
)
def test_jobs_that_cannot_start_are_refused_and_not_created(place, store, monkeypatch, case, more):
    words, kind, param = REFUSED[case]
    if case == "client":
        monkeypatch.setitem(sys.modules, "google.cloud", None)
    elif case == "credentials":
        pytest.importorskip("google.cloud.tpu_v2", reason="pip install 'dovetail[gcp]'")
    elif case in ("cluster", "context"):
        pytest.importorskip("kubernetes", reason="pip install 'dovetail[gke]'")
    done = CliRunner().invoke(app, ["create", "name=x", *words, "--yes", *more])
    error = done.exception
    assert isinstance(error, UserError if more else kind), (done.output, error)
    assert error.param == param and re.search(MESSAGES.get(case, ""), str(error))
    assert store.jobs() == [] and not (store.root / "jobs").exists()


def test_the_command_exits_with_2_and_one_line(home):
    words = [sys.executable, "-m", "dovetail", "job", "create", "name=x", "command=true", "secrets=[T=env:NOT_SET]"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=os.environ)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: secret T is read from $NOT_SET, which is not set: set it\n"


def test_jobs_that_cannot_start_are_refused_before_the_confirmation(place):
    done = CliRunner().invoke(app, ["create", "name=x", *TPU, ZONE], input="y\n")
    assert "Create it?" not in done.output and "needs a project" in str(done.exception)


@pytest.mark.usefixtures("place")
def test_jobs_that_cannot_start_are_refused_from_python(store):
    with refuses("mounts", UnsupportedError):
        dt.remote(mounts=[{"source": "gs://b", "path": "/b"}])(len).submit([])
    with refuses("backend", UnsupportedError, code="no_slurm"):
        actions.create(store, make({"name": "x", "command": "true", "backend": "slurm"}))
    job = store.add(make({"name": "x", "command": "true"}))
    store.change(job.id, status="failed")
    with refuses("env", code="token_in_spec"):
        actions.resume(store, store.job(job.id), [f"env=[X={TOKEN}]"])
    assert store.job(job.id).status == "failed"


def test_jobs_that_can_start_pass(place, monkeypatch):
    pytest.importorskip("google.cloud.tpu_v2", reason="pip install 'dovetail[gcp]'")
    pytest.importorskip("kubernetes", reason="pip install 'dovetail[gke]'")
    (place / "code" / "req.lock").touch()
    (place / "code" / "mine.yaml").write_text("base: tiny\nsteps: 300\n")
    code = place / "code"
    preflight.check(make({"name": "x", "command": "true", "environment": {"lock": "./req.lock"}}), code)
    preflight.check(make({"name": "x", "recipe": "mine.yaml", "overrides": ["batch=4"]}), code)
    with FakeTpu() as tpus, FakeKube() as cluster:
        monkeypatch.setenv("DOVETAIL_TPU_ENDPOINT", tpus.address)
        monkeypatch.setenv("DOVETAIL_KUBE_ENDPOINT", cluster.address)
        preflight.check(make(["name=x", *TPU, ZONE, PROJECT, "secrets=[T=gcp:t]"]), code)
        preflight.check(make(["name=x", *GKE]), code)
        assert not tpus.world.requests and not cluster.world.made


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_job_of_another_user_is_not_given_secrets(store, monkeypatch):
    monkeypatch.setenv("MY_SECRET", "hunter2")
    spec = make({"name": "x", "command": "true", "secrets": ["T=env:MY_SECRET"], "code": {"path": ""}})
    job = actions.create(store, spec)
    store.change(job.id, status="failed")
    os.chown(store.home(job.id), 12345, -1)
    with pytest.raises(NotPermittedError):
        actions.resume(store, store.job(job.id))
    assert store.job(job.id).status == "failed"


def test_a_failed_creation_leaves_no_secret_behind(store, monkeypatch):
    monkeypatch.setenv("MY_SECRET", "hunter2")
    monkeypatch.setattr(store, "add", lambda *given: (_ for _ in ()).throw(OSError("the disk is full")))
    spec = make({"name": "x", "command": "true", "secrets": ["T=env:MY_SECRET"], "code": {"path": ""}})
    with pytest.raises(OSError, match="the disk is full"):
        actions.create(store, spec)
    assert list((store.root / "jobs").iterdir()) == []
