"""Learning from preferences: DPO and its relatives, with a reference that is run, read from disk or not needed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from dovetail.train.launch import Ended
from dovetail.train.objective import Objective
from dovetail.tune.policy import frozen_model, kept_model, policy_of
from dovetail.tune.preference import preference
from dovetail.tune.run import tune
from dovetail.tune.settings import Dpo


def dpo(
    recipe: str | Path | Dpo | None = None,
    *,
    data: Any = None,
    run_dir: str | Path = "",
    show: bool = True,
    **overrides: Any,
) -> Ended:
    """Teach a model which of two answers is the better one.

        dt.dpo(model="smollm2-135m", data="pairs.jsonl", lora={"r": 16}, preference={"beta": 0.1}, steps=200)

    data: records with `prompt`, `chosen` and `rejected`; for preference.loss_type=kto with `prompt`, `completion` and
    `label`. All else is as dt.sft has it.
    """
    return tune(Dpo, dpo_objective, recipe, data, run_dir, show=show, overrides=overrides)


def dpo_objective(settings: Dpo) -> Objective:
    policy, kept = policy_of(settings), settings.kept_reference
    reference = kept_model(policy) if kept else lambda params, ctx: ctx.frozen
    found = preference(settings.preference, policy.params, reference, settings.most_documents)
    frozen = policy.frozen
    if frozen is None and settings.preference.source == "live" and not kept:
        frozen = frozen_model(settings.weights, settings.held, settings.precision.compute)
    return dataclasses.replace(found, specs=policy.specs, frozen=frozen, initial=policy.initial, export=policy.export)
