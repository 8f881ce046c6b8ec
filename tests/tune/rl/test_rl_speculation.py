"""Speculative decoding in RL: the same completions and updates, in fewer steps of the engine."""

from __future__ import annotations

import json

import pytest
from refusals import refuses
from tune.rl.small_runs import run
from tune.small_models import metrics

from dovetail.core.errors import RecipeError
from dovetail.core.recipe import create
from dovetail.engine.device.runner import Runner
from dovetail.engine.spec.draft_length import DraftLength
from dovetail.engine.spec.suffix import SuffixDrafter
from dovetail.tune.rl.settings import Rl

SPECULATION = {"kind": "suffix", "num_speculative_tokens": 3, "refresh": 2}


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
def test_rollouts_and_updates_are_the_same(tmp_path, always, monkeypatch, sampling):
    kept = []  # past outputs after each refresh
    refresh = SuffixDrafter.refresh
    monkeypatch.setattr(SuffixDrafter, "refresh", lambda self: (refresh(self), kept.append(len(self._outputs)))[0])
    changes = {"steps": 5, "prompts": 2, "num_generations": 4, "max_completion_length": 24, "sampling": sampling}
    run(tmp_path, name="plain", **changes)
    assert not kept
    run(tmp_path, name="drafted", speculation=SPECULATION, **changes)
    lines = [(tmp_path / name / "completions.jsonl").read_text().splitlines() for name in ("plain", "drafted")]
    plain, drafted = ([json.loads(line) for line in each] for each in lines)
    assert [line["completion"] for line in plain] == [line["completion"] for line in drafted]
    found = metrics(tmp_path / "drafted")
    assert max(line.get("accepted_length", 0) for line in found) > 1
    assert all("seconds_saved" in line for line in found if "accepted_length" in line)
    assert kept == [16, 16]  # before the third and the fifth rollout: those of the two before
    for a, b in zip(metrics(tmp_path / "plain"), found, strict=True):
        assert a["reward"] == b["reward"] and a["loss"] == pytest.approx(b["loss"], abs=1e-5)


@pytest.mark.parametrize(
    ("given", "param", "naming"),
    [
        ({"speculation": {"kind": "dspark"}}, "speculation.kind", "dspark"),
        ({"speculation": {"kind": "ngram"}}, "speculation.kind", "suffix"),
        ({"speculation": {"refresh": 2}}, "speculation.kind", "suffix"),
        ({"speculation": {"kind": "suffix", "refresh": -1}}, "speculation.refresh", "-1"),
        ({"speculation": {"kind": "suffix", "num_speculative_tokens": 0}}, "speculation.num_speculative_tokens", "0"),
    ],
)
def test_wrong_settings_are_refused(given, param, naming):
    with refuses(param, RecipeError, naming=naming):
        create(Rl, {"model": "m", "steps": 1, **given})


def test_the_engine_option_is_set_by_the_section():
    with refuses("engine.speculative_config", RecipeError, "unknown_key", naming="set speculation"):
        create(Rl, {"model": "m", "steps": 1, "engine": {"speculative_config": {"method": "suffix"}}})


def test_speculation_does_not_determine_a_rollout():
    """So a run may be resumed with it or without it."""
    plain, drafted = (create(Rl, {"model": "m", "steps": 1, **more}) for more in ({}, {"speculation": SPECULATION}))
    assert plain.rollouts_key == drafted.rollouts_key
