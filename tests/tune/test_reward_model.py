"""Test reward models: training, export, and equal scores in transformers, PEFT and the engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from data.conftest import small_tokenizer
from engine.test_score import judge
from refusals import refuses
from tune.small_models import LORA, RUN, metrics, model_folder, pairs

import dovetail as dt
from dovetail.core import recipe
from dovetail.core.errors import CheckpointError, RecipeError
from dovetail.tune.settings import Reward, Sft

ENGINE = dict(max_num_seqs=4, max_model_len=128, block_size=8)
STILL = RUN | {"optimizer": {"lr": 1e-30}}  # a training that leaves the weights as they are


def ids(records: list[dict], side: str) -> list[list[int]]:
    """As they are trained: a text, its completion and an end."""
    tokenizer = small_tokenizer()
    return [[*tokenizer.encode(record["prompt"] + record[side]), tokenizer.eos_id] for record in records]


def their_scores(model, prompts: list[list[int]]) -> np.ndarray:
    with torch.no_grad():
        return np.asarray([model.eval()(torch.tensor([prompt])).logits.item() for prompt in prompts])


def theirs(folder: Path | str, **more):
    return transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32, **more)


@pytest.mark.slow
def test_a_reward_model_with_all_weights_trained(tmp_path):
    """A few steps learn it; transformers, the engine and a resumed training give the same scores."""
    ended = dt.reward(model=model_folder(tmp_path), data=pairs(), steps=8, run_dir=tmp_path / "run", **RUN)
    assert ended.code == 0 and ended.metrics["reward_accuracy"] == 1 and ended.metrics["reward_margin"] > 2
    folder = ended.folder / "export/step_8"
    new = [{"prompt": f"say {i}", "chosen": f" <{i}>", "rejected": f" no {i}"} for i in range(40, 48)]
    scores = {side: dt.LLM(folder, **ENGINE).score(ids(new, side)) for side in ("chosen", "rejected")}
    assert np.mean(scores["chosen"] > scores["rejected"]) > 0.9  # of pairs that it has not seen
    for side, found in scores.items():
        np.testing.assert_allclose(found, their_scores(theirs(folder), ids(new, side)), rtol=1e-4, atol=1e-4)
    # one pair fits a row, and the batch takes all of them: an epoch is a step
    goes_on = dt.reward(model=str(folder), data=new, epochs=1, run_dir=tmp_path / "on", **STILL | {"length": 32})
    assert goes_on.step == 1
    for side, found in scores.items():
        np.testing.assert_allclose(goes_on.metrics[f"{side}_reward"], found.mean(), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_reward_model_with_adapters(tmp_path):
    """In PEFT's format with their score; merged, a reward model."""
    import peft

    base = model_folder(tmp_path)
    ended = dt.reward(model=base, data=pairs(), lora=LORA, steps=8, run_dir=tmp_path / "run", **RUN)
    assert ended.metrics["reward_accuracy"] == 1
    adapter, prompts = ended.folder / "export/step_8", ids(pairs(4), "chosen")
    own = peft.PeftModel.from_pretrained(theirs(base, num_labels=1), str(adapter))
    merged = dt.merge(base, adapter, tmp_path / "merged")
    found = dt.LLM(merged, **ENGINE).score(prompts)
    np.testing.assert_allclose(found, their_scores(own, prompts), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found, their_scores(theirs(merged), prompts), rtol=1e-4, atol=1e-4)
    with refuses(None, CheckpointError, naming="dovetail merge"):
        dt.LLM(base, **ENGINE, lora_modules={"judge": str(adapter)})


@pytest.mark.thorough
@pytest.mark.parametrize("how", [{"use_dora": True}, {}], ids=["dora", "plain"])
def test_a_reward_model_resumes_from_adapters(how, tmp_path):
    """From a reward model, and from adapters with their score: what the first step measures is what was learnt."""
    base, lora = model_folder(tmp_path), LORA | how
    first = dt.reward(model=base, data=pairs(8), lora=lora, steps=4, run_dir=tmp_path / "run", **RUN)
    adapter = first.folder / "export/step_4"
    begun = dict(data=pairs(8), lora=lora, steps=1, **STILL)
    goes_on = dt.reward(model=base, from_adapter=str(adapter), run_dir=tmp_path / "on", **begun)
    merged = dt.reward(model=str(dt.merge(base, adapter, tmp_path / "merged")), run_dir=tmp_path / "m", **begun)
    for name in ("chosen_reward", "rejected_reward"):
        np.testing.assert_allclose(goes_on.metrics[name], merged.metrics[name], rtol=1e-3)
    assert goes_on.metrics["reward_margin"] > first.metrics["reward_margin"] / 2 > 0


