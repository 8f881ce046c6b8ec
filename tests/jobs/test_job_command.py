"""Test the `dovetail job` commands."""

import io
import json
import os
import re
import subprocess
import sys
import time

import pytest
from refusals import refuses
from rich.console import Console
from typer.testing import CliRunner

from dovetail.cli.job import app
from dovetail.cli.job_output import table
from dovetail.core.errors import NotPermittedError, UserError
from dovetail.jobs import actions
from dovetail.jobs.backends import chooser
from dovetail.jobs.presence import holder, only_one
from dovetail.jobs.queue import QueueWorker, TaskQueue
from dovetail.jobs.spec import make
from dovetail.jobs.store import JobStore
from dovetail.jobs.web import Pages

pytestmark = pytest.mark.slow


@pytest.fixture
def job(home, tmp_path, monkeypatch):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "say.py").write_text("print('said')\n")
    monkeypatch.chdir(tmp_path / "code")

    def call(*words: str, code: int = 0, **more):
        done = CliRunner().invoke(app, words, **more)
        assert done.exit_code == code, (done.output, done.exception)
        return json.loads(done.stdout) if "--json" in words and code == 0 else done.output

    return call


@pytest.fixture
def tools(tmp_path, monkeypatch) -> None:
    """An sbatch and a gcloud that do nothing, and no credentials to look for: machines have none of them."""
    (tmp_path / "bin").mkdir()
    for name in ("sbatch", "gcloud"):
        (tmp_path / "bin" / name).write_text("#!/bin/sh\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("DOVETAIL_TPU_ENDPOINT", "http://127.0.0.1:9")  # nothing is asked of it


@pytest.mark.usefixtures("supervised")
def test_a_job_from_its_creation_to_its_end(job):
    shown = job("create", "name=hello", "command=python say.py", "hosts=2", "--follow")
    assert "0 | said" in shown and "1 | said" in shown and "succeeded" in shown
    (row,) = job("list", "--json")
    assert (row["name"], row["status"], row["attempts"]) == ("hello", "succeeded", 1)
    assert job("list").count("hello") == 1 and "1 succeeded" in job("list")
    whole = job("show", "hello", "--json")
    assert whole["attempts_made"][0]["outcome"] == "success" and "hosts: 2" in whole["spec"]
    assert "python say.py" in job("show", row["id"][:4])
    lines = [json.loads(line) for line in job("logs", "hello", "--rank", "1").splitlines() if line.startswith("{")]
    assert lines == [] and job("logs", "hello", "--rank", "1") == "1 | said\n"
    assert job("cost", "--json")["dollars"] == 0.0
    assert job("ssh", "hello", "--print").startswith("sh -c")
    assert job("delete", "hello", "--yes", "--json") == {"deleted": [row["id"]]} and job("list", "--json") == []


@pytest.mark.usefixtures("supervised")
def test_a_job_created_in_a_subfolder_imports_the_repositorys_package(job, tmp_path, monkeypatch):
    """The repository has a package at its root and one in src/; the script runs in a subfolder."""
    for name in ("mine", "src/ours", "trials/first"):
        (tmp_path / "code" / name).mkdir(parents=True)
    (tmp_path / "code" / "mine" / "__init__.py").write_text("WORD = 'mine'\n")
    (tmp_path / "code" / "src" / "ours" / "__init__.py").write_text("WORD = 'ours'\n")
    script = "import os, mine, ours; print(mine.WORD, ours.WORD, os.path.basename(os.getcwd()))\n"
    (tmp_path / "code" / "trials" / "first" / "go.py").write_text(script)
    subprocess.run(["git", "init", "-q", str(tmp_path / "code")], check=True)
    monkeypatch.chdir(tmp_path / "code" / "trials" / "first")
    assert "mine ours first\n" in job("create", "name=sub", "command=python go.py", "--follow")
    assert "cwd: trials/first" in job("show", "sub", "--json")["spec"]
    assert "No module named 'mine'" in job("create", "name=own", "command=python go.py", "code.cwd=.", "-f", code=1)


@pytest.mark.usefixtures("supervised")
def test_a_failed_job_exits_with_1_and_names_the_error(job):
    shown = job("create", "name=bad", "command=echo 'KeyError: 3'; exit 9", "-f", code=1)
    assert "exit 9: failed: KeyError: 3" in shown
    assert job("resume", "bad", "--json")["resumed"] == 1
    job("logs", "bad", "--follow")
    assert job("show", "bad", "--json")["attempts"] == 2


@pytest.mark.usefixtures("supervised")
def test_control_characters_of_a_job_are_not_printed(job):
    r"""printf's \\033 in the command is an escape sequence in what the job writes."""
    command = r"printf '\033]0;title\007:x: [red]x\033[2J\rRuntimeError: :x: \033[31mno'; exit 3"
    shown = job("create", "name=loud", f"command={command}", "-f", code=1)
    shown += job("show", "loud") + job("list") + job("logs", "loud")
    assert "RuntimeError: :x: no" in shown and "\x1b" not in shown and "title" not in shown.replace("]0;title", "")
    raw = CliRunner().invoke(app, ["logs", "loud", "--json"]).stdout.splitlines()[0]
    assert json.loads(raw)["line"].startswith("\x1b]0;title")  # whole, and escaped by JSON


def test_age_is_since_creation_and_ran_is_running_time(job, home):
    job("create", "name=old", "command=true")
    store = JobStore(home)
    (row,) = store.jobs()
    store.change(row.id, created=time.time() - 7200, ended=time.time() - 3600, seconds=90.0, status="failed")
    header, line = job("list").splitlines()[:2]
    cells = dict(zip(re.split(r"  +", header), re.split(r"  +", line), strict=True))
    assert (cells["age"], cells["ran"], cells["where"]) == ("2 h", "1.5 min", "local")


@pytest.mark.usefixtures("tools")
def test_a_list_fits_a_terminal_of_80_columns(job, home):
    job("create", "name=a-name-that-is-longer-than-most-names-are", "command=true", "backend=slurm", "--no-check")
    store = JobStore(home)
    (row,) = store.jobs()
    store.begin(row.id, "debug", "")
    store.change_attempt(row.id, 1, handle="412")
    console = Console(width=80, file=io.StringIO())
    console.print(table(store.jobs(), store.handles("slurm")))
    header, line = console.file.getvalue().splitlines()
    assert header.split()[-4:] == ["attempts", "age", "ran", "$"] and max(len(header), len(line)) <= 80
    assert "slurm 412" in line and "waiting" in line and f"{row.id} " in line
    assert job("list", "--json")[0]["handle"] == "412"


def test_cancel_and_clean(job, home):
    job("create", "name=later", "command=true")
    assert job("cancel", "later", "--json")["wanted"] == "stop"
    assert "no supervisor runs" in job("list")
    assert job("clean", "--days", "0", "--json") == {"deleted": [], "kept": [], "reaped": []}
    store = JobStore(home)
    (row,) = store.jobs()
    store.change(row.id, status="cancelled", ended=1.0)
    assert job("clean", "--dry-run", "--json")["deleted"] == [row.id] and len(store.jobs()) == 1
    assert "1 jobs deleted; no resource without a job" in job("clean", "--yes") and store.jobs() == []


@pytest.fixture
def ended(store) -> dict[str, str]:
    """Jobs that are over, by name -> id: two of ours without results, two succeeded with, one of another user."""
    made = {}
    for name, status, user in (
        ("bad", "failed", ""), ("plain", "succeeded", ""), ("train", "succeeded", ""), ("out", "succeeded", ""),
        ("hers", "failed", "somebody-else"),
    ):  # fmt: skip
        made[name] = store.add(make({"name": name, "command": "true", "code": {"path": ""}}), user=user).id
        store.change(made[name], status=status, ended=1.0)
        (store.home(made[name]) / "attempts/1").mkdir(parents=True)
        (store.home(made[name]) / "attempts/1/rank0.log").write_text("x" * 2500)
    for name, file in (("bad", "run/checkpoint"), ("train", "run/checkpoint"), ("out", "code/out.bin")):
        path = store.home(made[name]) / file
        path.parent.mkdir(parents=True)
        path.write_bytes(bytes(4_000_000))
    return made


def test_clean_lists_what_it_deletes_and_keeps_results_and_jobs_of_others(job, store, ended, monkeypatch):
    with refuses("--yes"):
        CliRunner().invoke(app, ["clean"], catch_exceptions=False)
    monkeypatch.setattr("dovetail.cli.job_output.is_terminal", lambda: True)
    shown = job("clean", code=1, input="n\n")
    assert f"{ended['bad']}      4 MB  failed" in shown and re.search(rf"{ended['plain']} +[\d.]+ kB  succeeded", shown)
    assert "2 jobs, 4.01 MB" in shown and "kept: 2 succeeded jobs with results (8.01 MB); --runs" in shown
    assert "hers" not in shown and len(store.jobs()) == 5
    job("clean", input="y\n")
    assert {one.name for one in store.jobs()} == {"train", "out", "hers"}
    assert (store.home(ended["train"]) / "run/checkpoint").exists()
    assert job("clean", "--runs", "--yes", "--json")["deleted"] == [ended["out"], ended["train"]]
    assert not store.home(ended["train"]).exists() and [one.name for one in store.jobs()] == ["hers"]


def test_delete_asks_and_refuses_jobs_of_others(job, store, ended, monkeypatch):
    with refuses("--yes"):
        CliRunner().invoke(app, ["delete", "bad"], catch_exceptions=False)
    monkeypatch.setattr("dovetail.cli.job_output.is_terminal", lambda: True)
    assert "4 MB  failed" in job("delete", "bad", code=1, input="n\n") and len(store.jobs()) == 5
    job("delete", "bad", input="y\n")
    with refuses(None, NotPermittedError, naming="only somebody-else may delete"):
        CliRunner().invoke(app, ["delete", "hers", "--yes"], catch_exceptions=False)
    with refuses(None, NotPermittedError, naming="somebody-else"):  # and then none is deleted
        actions.clean(store, store.jobs())
    assert len(store.jobs()) == 4


def test_a_spec_file_with_overrides(job, tmp_path):
    (tmp_path / "job.yaml").write_text("name: filed\ncommand: python say.py\ncode: {path: code}\n")
    made = job("create", str(tmp_path / "job.yaml"), "hosts=4", "--json")
    shown = job("show", made["id"], "--json")
    assert "hosts: 4" in shown["spec"] and shown["snapshot"]
    assert "python say.py" in job("create", str(tmp_path / "job.yaml"), "--dry-run")
    assert len(job("list", "--json")) == 1


def test_jobs_that_cost_money_are_confirmed_first(job, monkeypatch):
    monkeypatch.setattr("dovetail.jobs.preflight.check", lambda spec, code: None)  # there is no cloud here
    words = ["create", "name=tpu", "command=true", "backend=gcp-tpu", "accelerator=v6e-8", "zones=[us-east5-b]"]
    shown = job(*words, "ceiling.dollars=50", code=1, input="n\n")
    assert "8 x v6e, on-demand: $21.60 per hour" in shown and "it stops at $50" in shown
    assert job("list", "--json") == []
    assert job(*words, "--yes", "--json")["status"] == "queued"


TPU = ["name=tpu", "command=true", "backend=gcp-tpu", "accelerator=v6e-8", "gcp.project=lab"]


def test_a_dry_run_masks_values_named_like_secrets(job):
    said = job("create", "name=x", "command=true", "env=[DB_PASSWORD=hunter2,DEPTH=3]", "--dry-run")
    assert "DB_PASSWORD=***" in said and "DEPTH=3" in said and "hunter2" not in said


@pytest.mark.usefixtures("tools")
def test_resume_refuses_a_zone_that_does_not_exist(job, home):
    id = job("create", *TPU, "zones=[us-east5-b]", "--yes", "--no-check", "--json")["id"]
    store = JobStore(home)
    store.change(id, status="failed", ended=1.0)
    with refuses("zones", naming="'us-east5'"):
        actions.resume(store, store.job(id), ["zones=[us-east5]"])


@pytest.mark.usefixtures("tools")
def test_a_dry_run_shows_the_request_and_every_warning(job):
    words = ["create", *TPU, "zones=[us-east5-b,europe-west4-a]", "--dry-run"]
    words.append("mounts=[{source: gs://corpus, path: /data, region: us-east5}]")
    shown = job(*words)
    assert "warning: gs://corpus is in us-east5: reading it from europe-west4-a costs $80 per TB" in shown
    assert '"parent": "projects/lab/locations/us-east5-b"' in shown and "every process runs" in shown
    found = job(*words, "tier=spot", "--json")
    assert found["request"]["queued_resource"]["spot"] == {} and len(found["warnings"]) == 1
    assert "--provisioning-model=flex-start" in job(*words, "tier=flex-start", "--json")["gcloud"]
    sbatch = job("create", "name=s", "command=true", "backend=slurm", "hosts=2", "slurm.partition=low", "--no-check",
                 "--dry-run", "--json")["sbatch"]  # fmt: skip
    assert {"--job-name=s-dt-job-1", "--nodes=2", "--partition=low"} <= set(sbatch)
    assert job("list", "--json") == []


@pytest.mark.usefixtures("tools")
def test_no_check_accepts_an_unknown_zone(job):
    assert job("create", *TPU, "zones=[us-new1-b]", "--dry-run", "--no-check", "--json")["request"]


def test_after_accepts_job_names(job, home):
    first = job("create", "name=first", "command=true", "--json")["id"]
    job("create", "name=second", "command=true", "after=[first]", "--json")
    assert f"- {first}" in job("show", "second", "--json")["spec"]
    JobStore(home).change(JobStore(home).find("second").id, status="failed", ended=1.0)
    job("create", "name=third", "command=true", "--json")
    job("resume", "second", "after=[third]")
    assert f"- {JobStore(home).find('third').id}" in job("show", "second", "--json")["spec"]


@pytest.mark.parametrize(
    ("words", "param", "naming"),
    [
        (["create", *TPU, "zones=[us-eats5-b]"], "zones", "Did you mean 'us-east5'? (--no-check"),
        (["create", *TPU, "zones=[us-east5]", "--dry-run"], "zones", "us-east5-a"),
        (["create", *TPU, "mounts=[{source: gs://x, path: /x, region: mars}]", "--dry-run"], "mounts.region", "mars"),
        (["create", "name=x", "command=true", "after=[nobody]", "--dry-run"], "JOB", "'nobody'"),
        (["create"], "SPEC", ""),
        (["create", "none.yaml"], "SPEC", "none.yaml"),
        (["create", "name=x", "comand=true"], "comand", "Did you mean command"),
        (["show", "nothing"], "JOB", "'nothing'"),
        (["list", "--status", "done"], "--status", ""),
        (["clean", "--release", "h1"], "--release", "h1"),
    ],
)
def test_bad_arguments_are_refused(job, words, param, naming):
    error = CliRunner().invoke(app, words).exception
    assert isinstance(error, UserError) and error.param == param, error
    assert naming in str(error)


def test_the_queue_commands(job, home):
    job("queue", "add", "q", "touch first", "--name", "first")
    job("queue", "add", "q", "--after", "first", "--", "test", "-e", "first")
    command = [sys.executable, "-m", "dovetail", "job", "queue", "work", "q", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"ended": 2, "stopped": False}
    assert job("queue", "list", "--json") == [["q", "succeeded", 2]]
    assert [task["status"] for task in job("queue", "list", "q", "--json")] == ["succeeded"] * 2
    assert job("queue", "retry", "q", "--json") == {"ready": 0}


def test_values_that_look_secret_are_not_shown(job, home):
    id = job("create", "name=x", "command=true", "env=[API_KEY=hunter2, MAX_TOKENS=9]", "--json")["id"]
    page = Pages(JobStore(home), chooser(home, "")).job(id)
    for shown in (job("show", id), job("show", id, "--json")["spec"], page["spec"]):
        assert "hunter2" not in shown and "API_KEY=***" in shown and "MAX_TOKENS=9" in shown


def test_a_supervisor_on_another_machine_is_not_stopped_here(job, home, monkeypatch):
    assert job("supervise", "--stop", "--json") == {"stopped": ""}
    with only_one(home):
        monkeypatch.setattr("dovetail.jobs.presence.platform.node", lambda: "elsewhere")
        done = CliRunner().invoke(app, ["supervise", "--stop"])
    assert isinstance(done.exception, ValueError) and "and this machine is elsewhere: stop it there" in str(
        done.exception
    )


def test_the_task_commands(job, home):
    job("queue", "add", "q", r"printf 'one\033[2J\n:x: two'; exit 3", "--name", "bad")
    job("queue", "add", "q", "true", "--name", "late", "--after", "bad")
    done = CliRunner().invoke(app, ["queue", "logs", "q", "bad"])
    assert "there is no log of task bad here: it is ready" in str(done.exception)
    QueueWorker(TaskQueue(JobStore(home), "q")).run()
    assert job("queue", "logs", "q", "bad") == job("queue", "logs", "q", "bad", "-f") == "one\n:x: two\n"
    shown = job("queue", "show", "q", "bad")
    assert "status: failed\n" in shown and "exit code: 3\n" in shown and "detail: :x: two\n" in shown
    assert job("queue", "show", "q", "late", "--json")["after"] == ["bad"]
    assert "\x1b" not in job("queue", "list", "q") + shown
    job("queue", "retry", "q", "bad")
    assert job("queue", "cancel", "q", "bad") == "task bad of queue q is cancelled\n"
    assert job("queue", "show", "q", "bad", "--json")["status"] == "cancelled"


def test_create_starts_a_supervisor_that_outlives_the_terminal(tmp_path):
    """Create in a separate process and hang up its session."""
    home = tmp_path / "home"
    environ = os.environ | {"DOVETAIL_JOBS": str(home)}
    command = [
        sys.executable,
        "-m",
        "dovetail",
        "job",
        "create",
        "name=x",
        "command=sleep 1; exit 0",
        "code.path=",
        "--json",
    ]
    terminal = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, start_new_session=True)
    id = json.loads(terminal.stdout)["id"]
    show = [sys.executable, "-m", "dovetail", "job", "show", id, "--json"]
    supervise = [sys.executable, "-m", "dovetail", "job", "supervise", "--json"]
    try:
        again = subprocess.run([*supervise, "--restart"], env=environ, capture_output=True, check=True).stdout
        second = json.loads(again)["supervisor"]
        assert second.startswith("pid ") and second != json.loads(again)["stopped"]
        until, status = time.monotonic() + 60, ""
        while status != "succeeded" and time.monotonic() < until:
            time.sleep(0.3)
            status = json.loads(subprocess.run(show, env=environ, capture_output=True, check=True).stdout)["status"]
        assert status == "succeeded" and holder(home).startswith("pid ")
    finally:
        ended = subprocess.run([*supervise, "--stop"], env=environ, capture_output=True, check=True).stdout
    assert json.loads(ended) == {"stopped": second}
    assert holder(home) == "" and "Traceback" not in (home / "supervisor.log").read_text()
