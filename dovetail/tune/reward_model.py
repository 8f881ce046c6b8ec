"""Reward models: from pairs of answers to a model that gives texts a score."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dovetail.core.compute import compute_of
from dovetail.core.types import Params
from dovetail.io.hf import read_params
from dovetail.io.hub import resolve
from dovetail.io.load import open_checkpoint
from dovetail.models.config import ModelConfig
from dovetail.models.spec import spec
from dovetail.train.launch import Ended
from dovetail.train.objective import Frozen, Objective
from dovetail.train.prepare import Ready
from dovetail.tune.policy import Policy, policy_of
from dovetail.tune.reward import reward as scored_pairs
from dovetail.tune.run import tune
from dovetail.tune.settings import Reward

HEADS = ("head", "score")


def reward(
    recipe: str | Path | Reward | None = None,
    *,
    data: Any = None,
    run_dir: str | Path = "",
    show: bool = True,
    **overrides: Any,
) -> Ended:
    """Teach a model to score answers, from pairs of which one is better.

        dt.reward(model="smollm2-135m", data="pairs.jsonl", epochs=1, run_dir="runs/judge")
        dt.LLM("runs/judge/export/step_120").score([[{"role": "user", ...}, {"role": "assistant", ...}], ...])

    data: records with `prompt`, `chosen` and `rejected`. All else is as dt.sft has it.
    """
    return tune(Reward, reward_objective, recipe, data, run_dir, show=show, overrides=overrides)


def reward_objective(settings: Reward) -> Objective:
    policy = policy_of(settings)
    found = scored_pairs(settings.reward, policy.params, settings.most_documents)
    found = dataclasses.replace(found, initial=partial(_initial, settings=settings, policy=policy))
    if policy.frozen is None:
        return found
    return dataclasses.replace(
        found, specs=lambda cfg: {**policy.specs(cfg), "score": spec(cfg)["score"]},
        frozen=_without_head(policy.frozen, settings), export=policy.export,
    )  # fmt: skip


def _without_head(base: Frozen, settings: Reward) -> Frozen:
    """An adapter's base: what is below the score, of a model that writes or of one that has a score already."""

    def load(cfg: ModelConfig, placement: Any) -> Params:
        return _trunk(base.load(open_checkpoint(resolve(settings.weights))[1], placement))

    return Frozen(lambda cfg, placement: _trunk(base.form(cfg, placement)), load)


def _trunk(params: Params) -> Params:
    return {name: part for name, part in params.items() if name not in HEADS}


def _initial(ready: Ready, settings: Reward, policy: Policy) -> Params:
    """What there is to begin with, of a model that writes or of a reward model. A score that is not there is random
    (train.state), as new adapters are."""
    path = resolve(settings.weights)
    source, cfg, _ = open_checkpoint(path)
    if settings.lora is None:
        dtype = compute_of(settings.precision.params).dtype
        given = read_params(source, cfg, dtype, str(path), ready.placement)
        return {name: part for name, part in given.items() if name != "head"}
    given = policy.initial(ready) if policy.initial else {}
    if not cfg.scored:
        return given
    form: Any = ready.form.params["score"]
    return {"score": jax.device_put(np.asarray(source.read("score.weight"), form.dtype), form.sharding), **given}
