"""`dovetail plan rl RECIPE_OR_MODEL`: actor, reference, critic and rollout on one budget, colocated or split."""

from typing import Any

import typer

from dovetail.cli.plan_recipe import MODEL, PRICE, REGION, SPOT
from dovetail.cli.plan_rl_table import STEPS, Run, as_json, show
from dovetail.core.errors import UserError


def rl(
    what: str = typer.Argument(metavar="RECIPE_OR_MODEL", help=f"A recipe; or a model: {MODEL[0].lower()}{MODEL[1:]}"),
    overrides: list[str] = typer.Argument(None, metavar="[KEY=VALUE]...", help="Such as group_size=16 algo=ppo."),
    on: str = typer.Option(..., "--on", help="Such as h200x1, h200x8, v6e-8."),
    answer: int = typer.Option(0, min=0, help="Tokens of an answer on average; max_tokens if not given."),
    price: float = PRICE,
    spot: bool = SPOT,
    region: str = REGION,
    json: bool = typer.Option(False, "--json", help="The same as JSON."),
) -> None:
    """Memory of a device by what lies there, a step's time by its parts, and the time and dollars of a run."""
    from dovetail.cli.plan_recipe import checked_region
    from dovetail.core.accelerator import parse
    from dovetail.core.prices import rate
    from dovetail.plan.calibration import fractions

    region = checked_region(price, spot, region)
    settings, accelerator = _settings(what, overrides or []), parse(on)
    paid = rate(accelerator.chip, spot, region, price)
    known = fractions(accelerator.chip.name) if accelerator.chip else None
    plans, refused = _plans(settings, accelerator, answer, known)
    if not plans:
        raise UserError(next(iter(refused.values())))
    run = Run(settings, accelerator.total_chips, paid, spot)
    if json:
        print(as_json(plans, run))
    else:
        show(what, settings, accelerator, plans, refused, known, run)


def _settings(what: str, overrides: list[str]) -> Any:
    from pathlib import Path

    from dovetail.cli.plan_recipe import without_warmup
    from dovetail.core import recipe
    from dovetail.tune.rl.settings import Rl

    if Path(what).suffix in (".yaml", ".yml") or recipe.training_of(what) == "rl":
        return recipe.load(what, [*without_warmup(overrides), *overrides], Rl)
    return recipe.change(Rl(model=what, steps=STEPS), overrides)


def _ways(settings: Any, devices: int) -> list[Any]:
    """As the recipe says it; and with the engine beside the trainer, asleep meanwhile, or on devices of its own."""
    from dataclasses import replace

    engine = settings.engine
    ways = [engine, replace(engine, devices=0, stale=0, sleep=False), replace(engine, devices=0, stale=0, sleep=True)]
    for own in (n for n in (1, 2, 4, 8, 16, 32) if 2 * n <= devices):
        apart = replace(engine, devices=own, sleep=False, offload=False)
        ways += [replace(apart, stale=0), replace(apart, stale=1)]
    return list(dict.fromkeys(ways))


def _plans(settings: Any, accelerator: Any, answer: int, known: Any) -> tuple[list[Any], dict[str, str]]:
    """(recipe lines, plan) each, the quickest step first; and why others are none."""
    from dataclasses import replace

    from dovetail.cli.plan_recipe import outline_of
    from dovetail.plan.rl_plan import plan_rl

    cfg, found, refused = outline_of(settings.model)[0], [], {}
    for engine in _ways(settings, accelerator.total_devices):
        keys = f"engine.devices={engine.devices} engine.stale={engine.stale} engine.sleep={str(engine.sleep).lower()}"
        try:
            changed = replace(settings, engine=engine)
            filled = changed.filled(max(1, accelerator.total_devices - changed.spare_devices))
            plan = plan_rl(cfg, filled, accelerator, rollout_of(filled, cfg, accelerator, answer), known)
            found.append((keys, plan))
        except ValueError as error:
            refused[keys] = str(error)
    return sorted(found, key=lambda each: each[1].step.best + each[1].step.worst), refused


def rollout_of(settings: Any, cfg: Any, accelerator: Any, answer: int = 0) -> Any:
    """What a recipe (tune.rl.settings.Rl, filled) asks of the engine in a step, in numbers."""
    from dovetail.plan.rl_plan import Rollout

    engine, hbm = settings.engine, accelerator.chip.device_hbm if accelerator.chip else None
    alone = engine.devices or engine.sleep
    if answer > settings.max_tokens:
        raise UserError(f"--answer is at most max_tokens, {settings.max_tokens}; got {answer}")
    return Rollout(
        settings.prompts, settings.group_size, settings.max_prompt, settings.max_tokens,
        float(answer or settings.max_tokens), settings.sequences, engine.devices,
        None if alone else settings.pool_bytes(cfg, hbm),
        settings.scores_first + settings.has_reference + settings.is_taught, settings.has_critic, settings.updates,
        bool(engine.stale),
    )  # fmt: skip
