"""`dovetail plan rl RECIPE_OR_MODEL`: actor, reference, critic and rollout on one budget, colocated or split."""

from typing import Any

import typer


def rl(
    what: str = typer.Argument(metavar="RECIPE_OR_MODEL", help="A recipe's file, or a model's name or folder."),
    overrides: list[str] = typer.Argument(None, metavar="[KEY=VALUE]...", help="Such as group_size=16 algo=ppo."),
    on: str = typer.Option(..., "--on", help="Such as h200x1, h200x8, v6e-8."),
    answer: int = typer.Option(0, min=0, help="Tokens of an answer on average; max_tokens if not given."),
    as_json: bool = typer.Option(False, "--json", help="The same as JSON."),
) -> None:
    """Memory of a device by what lies there, and a step's time in sampling, scoring, training and handing over."""
    import json

    from dovetail.core.accelerator import parse
    from dovetail.plan.calibration import fractions

    settings, accelerator = _settings(what, overrides or []), parse(on)
    known = fractions(accelerator.chip.name) if accelerator.chip else None
    plans, refused = _plans(settings, accelerator, answer, known)
    if not plans:
        raise ValueError(next(iter(refused.values())))
    if as_json:
        print(json.dumps([_plain(plan, keys) for keys, plan in plans], indent=2))
        return
    _show(what, settings, accelerator, plans, refused, known)


def _settings(what: str, overrides: list[str]) -> Any:
    from pathlib import Path

    from dovetail.core import recipe
    from dovetail.tune.rl.settings import Rl

    if Path(what).suffix in (".yaml", ".yml"):
        return recipe.load(what, overrides, Rl)
    return recipe.change(Rl(model=what, steps=1), overrides)


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

    from dovetail.models.registry import read_model
    from dovetail.plan.rl_plan import plan_rl

    cfg, found, refused = read_model(settings.model), [], {}
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
        raise ValueError(f"--answer is at most max_tokens, {settings.max_tokens}; got {answer}")
    return Rollout(
        settings.prompts, settings.group_size, settings.max_prompt, settings.max_tokens,
        float(answer or settings.max_tokens), settings.sequences, engine.devices,
        None if alone else settings.pool_bytes(cfg, hbm),
        settings.scores_first + settings.has_reference + settings.is_taught, settings.has_critic, settings.updates,
        bool(engine.stale),
    )  # fmt: skip


def _show(what: str, settings: Any, accelerator: Any, plans: list[Any], refused: dict[str, str], known: Any) -> None:
    from rich.console import Console

    from dovetail.cli.info import table

    console = Console(highlight=False)
    say = lambda line: console.print(line, markup=False, soft_wrap=True)  # noqa: E731
    say(accelerator.explain())
    keys, best = plans[0]
    say(
        f"{what}, {settings.algo}: {settings.prompts} prompts x {settings.group_size} answers of up to "
        f"{settings.max_tokens} tokens ({best.rollout.mean:,.0f} on average), {settings.updates} update(s) per step"
    )
    say("bounds: at the peaks, all overlapped - at half of them, nothing overlapped, every launch waited for")
    if known:
        say(known.describe())
    console.print(_times(plans))
    total, limit = sum(best.memory.values()), best.trainer.limit
    rows = [(name, f"{size / 2**30:,.2f} GiB") for name, size in best.memory.items()]
    rows.append(("total", f"{total / 2**30:,.2f} GiB" + (f" of {limit / 2**30:,.1f} to plan with" if limit else "")))
    if best.rollout.devices:
        engine = best.engine
        rows.append(("each of the engine's", f"{engine.weights / 2**30:,.2f} GiB weights, {engine.tokens:,} KV tokens"))
    console.print(table(f"memory of a trainer's device, {best.name}", rows))
    say(f"the recipe lines of the first: {keys}")
    for why in dict.fromkeys(refused.values()):
        ways = "; ".join(line for line, reason in refused.items() if reason == why)
        console.print(f"not {ways}: {why}", style="dim", markup=False, soft_wrap=True)


def _times(plans: list[Any]) -> Any:
    from dovetail.cli.plan_serve_table import new_table, span

    out = new_table("seconds of a step")
    for name in ("", "sampling", "scoring", "training", "handing\nover", "step", "answer\ntok/s"):
        out.add_column(name, justify="left" if not name else "right")
    for _, plan in plans:
        parts = (plan.sampling, plan.scoring, plan.training, plan.sync, plan.step, plan.tokens_per_second)
        sleeps = ", asleep meanwhile" if not plan.rollout.devices and plan.rollout.kv_bytes is None else ""
        name = plan.name + sleeps + (", overlapped" if plan.rollout.overlaps else "")
        out.add_row(name, *(span(part) if part.best else "-" for part in parts))
    return out


def _plain(plan: Any, keys: str) -> dict[str, Any]:
    from dataclasses import asdict

    times = {name: asdict(getattr(plan, name)) for name in ("sampling", "scoring", "training", "sync", "step")}
    return {
        "name": plan.name, "recipe": keys, "memory": dict(plan.memory), "limit": plan.trainer.limit,
        "engine": asdict(plan.engine), "seconds": times, "tokens_per_second": asdict(plan.tokens_per_second),
    }  # fmt: skip
