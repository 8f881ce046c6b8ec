"""Speculative decoding in RL: the same completions and updates, in fewer steps of the engine."""

from __future__ import annotations

import json

import pytest
from tune.rl.small_runs import run
from tune.small_models import metrics

from dovetail.engine.device.runner import Runner
from dovetail.engine.spec.draft_length import DraftLength


@pytest.fixture
def always(monkeypatch):
    """Speculate at every step, and wait for the compiler, so that it does not depend on the machine's speed."""

    def ready(self, rows: int, drafts: int) -> bool:
        self.steps.all([self.buckets.verify(rows, drafts)])
        return True

    monkeypatch.setattr(Runner, "drafts_ready", ready)
    monkeypatch.setattr(DraftLength, "choose", lambda self, rows: self.choices[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param({}, id="plain"),
        pytest.param({"temperature": 0.7, "top_k": 4}, id="top_k", marks=pytest.mark.thorough),
    ],
)
def test_rollouts_and_updates_are_the_same(tmp_path, always, sampling):
    changes = {"steps": 3, "prompts": 2, "num_generations": 4, "max_completion_length": 24, "sampling": sampling}
    config = {"method": "suffix", "num_speculative_tokens": 3}
    run(tmp_path, name="plain", **changes)
    run(tmp_path, name="drafted", engine={"speculative_config": config}, **changes)
    lines = [(tmp_path / name / "completions.jsonl").read_text().splitlines() for name in ("plain", "drafted")]
    plain, drafted = ([json.loads(line) for line in each] for each in lines)
    assert [line["completion"] for line in plain] == [line["completion"] for line in drafted]
    found = metrics(tmp_path / "drafted")
    assert max(line.get("accepted_length", 0) for line in found) > 1
    for a, b in zip(metrics(tmp_path / "plain"), found, strict=True):
        assert a["reward"] == b["reward"] and a["loss"] == pytest.approx(b["loss"], abs=1e-5)
