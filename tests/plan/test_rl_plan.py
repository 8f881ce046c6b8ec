"""Test the plan of an RL step: memory of a device and seconds of each part."""

from dataclasses import replace

import pytest
from refusals import refuses

from dovetail.cli.plan_rl import rollout_of
from dovetail.core import recipe
from dovetail.core.accelerator import parse
from dovetail.core.errors import OutOfMemoryError
from dovetail.models.registry import read_model
from dovetail.plan.rl_plan import plan_rl
from dovetail.tune.rl.settings import Rl, beside_policy


def planned(where: str, model: str, *overrides: str, answer: int = 0):
    settings, accelerator, cfg = recipe.change(Rl(model=model, steps=1), overrides), parse(where), read_model(model)
    filled = settings.filled(accelerator.total_devices - settings.spare_devices)
    return plan_rl(cfg, filled, accelerator, rollout_of(filled, cfg, accelerator, answer)), filled


def test_a_measured_rollout_lies_between_the_bounds():
    """docs/performance.md: 8 prompts x 64 answers of 256 tokens, SmolLM2-135M's shape, 0.56 to 0.66 s on an H200."""
    plan, _ = planned("h200x1", "smollm2-135m", "num_generations=64", "max_prompt_length=128")
    assert plan.sampling.best < 0.56 and plan.sampling.worst > 0.66
    assert plan.name == "colocated on 1" and plan.scoring.best == 0
    parts = (plan.sampling, plan.scoring, plan.training, plan.sync)
    assert plan.step.best == pytest.approx(sum(part.best for part in parts))


def test_memory_includes_what_the_recipe_keeps_beside_the_trainer():
    plan, settings = planned("h200x1", "smollm2-135m", "algo=ppo", "critic.kl_coef=0.01")
    chip = parse("h200x1").chip
    beside = beside_policy(settings, read_model("smollm2-135m"), chip.device_hbm)  # type: ignore[union-attr]
    assert {"critic", "reference", "engine's weights", "engine's pages"} <= beside.keys()
    assert {name: plan.memory[name] for name in beside} == beside
    assert sum(plan.memory.values()) <= (plan.trainer.limit or 0)
    assert plan.scoring.best > 0  # the old policy's log-probabilities, and the reference's
    alone, _ = planned("h200x1", "smollm2-135m")
    assert plan.training.best == pytest.approx(2 * alone.training.best, rel=0.1)  # the critic is trained too


def test_an_engine_on_its_own_devices_overlaps():
    together, _ = planned("h200x8", "llama3-8b", "num_generations=16", "prompts=32")
    split, _ = planned("h200x8", "llama3-8b", "num_generations=16", "prompts=32", "engine.devices=4")
    stale, _ = planned(
        "h200x8", "llama3-8b", "num_generations=16", "prompts=32", "engine.devices=4", "engine.max_staleness=1"
    )
    assert split.name == "split: 4 train, 4 sample" and "engine's pages" not in split.memory
    assert split.sampling.best < together.sampling.best and split.training.best > together.training.best
    assert stale.step.best == pytest.approx(max(stale.sampling.best, stale.training.best) + stale.sync.best)
    assert stale.step.best < split.step.best


def test_shorter_answers_take_less_at_best():
    long, _ = planned("h200x1", "smollm2-135m")
    short, settings = planned("h200x1", "smollm2-135m", answer=64)
    assert short.sampling.best < long.sampling.best / 2 and short.sampling.worst > long.sampling.worst / 2
    with refuses("--answer", naming="at most max_completion_length"):
        rollout_of(settings, read_model("smollm2-135m"), parse("h200x1"), 1000)


def test_a_plan_that_does_not_fit_names_what_lies_beside_the_trainer():
    with refuses(None, OutOfMemoryError, naming="beside the trainer on each: critic 134.6 GiB"):
        planned("h200x1", "llama3-8b", "algo=ppo")
    settings = Rl(model="smollm2-135m", steps=1).filled(1)
    apart = replace(settings, engine=replace(settings.engine, devices=1))
    cfg = read_model("smollm2-135m")
    with refuses("--on", naming="leave at least one to the trainer"):
        plan_rl(cfg, apart, parse("h200x1"), rollout_of(apart, cfg, parse("h200x1")))
