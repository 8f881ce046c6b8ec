"""Whole RL runs on a small model: every algorithm learns, and metrics, evaluation and refusals are as documented."""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import numpy as np
import pytest
from corners import corners
from refusals import refuses
from safetensors.numpy import load_file
from tune.rl.plain_rewards import failing, low_tokens, of_messages
from tune.rl.small_runs import PROMPTS, RECIPE, run
from tune.small_models import metrics, model_folder
from typer.testing import CliRunner

from dovetail.cli.main import app
from dovetail.core import yaml_text
from dovetail.core.errors import CheckpointError, RecipeError, UserError
from dovetail.core.option import default_of, kinds_of, options_of
from dovetail.core.recipe import create
from dovetail.core.types import Batch
from dovetail.engine.options import EngineOptions
from dovetail.tune.rl.losses import Plain
from dovetail.tune.rl.rewards.reward import RewardFunction
from dovetail.tune.rl.rollouts import Rollouts
from dovetail.tune.rl.sections import RolloutEngine
from dovetail.tune.rl.settings import Rl

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("rl")


def rewards_of(folder):
    return [line["reward"] for line in metrics(folder) if "reward" in line]


def learns(folder, gain: float) -> bool:
    found = rewards_of(folder)
    return bool(np.mean(found[-2:]) > np.mean(found[:2]) + gain)


def test_grpo_learns_and_its_sampler_agrees_with_its_trainer(place):
    ended = run(place, name="grpo", steps=12)
    assert ended.code == 0 and ended.step == 12
    assert learns(place / "grpo", 0.15)
    lines = metrics(place / "grpo")
    assert max(line["gap_max"] for line in lines) < 1e-4
    assert all(abs(line["ratio"] - 1) < 1e-4 and line["clip_fraction"] == 0 for line in lines)
    bins = [name for name in lines[0] if name.startswith("ratio_")]
    assert len(bins) == 7 and sum(lines[0][name] for name in bins) == pytest.approx(1)
    said = [json.loads(line) for line in (place / "grpo" / "completions.jsonl").read_text().splitlines()]
    assert len(said) == 12 * 32 and {line["step"] for line in said} == set(range(1, 13))
    assert [line["version"] for line in said if line["step"] == 5] == [4] * 32
    assert said[0]["prompt"] and said[0]["rewards"] == {"low_tokens": said[0]["reward"]}


def test_the_command_runs_a_recipe_with_rewards(place):
    """As docs/rl.md prints it, at a tiny size."""
    (place / "sums.jsonl").write_text("".join(json.dumps(record) + "\n" for record in PROMPTS))
    rewards = [{"kind": "number", "column": "answer"}, {"kind": "length", "most": 32, "weight": 0.1}]
    recipe = {
        **{key: value for key, value in RECIPE.items() if key != "show"},
        "model": model_folder(place), "data": {"path": str(place / "sums.jsonl")}, "rewards": rewards, "steps": 1,
    }  # fmt: skip
    (place / "sums.yaml").write_text(yaml_text.write(recipe))
    given = ["rl", str(place / "sums.yaml"), "rewards.1.weight=0.5", "--run-dir", str(place / "command"), "--quiet"]
    out = CliRunner().invoke(app, given)
    assert out.exit_code == 0, out.output
    assert set(metrics(place / "command")[0]) >= {"reward/number", "reward/length"}
    kept = yaml_text.parse((place / "command" / "recipe.yaml").read_text())["rewards"]
    assert kept == [rewards[0], {**rewards[1], "weight": 0.5}]


ALGORITHMS = {
    "dr_grpo": {}, "dapo": {"loss": {"soft_punish_cache": 2}},
    "gspo": {"updates": 2, "loss": {"epsilon": 0.2, "epsilon_high": 0.2}},
    "cispo": {}, "rloo": {}, "sapo": {"num_iterations": 2, "loss": {"scale_rewards": "batch"}},
    "reinforce_pp": {"num_generations": 4, "prompts": 8},
    "ppo": {"updates": 2, "critic": {"kl_coef": 0.01}},
}  # fmt: skip
DAILY = ()


