"""Run the commands of docs/jobs.md; the cloud's job is created up to the confirmation."""

import os
import shlex
import subprocess
import sys

import pytest
from jobs.docs_page import block, console
from typer.testing import CliRunner

from dovetail.cli.job import app
from dovetail.jobs import preflight
from dovetail.jobs.spec import from_text

pytestmark = pytest.mark.slow


@pytest.fixture
def run(home, tmp_path, monkeypatch):
    """Run lines of sh in an empty folder, where `dovetail` is this one; what they print."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    (tmp_path / "bin" / "dovetail").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m dovetail "$@"\n')
    (tmp_path / "bin" / "gcloud").write_text("#!/bin/sh\n")
    for name in ("dovetail", "gcloud"):
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]]))

    def call(lines: str) -> str:
        done = subprocess.run(["sh", "-ec", lines], capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return call


@pytest.mark.usefixtures("supervised")
def test_the_first_block_of_the_page_runs(run):
    shown = run(block("", "sh"))
    assert "0 | hello from 0\n" in shown and "1 | hello from 1\n" in shown and "1 succeeded" in shown


def test_the_spec_on_the_page_is_valid(run):
    spec = from_text(block("A spec", "yaml"))
    assert spec.recipe == "llama3-1b" and preflight.check_place(spec) == ""


def test_story_1_up_to_the_confirmation(run, tmp_path, monkeypatch):
    (tmp_path / "work" / "spot.yaml").write_text(block("Story 1", "yaml"))
    monkeypatch.setenv("DOVETAIL_TPU_ENDPOINT", "http://127.0.0.1:9")  # nothing is asked of it
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
    monkeypatch.setattr(preflight, "check_fit", lambda spec, *more, **named: "")
    commands, printed = console("Story 1")
    dry, real = [CliRunner().invoke(app, shlex.split(line, comments=True)[2:], input="n\n") for line in commands]
    assert dry.exit_code == 0 and '"spot": {}' in dry.output and "projects/lab/locations/us-east5-b" in dry.output
    assert real.exit_code == 1 and all(line in real.output for line in printed)


def test_story_2_runs(run, tmp_path):
    (tmp_path / "work" / "train.py").write_text("import sys; print(sys.argv[2])")
    (tmp_path / "work" / "choose.py").write_text("print('lr 3e-3 is best')")
    commands, printed = console("Story 2")
    assert commands[0].startswith("export DOVETAIL_JOBS=")
    shown = run("\n".join(commands[1:])).splitlines()
    assert [line for line in shown if not line.startswith("task ")] == printed
