"""Test that a two-process training preempted by a real Slurm has the loss curve of a straight run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import jax
import pytest
from jobs.slurm_cluster import preempt, until
from train.runs import model_folder
from xla_flags import flags

from dovetail.core.recipe import load
from dovetail.core.reporter import Reporter
from dovetail.jobs import actions
from dovetail.jobs.spec import make
from dovetail.train.next_token import next_token
from dovetail.train.prepare import prepare
from dovetail.train.pretrain import _open_rows
from dovetail.train.run import run
from dovetail.train.settings import Pretrain

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("slurm_here", "supervised")]
STEPS = 150  # some seconds of work: Slurm takes one or two to preempt
OVERRIDES = (f"steps={STEPS}", "batch=4", "length=32", "schedule.warmup=0", "eval.every=0", "checkpoint.every=1000")


@pytest.fixture
def overrides(tmp_path) -> tuple[str, ...]:
    return (f"model={model_folder(tmp_path)}", *OVERRIDES)


def straight(overrides: tuple[str, ...], folder: Path) -> dict[int, float]:
    """The undisturbed run: of two devices of this process, which computes what two processes of one device each do."""
    settings = load("tiny", overrides, Pretrain)
    ready = prepare(settings, next_token(settings), jax.devices()[:2])
    reporter = Reporter(show=False)
    opened = _open_rows(settings, ready, reporter)
    assert run(ready, folder, opened, reporter=reporter).code == 0
    return losses(folder)


def train(store, overrides: tuple[str, ...]) -> str:
    spec = make({
        "name": "disturbed", "recipe": "tiny", "overrides": overrides, "backend": "slurm", "hosts": 2, "code.path": "",
        "env": [f"XLA_FLAGS={flags(1)}", f"DOVETAIL_HOME={os.environ['DOVETAIL_HOME']}", "JAX_PLATFORMS=cpu"],
        "slurm": {"partition": "low"}, "retries": {"backoff": 0.1},
    })  # fmt: skip
    return actions.create(store, spec).id


def losses(folder: Path) -> dict[int, float]:
    """Step -> loss; a step that was done twice, before and after the preemption, must say the same."""
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    found: dict[int, float] = {}
    for line in (line for line in lines if "loss" in line):
        assert found.setdefault(line["step"], line["loss"]) == line["loss"]
    return found


def said(store, id: str) -> str:
    logs = sorted((store.home(id) / "attempts").glob("*/*.log"))
    return "\n---\n".join(f"{path}\n{path.read_text()[-3000:]}" for path in logs)


def test_a_preempted_training_has_the_curve_of_an_undisturbed_one(store, overrides, tmp_path):
    expected = straight(overrides, tmp_path / "straight")
    id = train(store, overrides)
    folder = store.home(id) / "run"
    until(lambda: max(losses(folder), default=0) >= 10, 400)
    preempt(1)
    until(lambda: store.job(id).is_over, 400)
    assert store.job(id).status == "succeeded", said(store, id)
    whats = [event.what for event in store.events(id)]
    assert any(what.startswith("waiting on") for what in whats), whats  # it lost its nodes, and came back
    assert (store.job(id).attempts, store.job(id).preemptions) == (1, 1)
    assert losses(folder) == expected and max(expected) == STEPS and len(expected) > 10
