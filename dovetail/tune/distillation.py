"""Learning from a teacher: a recipe's student and teacher, and how they meet in one step."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

from dovetail.core.mesh import Placement
from dovetail.core.types import Params
from dovetail.io.hub import resolve
from dovetail.io.outline import config_of
from dovetail.models.config import ModelConfig
from dovetail.train.launch import Ended
from dovetail.train.objective import Frozen, Objective, StepContext
from dovetail.tune.distill import distill as distill_objective
from dovetail.tune.policy import Policy, frozen_model, policy_of
from dovetail.tune.run import tune
from dovetail.tune.settings import Distill


def distill(
    recipe: str | Path | Distill | None = None,
    *,
    data: Any = None,
    run_dir: str | Path = "",
    show: bool = True,
    **overrides: Any,
) -> Ended:
    """Train a model to say what a larger one would.

        dt.distill(model="student", teacher="teacher", data="chats.jsonl", distillation={"alpha": 0.9}, steps=200)

    All else is as dt.sft has it.
    """
    return tune(Distill, objective, recipe, data, run_dir, show=show, overrides=overrides)


def objective(settings: Any) -> Objective:
    """Of Distill, or of what names a teacher and a distillation as it does (tune.rl)."""
    resolve(settings.teacher)  # one that cannot be fetched is an error now, not after the step was compiled
    policy, teacher = policy_of(settings), None
    if settings.distillation.teacher == "live":
        teacher = frozen_model(settings.teacher, settings.held, settings.precision.compute)
    teacher_cfg = config_of(settings.teacher)
    found = distill_objective(
        settings.distillation, lambda params, ctx: _student(policy, params, ctx),
        (lambda params, ctx: ctx.frozen["teacher"]) if teacher else None, teacher_cfg, policy.specs, policy.export,
        policy.trains_head,
    )  # fmt: skip
    initial = policy.initial and functools.partial(policy.initial, base=lambda ready: ready.frozen["base"])
    return dataclasses.replace(found, frozen=_both(policy.frozen, teacher, teacher_cfg), initial=initial)


def _student(policy: Policy, params: Params, ctx: StepContext) -> Params:
    return policy.params(params, dataclasses.replace(ctx, frozen=(ctx.frozen or {}).get("base")))


def _both(base: Frozen | None, teacher: Frozen | None, teacher_cfg: ModelConfig) -> Frozen:
    """The student's base and the teacher, by name."""

    def form(cfg: ModelConfig, placement: Placement) -> Any:
        own = {"base": base.form(cfg, placement)} if base else {}
        return own | ({"teacher": teacher.form(teacher_cfg, placement)} if teacher else {})

    def load(cfg: ModelConfig, placement: Placement) -> Any:
        own = {"base": base.load(cfg, placement)} if base else {}
        return own | ({"teacher": teacher.load(teacher_cfg, placement)} if teacher else {})

    return Frozen(form, load)
