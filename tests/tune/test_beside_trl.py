"""Test whole runs against TRL's trainers: equal model, records and optimizer give equal losses."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from later import later
from tune.small_models import LORA, metrics, model_folder
from tune.test_dpo import adapter_folder

import dovetail as dt

transformers, datasets, trl, peft = later("transformers"), later("datasets"), later("trl"), later("peft")
orpo, cpo = later("trl.experimental.orpo"), later("trl.experimental.cpo")

pytestmark = pytest.mark.thorough

STEPS, LR = 5, 3e-3
WORDS = ["red fox", "blue dog jumps", "quick hare", "lazy old cat"]
PAIRS = [{"prompt": f"say {w}:", "chosen": f" <{w}>", "rejected": f" no {w[::-1]} no"} for w in WORDS]
RATED = [{"prompt": f"say {w}:", "completion": f" <{w}>", "label": i % 2 == 0} for i, w in enumerate(WORDS)]


def ours(place: Path, records: list, **how: Any) -> list[dict]:
    ended = dt.dpo(
        model=model_folder(place), data=records, steps=STEPS, batch=8, length=256, show=False, run_dir=place / "ours",
        optimizer={"lr": LR}, precision={"compute": "f32"}, schedule={"name": "constant"}, **how,
    )  # fmt: skip
    return [line for line in metrics(ended.folder) if "loss" in line]


def theirs(place: Path, records: list, config: Any, trainer: Any, adapter: str = "", **how: Any) -> list[dict]:
    folder = model_folder(place)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    if adapter:
        model = peft.PeftModel.from_pretrained(model, adapter, is_trainable=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args = config(
            output_dir=str(place / "theirs"), per_device_train_batch_size=4, max_steps=STEPS, learning_rate=LR,
            lr_scheduler_type="constant", logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, bf16=False,
            gradient_checkpointing=False, max_grad_norm=1.0, disable_tqdm=True, **how,
        )  # fmt: skip
        one = trainer(
            model=model, args=args, train_dataset=datasets.Dataset.from_list(records), processing_class=tokenizer
        )
        one.train()
    return [line for line in one.state.log_history if "loss" in line]


def same(ours: list[dict], theirs: list[dict], *names: tuple[str, str], tol: float = 2e-4) -> None:
    assert len(ours) == len(theirs) == STEPS
    for mine, other in (("loss", "loss"), *names):
        mine_values, other_values = ([line[key] for line in lines] for lines, key in ((ours, mine), (theirs, other)))
        print(mine, *(f"{x:.6f}" for x in mine_values), "TRL:", *(f"{x:.6f}" for x in other_values))
        np.testing.assert_allclose(mine_values, other_values, rtol=tol, atol=tol, err_msg=mine)


MARGIN = ("reward_margin", "rewards/margins")


MIXES = {
    "sigmoid": None,
    "apo_zero": None,
    "apo_down": None,
    "sigmoid + sft": [1.0, 0.2],
    "sigmoid + bco_pair + sft": [0.8, 0.2, 1.0],  # MPO
}


@pytest.mark.parametrize("name", MIXES)
def test_dpo(name, tmp_path):
    loss, weights = name.split(" + "), MIXES[name]
    given = {"loss_type": loss, "beta": 0.3} | ({"loss_weights": weights} if weights else {})
    found = ours(tmp_path, PAIRS, preference=given)
    wanted = theirs(tmp_path, PAIRS, trl.DPOConfig, trl.DPOTrainer, beta=0.3, loss_type=loss, loss_weights=weights)
    same(found, wanted, MARGIN)


def test_dpo_from_an_adapter(tmp_path):
    adapter = adapter_folder(tmp_path)
    found = ours(tmp_path, PAIRS, preference={"beta": 0.3}, lora=LORA, from_adapter=adapter)
    wanted = theirs(tmp_path, PAIRS, trl.DPOConfig, trl.DPOTrainer, adapter, beta=0.3)
    assert found[0]["loss"] == pytest.approx(0.693147, abs=1e-5)
    same(found, wanted, MARGIN)


def test_dpo_with_a_synced_reference(tmp_path):
    found = ours(tmp_path, PAIRS, preference={"beta": 0.3}, reference={"sync_every": 2})
    how = dict(beta=0.3, sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=0.6)
    same(found, theirs(tmp_path, PAIRS, trl.DPOConfig, trl.DPOTrainer, **how), MARGIN)


def test_kto(tmp_path):
    found = ours(tmp_path, RATED, preference={"loss_type": "kto", "beta": 0.3, "desirable": 1.2})
    wanted = theirs(
        tmp_path, RATED, trl.KTOConfig, trl.KTOTrainer, beta=0.3, desirable_weight=1.2,
        train_sampling_strategy="sequential",
    )  # fmt: skip
    assert max(line["kl"] for line in found) > 0.01
    same(found, wanted, ("kl", "kl"))


def test_orpo(tmp_path):
    """TRL's cross entropy includes the prompt and is averaged over all tokens; here it is of the completion, as in the
    paper. What is added to it, and the rewards, are the same before the first update."""
    found = ours(tmp_path, PAIRS, preference={"loss_type": "orpo", "beta": 0.3})[0]
    wanted = theirs(tmp_path, PAIRS, orpo.ORPOConfig, orpo.ORPOTrainer, beta=0.3)[0]
    odds, theirs_odds = found["loss"] + found["chosen_reward"] / 0.3, wanted["loss"] - wanted["nll_loss"]
    np.testing.assert_allclose(odds, theirs_odds, rtol=1e-4)
    for side in ("chosen", "rejected"):
        np.testing.assert_allclose(found[f"{side}_reward"], wanted[f"rewards/{side}"], rtol=1e-4)


def test_simpo(tmp_path):
    found = ours(tmp_path, PAIRS, preference={"loss_type": "simpo", "beta": 2.0, "gamma": 0.5})
    how = dict(loss_type="simpo", beta=2.0, simpo_gamma=0.5, cpo_alpha=0.0)
    same(found, theirs(tmp_path, PAIRS, cpo.CPOConfig, cpo.CPOTrainer, **how))