@pytest.mark.parametrize(
    "algo", [name if name in DAILY else pytest.param(name, marks=pytest.mark.thorough) for name in ALGORITHMS]
)
def test_every_algorithm_learns(place, algo):
    changes = ALGORITHMS[algo]
    steps = 10 * changes.get("updates", 1) * changes.get("num_iterations", 1)
    assert run(place, name=algo, algo=algo, steps=steps, checkpoint={"every": 0}, **changes).code == 0
    assert learns(place / algo, 0.1), rewards_of(place / algo)


def test_lora_with_temperature_top_k_and_a_reference(place):
    """Everything that scores rows a second time, in one run."""
    ended = run(
        place, name="lora", steps=6, lora={"r": 8}, updates=2, loss={"beta": 0.05}, optimizer={"lr": 3e-2},
        sampling={"temperature": 0.7, "top_k": 10, "top_p": 0.9},
    )  # fmt: skip
    assert ended.code == 0
    lines = metrics(place / "lora")
    assert max(line["gap_max"] for line in lines) < 1e-4  # sampler and trainer agree on the log-probabilities
    assert lines[0]["kl"] == pytest.approx(0, abs=1e-6) and lines[-1]["kl"] > 0
    # the policy has changed before the second update of a rollout
    assert lines[1]["kl"] > 0
    adapters = load_file(place / "lora" / "export" / "step_6" / "adapter_model.safetensors")
    assert any(np.abs(x).max() > 0 for name, x in adapters.items() if "lora_B" in name)


@pytest.mark.thorough
def test_the_reference_is_the_policy_that_the_run_starts_with(place):
    """With from_adapter it is the model with the adapter, or the base if asked for; sync_every updates it."""
    given = dict(lora={"r": 8}, loss={"beta": 0.05}, optimizer={"lr": 3e-2}, checkpoint={"every": 0})
    run(place, name="before", steps=3, **given)
    given["from_adapter"] = str(place / "before/export/step_3")
    references = {"policy": {}, "base": {"model": "base"}, "synced": {"sync_every": 1, "mixup_alpha": 1.0}}
    kl = {}
    for name, reference in references.items():
        run(place, name=f"from-{name}", steps=2, reference=reference, **given)
        kl[name] = [line["kl"] for line in metrics(place / f"from-{name}")]
    assert kl["policy"][0] == pytest.approx(0, abs=1e-6) and kl["policy"][1] > 1e-5
    assert kl["base"][0] > 1e-3
    assert kl["synced"] == pytest.approx([0, 0], abs=1e-6)


@pytest.mark.thorough
def test_engine_on_its_own_devices_and_one_rollout_behind(place):
    """The first rewards are the same with the sampler on other devices, and while the trainer computes."""
    assert len(jax.devices()) == 8
    ended = run(place, name="apart", steps=6, engine={"devices": 2}, mesh={"fsdp": 2, "data": 3}, num_generations=6)
    assert ended.code == 0
    together = rewards_of(place / "apart")
    assert all(line["gap_max"] < 1e-3 for line in metrics(place / "apart"))
    ended = run(
        place,
        name="behind",
        steps=6,
        engine={"devices": 2, "max_staleness": 1},
        mesh={"fsdp": 2, "data": 3},
        num_generations=6,
    )
    assert ended.code == 0
    said = [json.loads(line) for line in (place / "behind" / "completions.jsonl").read_text().splitlines()]
    assert [next(line["version"] for line in said if line["step"] == step) for step in range(1, 7)] == [
        0,
        0,
        1,
        2,
        3,
        4,
    ]
    assert rewards_of(place / "behind")[0] == together[0]


@pytest.mark.parametrize("algo", corners(["gkd", "reverse_kl"], []))
def test_a_teacher_in_place_of_rewards(place, algo):
    """On-policy distillation: the divergence from the teacher falls."""
    teacher = model_folder(place, seed=1)
    ended = run(
        place, name=algo, algo=algo, teacher=teacher, rewards=[], num_generations=2, steps=12, checkpoint={"every": 0},
        lora={"r": 8} if algo == "gkd" else None,
    )  # fmt: skip
    assert ended.code == 0
    lines = metrics(place / algo)
    if algo == "gkd":
        assert lines[-1]["divergence"] < 0.8 * lines[0]["divergence"]
    assert "reward" not in lines[0]


