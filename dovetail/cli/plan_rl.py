"""`dovetail plan rl`: policy, reference, critic and sampling engine on one set of devices, colocated or split."""

from typing import Any

import typer

from dovetail.cli.plan_recipe import (
    JSON,
    PRICE,
    RECIPE_OR_MODEL,
    REGION,
    SPOT,
    checked_region,
    outline_of,
    without_warmup,
)
from dovetail.cli.tables import frameless, pairs
from dovetail.core.errors import UserError
from dovetail.core.units import format_number

STEPS = 1000  # of the run whose time and cost are shown, unless the recipe has a number
WIDE = 180  # columns of a terminal that holds everything in one table


class RlRun:
    """Hold the steps of a run and their cost; a recipe counts updates, of which a step may have several."""

    def __init__(self, settings: Any, chips: int, paid: Any, spot: bool) -> None:
        self.steps = -(-settings.steps // settings.updates) or STEPS
        self.chips, self.paid, self.spot = chips, paid, spot

    def seconds(self, plan: Any) -> Any:
        """Return the bounds of the run's time."""
        return plan.step.times(self.steps)

    def dollars(self, plan: Any) -> Any:
        """Return the bounds of the run's cost, or None without a price."""
        each = self.paid.dollars
        return None if each is None else self.seconds(plan).times(each * self.chips / 3600)

    def __str__(self) -> str:
        return f"{self.steps:,} step{'s' if self.steps > 1 else ''}"


def show(
    what: str, settings: Any, accelerator: Any, plans: list[Any], refused: dict[str, str], known: Any, run: RlRun
) -> None:
    """Print the answer, the tables and the plans that do not fit."""
    from rich.console import Console

    console = Console(highlight=False)
    keys, best = plans[0]
    for line in answer(accelerator, [plan for _, plan in plans], run):
        console.print(line, style="bold", markup=False)
    console.print()
    for line in (
        accelerator.explain(),
        f"{what}, {settings.algo}: {settings.prompts} prompts x {settings.num_generations} completions of up to "
        f"{settings.max_completion_length} tokens ({best.rollout.mean:,.0f} on average), "
        f"{_updates(settings.updates)} per step",
        "bounds: at peak rates with full overlap - at half of them without overlap, with every launch",
        run.paid.says,
        *([known.describe()] if known else []),
    ):
        console.print(line, markup=False)
    for one in _times([plan for _, plan in plans], run, console.width >= WIDE):
        console.print(one)
    total, limit = sum(best.memory.values()), best.trainer.limit
    rows = [(name, f"{size / 2**30:,.2f} GiB") for name, size in best.memory.items()]
    rows.append(("total", f"{total / 2**30:,.2f} GiB" + (f" of {limit / 2**30:,.1f} available" if limit else "")))
    if best.rollout.devices:
        engine = best.engine
        rows.append(("each engine device", f"{engine.weights / 2**30:,.2f} GiB weights, {engine.tokens:,} KV tokens"))
    console.print(pairs(f"memory of a trainer device, {best.name}", rows))
    console.print(f"recipe keys of the first: {keys}", markup=False, soft_wrap=True)
    for why in dict.fromkeys(refused.values()):
        ways = "; ".join(line for line, reason in refused.items() if reason == why)
        console.print(f"does not fit: {ways}: {why}", style="dim", markup=False, soft_wrap=True)


def answer(accelerator: Any, plans: list[Any], run: RlRun) -> list[str]:
    """Return whether it fits, the fastest way to share the devices, its step time, and the run's time and cost."""
    from dovetail.cli.plan_serve_table import span
    from dovetail.plan.cost import unit_of

    best = plans[0]
    unit, each = unit_of(run.seconds(best).worst)
    cost = run.dollars(best)
    paid = run.paid.says if cost is None else f"{dollar_span(cost)}{' spot' if run.spot else ''}"
    ways = f"{len(plans)} way{'s' if len(plans) > 1 else ''} to share {accelerator.name}"
    return [
        f"fits: {ways}; fastest: {_name(best)}",
        f"step: {span(best.step)} s, {span(best.tokens_per_second)} tok/s of completions",
        f"run:  {run}: {span(run.seconds(best), 1 / each)} {unit}, {paid}",
    ]


def dollar_span(bounds: Any) -> str:
    """Return cost bounds as text."""
    return f"${format_number(bounds.best)} - ${format_number(bounds.worst)}"


def _updates(count: int) -> str:
    return f"{count} update{'s' if count > 1 else ''}"


def _name(plan: Any) -> str:
    sleeps = ", engine asleep during training" if not plan.rollout.devices and plan.rollout.kv_bytes is None else ""
    return plan.name + sleeps + (", overlapped" if plan.rollout.overlaps else "")


def _times(plans: list[Any], run: RlRun, wide: bool) -> list[Any]:
    """Return tables of the parts of a step, and of step and run; one table on a wide terminal."""
    from dovetail.cli.plan_serve_table import span
    from dovetail.plan.cost import unit_of

    unit, each = unit_of(max(run.seconds(plan).worst for plan in plans))
    part = lambda bounds: span(bounds) if bounds.best else "-"  # noqa: E731
    parts = [
        ("", _name),
        ("sampling", lambda plan: part(plan.sampling)),
        ("scoring", lambda plan: part(plan.scoring)),
        ("training", lambda plan: part(plan.training)),
        ("weight\nsync", lambda plan: part(plan.sync)),
    ]
    whole = [
        ("step\ns", lambda plan: span(plan.step)),
        ("sampled\ntok/s", lambda plan: span(plan.tokens_per_second)),
        (f"{run},\n{unit}", lambda plan: span(run.seconds(plan), 1 / each)),
    ]
    if run.paid.dollars is not None:
        whole.append((f"{run},\n$", lambda plan: span(run.dollars(plan))))
    halves = [("seconds per step, by part", parts), ("the same plans: step and run", whole)]
    if wide:
        halves = [("seconds per step, and the run", parts + whole)]
    made = []
    for title, columns in halves:
        out = frameless(title)
        for name in ("", *(name for name, _ in columns)):
            out.add_column(name, justify="right" if name else "left")
        for i, plan in enumerate(plans, 1):
            out.add_row(str(i), *(cell(plan) for _, cell in columns))
        made.append(out)
    return made


def as_json(plans: list[Any], run: RlRun) -> str:
    """Return the plans as JSON."""
    import json

    return json.dumps([_plain(plan, keys, run) for keys, plan in plans], indent=2)


def _plain(plan: Any, keys: str, run: RlRun) -> dict[str, Any]:
    from dataclasses import asdict

    dollars = run.dollars(plan)
    times = {name: asdict(getattr(plan, name)) for name in ("sampling", "scoring", "training", "sync", "step")}
    return {
        "name": plan.name, "recipe": keys, "memory": dict(plan.memory), "limit": plan.trainer.limit,
        "engine": asdict(plan.engine), "seconds": times, "tokens_per_second": asdict(plan.tokens_per_second),
        "run": {"steps": run.steps, "seconds": asdict(run.seconds(plan)), "dollars": dollars and asdict(dollars)},
    }  # fmt: skip


def rl(
    what: str = RECIPE_OR_MODEL,
    overrides: list[str] = typer.Argument(
        None, metavar="[KEY=VALUE]...", help="Overrides, such as num_generations=16 algo=ppo."
    ),
    on: str = typer.Option(..., "--on", help="Accelerator: h200x1, h200x8, v6e-8."),
    answer: int = typer.Option(
        0, min=0, show_default=False, help="Mean tokens of a completion. Default: max_completion_length."
    ),
    price: float = PRICE,
    spot: bool = SPOT,
    region: str = REGION,
    json: bool = JSON,
) -> None:
    """Estimate memory per device, time per step by part, and time and cost of an RL run."""
    from dovetail.core.accelerator import parse
    from dovetail.core.cloud import rate
    from dovetail.plan.calibration import fractions

    region = checked_region(price, spot, region)
    settings, accelerator = _settings(what, overrides or []), parse(on)
    paid = rate(accelerator.chip, spot, region, price)
    known = fractions(accelerator.chip.name) if accelerator.chip else None
    plans, refused = _plans(settings, accelerator, answer, known)
    if not plans:
        raise UserError(next(iter(refused.values())))
    run = RlRun(settings, accelerator.total_chips, paid, spot)
    if json:
        print(as_json(plans, run))
    else:
        show(what, settings, accelerator, plans, refused, known, run)


def _settings(what: str, overrides: list[str]) -> Any:
    from pathlib import Path

    from dovetail.core import recipe
    from dovetail.tune.rl.settings import Rl

    if Path(what).suffix in (".yaml", ".yml") or recipe.training_of(what) == "rl":
        return recipe.load(what, [*without_warmup(overrides), *overrides], Rl)
    return recipe.change(Rl(model=what, steps=STEPS), overrides)


def _ways(settings: Any, devices: int) -> list[Any]:
    """Return engine settings to compare: the recipe's, colocated, colocated and asleep, and on its own devices."""
    from dataclasses import replace

    engine = settings.engine
    alone = replace(engine, devices=0, max_staleness=0, enable_sleep_mode=False)
    ways = [engine, alone, replace(alone, enable_sleep_mode=True)]
    for own in (n for n in (1, 2, 4, 8, 16, 32) if 2 * n <= devices):
        apart = replace(engine, devices=own, enable_sleep_mode=False, offload_optimizer=False)
        ways += [replace(apart, max_staleness=0), replace(apart, max_staleness=1)]
    return list(dict.fromkeys(ways))


def _plans(settings: Any, accelerator: Any, answer: int, known: Any) -> tuple[list[Any], dict[str, str]]:
    """Return (recipe keys, plan) sorted by step time, and why other settings do not fit."""
    from dataclasses import replace

    from dovetail.plan.rl_plan import plan_rl
    from dovetail.tune.policy import check_model, with_teacher_cfg
    from dovetail.tune.rl.settings import check_rl_model

    cfg, found, refused = outline_of(settings.model)[0], [], {}
    settings = with_teacher_cfg(settings)
    check_model(settings, cfg)
    check_rl_model(settings, cfg)
    for engine in _ways(settings, accelerator.total_devices):
        keys = (
            f"engine.devices={engine.devices} engine.max_staleness={engine.max_staleness} "
            f"engine.enable_sleep_mode={str(engine.enable_sleep_mode).lower()}"
        )
        try:
            changed = replace(settings, engine=engine)
            filled = changed.filled(max(1, accelerator.total_devices - changed.spare_devices))
            plan = plan_rl(cfg, filled, accelerator, rollout_of(filled, cfg, accelerator, answer), known)
            found.append((keys, plan))
        except UserError as error:
            refused[keys] = str(error)
    return sorted(found, key=lambda each: each[1].step.best + each[1].step.worst), refused


def rollout_of(settings: Any, cfg: Any, accelerator: Any, answer: int = 0) -> Any:
    """Return the sampling work per step of a filled RL recipe."""
    from dovetail.plan.rl_plan import RolloutWorkload
    from dovetail.tune.rl.settings import beside_policy, kv_cache_bytes

    engine, hbm = settings.engine, accelerator.chip.device_hbm if accelerator.chip else None
    if answer > settings.max_completion_length:
        raise UserError(
            f"--answer must be at most max_completion_length ({settings.max_completion_length}), got {answer}",
            param="--answer",
        )
    return RolloutWorkload(
        settings.prompts, settings.num_generations, settings.max_prompt_length, settings.max_completion_length,
        float(answer or settings.max_completion_length), settings.max_num_seqs, engine.devices,
        None if engine.has_own_memory else kv_cache_bytes(settings, cfg, hbm),
        settings.scores_old_policy + settings.has_reference + settings.has_teacher, settings.has_critic,
        settings.updates, bool(engine.max_staleness), settings.spare_devices, beside_policy(settings, cfg, hbm),
    )  # fmt: skip
