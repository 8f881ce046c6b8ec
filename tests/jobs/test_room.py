"""Test dovetail.jobs as a whole: it imports without jax and knows the trainers' exit codes."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import dovetail.jobs
from dovetail.jobs import outcome
from dovetail.train.guard import exits

FILES = sorted(Path(dovetail.jobs.__file__).parent.rglob("*.py"))


def test_no_module_of_jobs_imports_jax():
    names = [".".join(("dovetail", "jobs", *p.relative_to(FILES[0].parent).with_suffix("").parts)) for p in FILES]
    extras = ("google", "kubernetes")
    lines = ["import importlib, sys", "sys.modules['jax'] = None"]
    lines += [f"importlib.import_module({name!r})" for name in names if not name.endswith(("__init__", "__main__"))]
    lines += [f"assert not [m for m in sys.modules if m.partition('.')[0] in {extras}]"]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["PREEMPTED", "QUARANTINE", "HUNG", "TROUBLE", "LOST", "ABORTED"])
def test_exit_codes_are_those_of_the_trainings(name):
    assert getattr(outcome, name) == getattr(exits, name)


def test_the_package_exports_it():
    assert importlib.import_module("dovetail").remote is importlib.import_module("dovetail.jobs.remote").remote