@pytest.mark.thorough
def test_sleep_mode_and_offloading_do_not_change_the_run(place):
    run(place, name="plain", steps=3)
    run(place, name="away", steps=3, engine={"enable_sleep_mode": True, "offload_optimizer": True})
    drop = ("sync_seconds", "rollout_seconds", "reward_seconds", "rollout_tokens_per_second")
    plain, away = (
        [{k: v for k, v in line.items() if k not in drop} for line in metrics(place / n)] for n in ("plain", "away")
    )
    assert plain == away


@pytest.mark.thorough
def test_a_quantised_sampler(place):
    """The importance ratios are those of the trainer's weights to the rounded ones."""
    ended = run(place, name="rounded", steps=3, engine={"quantization": "int8", "kv_cache_dtype": "int8"})
    assert ended.code == 0
    assert all(1e-4 < line["gap_max"] < 1 and abs(line["ratio"] - 1) < 0.1 for line in metrics(place / "rounded"))


PASSES: list[tuple[Batch, np.ndarray]] = []  # of each update of `evaluated`: its rows, and their log-probabilities then
EVALUATED: dict[str, Any] = {
    "eval": {"every": 1, "num_generations": 4, "success_threshold": 0.6}, "steps": 2, "max_prompt_length": 32,
    "rewards": [failing, low_tokens, RewardFunction("of_messages", of_messages, 0.0)],
    "num_iterations": 2, "loss": {"importance_sampling_mode": "none", "delta": 1.5, "top_entropy_quantile": 0.5},
}  # fmt: skip


@pytest.fixture(scope="module")
def evaluated(place):
    """Run with a reward that fails for some rows, two passes over the rollout, and an evaluation after each step."""
    data = {"path": str(place / "prompts.jsonl"), "held_out": 0.25}
    chats = [{"messages": [{"role": "user", "content": line["prompt"]}], **line} for line in PROMPTS]
    lines = [json.dumps({name: value for name, value in chat.items() if name != "prompt"}) + "\n" for chat in chats]
    (place / "prompts.jsonl").write_text("".join(lines))
    own = Rollouts.get

    def get(self, at):
        batch, builder = own(self, at), self._parts.builder
        now = builder._scorer.old_policy(at.state.params, builder._ready.place(batch))["old"]
        PASSES.append((jax.device_get(batch), now))
        return batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rollouts, "get", get)
        assert run(place, name="evaluated", data=data, **EVALUATED).code == 0
    return place / "evaluated"


def test_ratios_of_a_second_pass_are_to_the_policy_before_the_first(evaluated):
    """Compute the loss of each update from the log-probabilities of its weights (formulas: test_losses)."""
    (rows, first), (again, second) = PASSES
    lines = [line for line in metrics(evaluated) if "loss" in line]
    for name in rows.columns:
        np.testing.assert_array_equal(rows.columns[name], again.columns[name])
    mask = np.asarray(rows.loss_mask) > 0
    old, advantages = (np.asarray(rows.columns[name]) for name in ("old", "advantages"))
    kept = np.asarray(rows.columns["top_entropy"])
    assert 0.4 < kept[mask].mean() < 0.6
    np.testing.assert_array_equal(first[mask], old[mask])
    assert np.abs(second - old)[mask].max() > 0.01
    for line, now in zip(lines, (first, second), strict=True):
        ratio = np.exp(np.where(mask, now - old, 0.0))
        gain = np.minimum(np.minimum(ratio, 1.5) * advantages, np.clip(ratio, 0.8, 1.2) * advantages)
        assert line["loss"] == pytest.approx(-np.sum(np.where(mask, gain * kept, 0) * rows.loss_mask), abs=1e-5)
    said = [json.loads(line) for line in (evaluated / "completions.jsonl").read_text().splitlines()]
    assert {line["step"] for line in said} == {1}, "one rollout, two updates"


def test_a_changed_reward_stops_a_resume(place, evaluated):
    data = {"path": str(place / "prompts.jsonl"), "held_out": 0.25}
    with refuses(None, CheckpointError, "changed_inputs", naming="the reward 'failing' has changed since step 2"):
        run(place, name="evaluated", data=data, **{**EVALUATED, "steps": 4, "rewards": EVALUATED["rewards"][1:]})
    heavier = [failing, RewardFunction("low_tokens", low_tokens, 2.0), EVALUATED["rewards"][2]]
    with refuses(None, CheckpointError, "changed_inputs", naming="the reward 'low_tokens' has changed since step 2"):
        run(place, name="evaluated", data=data, **{**EVALUATED, "steps": 4, "rewards": heavier})


