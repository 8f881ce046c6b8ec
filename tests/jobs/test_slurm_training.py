"""A training of two processes on a real Slurm, preempted in the middle: the loss curve of an undisturbed run."""

from __future__ import annotations

import json
import os

import pytest
from jobs.slurm_cluster import preempt, until
from train.runs import model_folder
from xla_flags import flags

from dovetail.jobs import actions
from dovetail.jobs.spec import make

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("slurm_here", "supervised")]
STEPS = 150


@pytest.fixture
def train(store, tmp_path):
    def start(name: str) -> str:
        overrides = (
            f"model={model_folder(tmp_path)}", f"steps={STEPS}", "batch=4", "length=32", "schedule.warmup=0",
            f"eval.every={STEPS}", "eval.batches=1", "checkpoint.every=50",
        )  # fmt: skip
        spec = make({
            "name": name, "recipe": "tiny", "overrides": overrides, "backend": "slurm", "hosts": 2, "code.path": "",
            "env": [f"XLA_FLAGS={flags(1)}", f"DOVETAIL_HOME={os.environ['DOVETAIL_HOME']}", "JAX_PLATFORMS=cpu"],
            "slurm": {"partition": "low"}, "retries": {"backoff": 0.1},
        })  # fmt: skip
        return actions.create(store, spec).id

    return start


def losses(store, id: str) -> dict[int, float]:
    """Step -> loss; a step that was done twice, before and after the preemption, must say the same."""
    path = store.home(id) / "run" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    found: dict[int, float] = {}
    for line in (line for line in lines if "loss" in line):
        assert found.setdefault(line["step"], line["loss"]) == line["loss"]
    return found


def said(store, id: str) -> str:
    logs = sorted((store.home(id) / "attempts").glob("*/*.log"))
    return "\n---\n".join(f"{path}\n{path.read_text()[-3000:]}" for path in logs)


def test_preempted_in_the_middle_it_goes_on_as_if_nothing_had_been(store, train):
    straight = train("straight")
    until(lambda: store.job(straight).is_over, 400)
    assert store.job(straight).status == "succeeded", said(store, straight)
    disturbed = train("disturbed")
    until(lambda: max(losses(store, disturbed), default=0) >= 10, 400)
    preempt(1)
    until(lambda: store.job(disturbed).is_over, 400)
    assert store.job(disturbed).status == "succeeded", said(store, disturbed)
    whats = [event.what for event in store.events(disturbed)]
    assert any(what.startswith("waiting on") for what in whats), whats  # it lost its nodes, and came back
    assert losses(store, disturbed) == losses(store, straight)
    assert len(losses(store, straight)) > 10 and max(losses(store, straight)) == STEPS