@pytest.mark.slow
@pytest.mark.thorough
def test_margins_of_records(tmp_path):
    """A margin is led by more: the same scores have a greater loss."""
    at = model_folder(tmp_path)
    rows = [record | {"margin": 2.0} for record in pairs(8)]
    plain = dt.reward(model=at, data=rows, steps=1, run_dir=tmp_path / "plain", **STILL)
    led = dt.reward(model=at, data=rows, reward={"margin": True}, steps=1, run_dir=tmp_path / "led", **STILL)
    assert led.metrics["reward_margin"] == plain.metrics["reward_margin"]
    assert led.metrics["loss"] > plain.metrics["loss"] + 0.5
    with refuses("data.keys.margin", naming="1 have none"):
        dt.reward(
            model=at, data=[*rows, *pairs(1)], reward={"margin": True}, steps=1, run_dir=tmp_path / "none", **STILL
        )


def test_bad_settings_of_reward_models_are_refused():
    with refuses("samples.every", RecipeError):
        recipe.create(Reward, {"model": "llama", "steps": 1, "samples": {"every": 1, "prompts": ["Hi"]}})
    with refuses("reward.centering", RecipeError):
        recipe.create(Reward, {"model": "llama", "steps": 1, "reward": {"centering": -1.0}})


@pytest.mark.slow
def test_sft_of_a_reward_model_is_refused(tmp_path):
    judge(tmp_path)
    small_tokenizer().save(tmp_path)
    with refuses("model", RecipeError, naming="dovetail reward"):
        dt.sft(model=str(tmp_path), data=[{"prompt": "a", "completion": " b"}], steps=1, run_dir=tmp_path / "r", **RUN)


# --- epochs -----------------------------------------------------------------------------------------------------------


def test_epochs_replace_steps():
    given = recipe.create(Sft, {"model": "llama", "epochs": 2.5, "batch": 4})
    assert given.total_steps == 0
    counted = given.with_steps(rows=11)
    assert (counted.steps, counted.epochs, counted.total_steps) == (8, 0.0, 8)  # no batch holds examples of two passes
    assert recipe.change(given, {"steps": 9}).with_steps(11).steps == 9  # one puts away the other
    assert recipe.create(Sft, {"model": "llama"}).epochs == 3  # as transformers, where nothing says how long
    for wrong in ({"epochs": 1, "steps": 2}, {"epochs": 1, "tokens": 99}):
        with refuses("steps", RecipeError, naming="steps, tokens or epochs"):
            recipe.create(Sft, {"model": "llama", **wrong})
    with refuses("schedule.warmup", RecipeError):
        recipe.create(Sft, {"model": "llama", "epochs": 1, "schedule": {"warmup": 9}, "batch": 4}).with_steps(11)


@pytest.mark.slow
def test_epochs_give_the_same_run_as_their_steps(tmp_path):
    """With a schedule that depends on where the run ends; started again, it is over."""
    at = model_folder(tmp_path)
    how = dict(model=at, data=pairs(20), **RUN | {"schedule": {"name": "linear"}, "length": 32})
    epochs = dt.reward(epochs=1.5, run_dir=tmp_path / "epochs", **how)
    assert epochs.step == 5  # 3 for a whole pass of 8, 8 and 4 pairs, and 2 for half of one
    steps = dt.reward(steps=epochs.step, run_dir=tmp_path / "steps", **how)
    assert metrics(epochs.folder) == metrics(steps.folder)
    assert f"steps: {epochs.step}" in (epochs.folder / "recipe.yaml").read_text()
    again = dt.reward(epochs=1.5, run_dir=tmp_path / "epochs", **how)
    assert (again.code, again.step) == (0, epochs.step)