def test_a_failing_reward_affects_only_its_rows(evaluated):
    said = [json.loads(line) for line in (evaluated / "completions.jsonl").read_text().splitlines()]
    failed = [line for line in said if line["problems"]]
    assert failed and all("division by zero" in line["problems"]["failing"] for line in failed)
    assert all(line["reward"] == line["rewards"]["low_tokens"] for line in failed)
    # prompts are messages here, and so are the completions that a reward is given
    assert all(line["rewards"]["of_messages"] == len(line["completion"]) for line in said)


def test_a_run_in_which_every_reward_fails_stops(place):
    """The error has the first traceback, and nothing is exported."""
    with pytest.raises(UserError, match="no completion of the last rollout got a reward") as stopped:
        run(place, name="unrewarded", steps=1, rewards=[of_messages])
    assert "in of_messages" in str(stopped.value) and "TypeError: string indices" in str(stopped.value)
    folder = place / "unrewarded"
    assert not (folder / "export").exists() and not list((folder / "checkpoints").glob("*"))
    said = [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]
    assert len(said) == 32 and all(line["reward"] is None and line["problems"] for line in said)


@pytest.mark.thorough
def test_a_stopped_run_repeats_its_rollouts_with_a_corrected_reward(place):
    reward = place / "corrected.py"
    reward.write_text("def mine(completions, **columns):\n    return [len(c[0]['content']) for c in completions]\n")
    with pytest.raises(UserError, match="got a reward"):
        run(place, name="corrected", steps=2, rewards=[{"function": f"{reward}:mine"}])
    reward.write_text("def mine(completions, **columns):\n    return [len(c) for c in completions]\n")
    sys.modules.pop(next(name for name in sys.modules if name.startswith("corrected_")))  # as a new process would
    assert run(place, name="corrected", steps=2, rewards=[{"function": f"{reward}:mine"}]).code == 0
    said = [json.loads(line) for line in (place / "corrected" / "completions.jsonl").read_text().splitlines()]
    assert len(said) == 64 and all(line["reward"] == len(line["completion"]) for line in said)


def test_evaluation_on_held_out_prompts(evaluated):
    evals = [line for line in metrics(evaluated) if line.get("kind") == "eval"]
    assert [line["step"] for line in evals] == [1, 2]
    assert 0 <= evals[0]["held_out_pass@1"] <= evals[0]["held_out_pass@4"] <= 1 and "held_out_maj@4" in evals[0]


