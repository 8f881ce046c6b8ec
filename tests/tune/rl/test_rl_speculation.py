"""Speculative decoding in RL: the same completions and updates, in fewer steps of the engine."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from refusals import refuses
from safetensors.numpy import load_file
from tune.rl.small_runs import run
from tune.small_models import metrics, model_folder

import dovetail as dt
from dovetail.core.errors import CheckpointError, RecipeError
from dovetail.core.recipe import create
from dovetail.engine.device.runner import Runner
from dovetail.engine.spec.draft_length import DraftLength
from dovetail.engine.spec.suffix import SuffixDrafter
from dovetail.io.draft_folder import load_draft
from dovetail.io.load import config_of
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


def completions(folder: Path) -> list[str]:
    return [json.loads(line)["completion"] for line in (folder / "completions.jsonl").read_text().splitlines()]


def losses(folder: Path, name: str = "loss") -> list[float]:
    return [line[name] for line in metrics(folder) if name in line]


@pytest.mark.slow
def test_a_drafter_learns_from_rollouts_and_resumes(tmp_path, always):
    changes = {"prompts": 1, "num_generations": 4, "max_completion_length": 12, "checkpoint": {"every": 2}}
    changes |= {"engine": {"max_num_seqs": 2}}
    run(tmp_path, name="plain", steps=4, **changes)
    changes |= {"speculation": {"kind": "dspark", "num_speculative_tokens": 3, "refresh": 2, "updates": 12}}
    straight = run(tmp_path, name="drafted", steps=4, **changes).folder
    assert completions(straight) == completions(tmp_path / "plain")
    np.testing.assert_allclose(losses(straight), losses(tmp_path / "plain"), atol=1e-5)
    found = losses(straight, "drafter_loss")
    assert len(found) == 2 and found[1] < found[0]  # after the first and the third rollout
    assert max(losses(straight, "accepted_length")) > 1
    exported = exported_of(straight)
    draft, weights = load_draft(exported, config_of(str(exported.parent)), "float32")
    assert draft.most == 3 and draft.markov_rank and np.abs(weights["markov"]["w2"]).max() > 0
    run(tmp_path, name="resumed", steps=2, **changes)
    resumed = run(tmp_path, name="resumed", steps=4, **changes).folder
    assert losses(resumed, "drafter_loss") == pytest.approx(found, rel=1e-5)
    assert completions(resumed) == completions(straight)
    with refuses(None, CheckpointError, naming="companion"):
        run(tmp_path, name="resumed", steps=5, **changes | {"speculation": {}})


@pytest.mark.slow
@pytest.mark.thorough
def test_a_drafter_of_a_folder_with_adapters_and_its_own_vocabulary(tmp_path, always):
    """The rows of its head are the policy's."""
    prompts = [{"messages": [{"role": "user", "content": f"say {i}"}]} for i in range(8)]
    drafter = {"num_speculative_tokens": 3, "vocab": 100}
    dt.draft(
        model=model_folder(tmp_path), data=prompts, drafter=drafter, steps=1, batch=8, length=64, show=False,
        answers={"max_tokens": 12}, precision={"compute": "f32"}, run_dir=tmp_path / "draft", out=tmp_path / "drafter",
    )  # fmt: skip
    changes = {"steps": 2, "prompts": 1, "num_generations": 4, "max_completion_length": 12, "lora": {"r": 2}}
    changes |= {"engine": {"max_num_seqs": 2}}
    run(tmp_path, name="plain", **changes)
    changes |= {"speculation": {"kind": "dspark", "model": str(tmp_path / "drafter"), "refresh": 1, "updates": 2}}
    drafted = run(tmp_path, name="drafted", **changes).folder
    assert completions(drafted) == completions(tmp_path / "plain") and len(losses(drafted, "drafter_loss")) == 2
    given, found = (load_file(place / "model.safetensors") for place in (tmp_path / "drafter", exported_of(drafted)))
    assert given.keys() == found.keys() and not np.array_equal(given["fc.weight"], found["fc.weight"])
    for name in ("d2t", "t2d", "lm_head.weight"):  # the head is the base model's, which adapters do not change
        np.testing.assert_array_equal(given[name], found[name])
    changes["speculation"]["num_speculative_tokens"] = 4
    with refuses("speculation.num_speculative_tokens", RecipeError, naming="at most 3"):
        run(tmp_path, name="refused", **changes)


def exported_of(folder: Path) -> Path:
    (found,) = folder.glob("export/step_*/drafter")
    return found


@pytest.mark.parametrize(
    ("given", "param", "naming"),
    [
        ({"speculation": {"kind": "dspark", "refresh": 0}}, "speculation.refresh", "random weights"),
        ({"speculation": {"kind": "dspark", "updates": 0}}, "speculation.updates", "0"),
        ({"speculation": {"kind": "suffix", "model": "drafter"}}, "speculation.model", "dspark"),
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