@pytest.mark.parametrize(
    "changes, param",
    [
        ({"rewards": []}, "rewards"),
        ({"algo": "grpoo"}, "algo"),
        ({"num_generations": 1}, "num_generations"),
        ({"loss": {"kl_estimator": "k1", "beta": 0.1}}, "loss.kl_estimator"),
        ({"sampling": {"top_p": 0.9}}, "sampling.top_p"),
        ({"sampling": {"top_k": 0}}, "sampling.top_k"),
        ({"sampling": {"temperature": 0}}, "sampling.temperature"),
        ({"max_prompt_length": 2}, "max_prompt_length"),
        ({"updates": 5}, "updates"),
        ({"num_iterations": 0}, "num_iterations"),
        ({"algo": "rloo", "loss": {"scale_rewards": "batch"}}, "loss.scale_rewards"),
        ({"loss": {"scale_rewards": "groups"}}, "loss.scale_rewards"),
        ({"loss": {"top_entropy_quantile": 1.2}}, "loss.top_entropy_quantile"),
        ({"loss": {"soft_punish_cache": 9}}, "loss.soft_punish_cache"),
        ({"algo": "cispo", "loss": {"delta": 4.0}}, "loss.delta"),
        ({"algo": "sapo", "loss": {"epsilon": 0.2}}, "loss.epsilon"),
        ({"advantage": np.tanh, "loss": {"scale_rewards": "none"}}, "loss.scale_rewards"),
        ({"policy_loss": Plain(), "loss": {"delta": 4.0}}, "loss.delta"),
        ({"batch": 2}, "batch"),
        ({"critic": {"lam": 0.9}}, "critic"),
        ({"distillation": {"kind": "jsd"}}, "distillation"),
        ({"samples": {"every": 5, "prompts": ["hi"]}}, "samples"),
        ({"data": {"path": "p.jsonl", "overlong": "skip"}}, "data.overlong"),
        ({"data": {"sources": [{"path": "p.jsonl", "weight": 2.0}]}}, "data.sources"),
        ({"eval": {"batches": 4}}, "eval.batches"),
        ({"eval": {"num_generations": 2}}, "eval.every"),
        ({"steps": 0, "tokens": 1000}, "tokens"),
        ({"loss": {"kl_estimator": "k2"}}, "loss.kl_estimator"),
        ({"loss": {"importance_sampling_mode": "drop"}}, "loss.importance_sampling_mode"),
        (
            {"loss": {"importance_sampling_mode": "none"}, "engine": {"quantization": "fp8"}},
            "loss.importance_sampling_mode",
        ),
        ({"engine": {"quantization": "gguf"}}, "engine.quantization"),
        ({"engine": {"quantization": "gguf_int8"}}, "engine.quantization"),
        (
            {"loss": {"importance_sampling_mode": "none", "importance_sampling_cap": 3.0}},
            "loss.importance_sampling_cap",
        ),
        ({"algo": "reverse_kl", "teacher": "none", "loss": {"dynamic_sampling": True}}, "loss.dynamic_sampling"),
        ({"teacher": "none"}, "teacher"),
        ({"sampling": {"tool_choice": "named"}}, "sampling.tool_choice"),
        ({"sampling": {"parallel_tool_calls": False}}, "sampling.parallel_tool_calls"),
        ({"engine": {"devices": 8}}, "engine.devices"),
        ({"engine": {"max_staleness": 2}}, "engine.max_staleness"),
        ({"engine": {"max_staleness": 1, "enable_sleep_mode": True}}, "engine.enable_sleep_mode"),
        ({"engine": {"max_num_seqs": 0}}, "engine.max_num_seqs"),
        ({"engine": {"gpu_memory_utilization": 0.5}}, "engine.gpu_memory_utilization"),
        ({"engine": {"gpu_memory_utilization": 1.5, "enable_sleep_mode": True}}, "engine.gpu_memory_utilization"),
    ],
)
def test_invalid_recipes_are_refused(place, changes, param):
    with refuses(param, RecipeError):
        run(place, name="refused", **changes)


@pytest.mark.parametrize(
    "changes, naming",
    [
        ({"rewards": [{"kind": "number", "column": "anser"}]}, "answer"),
        ({"sampling": {"tool_choice": "auto"}}, "tool_choice"),
    ],
)
def test_recipes_that_do_not_fit_the_data_are_refused(place, changes, naming):
    with pytest.raises(UserError, match=naming):
        run(place, name="refused", **changes)


@pytest.mark.parametrize("key", RolloutEngine.REFUSED)
def test_an_engine_option_that_rl_sets_is_refused_with_the_reason(key):
    with refuses(f"engine.{key}", RecipeError, code="unknown_key", naming=RolloutEngine.REFUSED[key]):
        create(Rl, {"model": "none", "steps": 1, "engine": {key: 1}})


def test_the_engine_section_has_the_types_and_defaults_of_engine_options():
    section, options = kinds_of(RolloutEngine), kinds_of(EngineOptions)
    shared = section.keys() & options.keys() - {"RENAMED"}
    assert shared | RolloutEngine.REFUSED.keys() == options_of(EngineOptions).keys()
    assert {name: section[name] for name in shared} == {name: options[name] for name in shared}
    defaults = {name: default_of(RolloutEngine, name) for name in shared - {"max_num_seqs"}}
    assert defaults == {name: default_of(EngineOptions, name) for name in defaults}


@pytest.mark.thorough
def test_the_export_can_be_served(place):
    from dovetail import LLM

    run(place, name="served", steps=1)
    folder = place / "served" / "export" / "step_1"
    assert LLM(str(folder)).generate(["say 1"])[0].outputs[0].token_ids
    assert model_folder(place) != str(folder)
