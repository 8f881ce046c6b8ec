"""Plans of reinforcement learning as `dovetail plan rl` shows them: tables for people, JSON for programs."""

from typing import Any

STEPS = 1000  # whose time and dollars are shown, where the recipe does not say how many
WIDE = 180  # columns from which one table holds all


class Run:
    """How many steps a run has, and what they cost. A recipe's steps are updates, of which a step may have several."""

    def __init__(self, settings: Any, chips: int, paid: Any, spot: bool) -> None:
        self.steps = -(-settings.steps // settings.updates) or STEPS
        self.chips, self.paid, self.spot = chips, paid, spot

    def seconds(self, plan: Any) -> Any:
        return plan.step.times(self.steps)

    def dollars(self, plan: Any) -> Any:
        """Return bounds, or None where no price is known."""
        each = self.paid.dollars
        return None if each is None else self.seconds(plan).times(each * self.chips / 3600)

    def __str__(self) -> str:
        return f"{self.steps:,} step{'s' if self.steps > 1 else ''}"


def show(
    what: str, settings: Any, accelerator: Any, plans: list[Any], refused: dict[str, str], known: Any, run: Run
) -> None:
    from rich.console import Console

    from dovetail.cli.info import table

    console = Console(highlight=False)
    keys, best = plans[0]
    for line in answer(accelerator, [plan for _, plan in plans], run):
        console.print(line, style="bold", markup=False)
    console.print()
    for line in (
        accelerator.explain(),
        f"{what}, {settings.algo}: {settings.prompts} prompts x {settings.group_size} answers of up to "
        f"{settings.max_tokens} tokens ({best.rollout.mean:,.0f} on average), {_updates(settings.updates)} per step",
        "bounds: at the peaks, all overlapped - at half of them, nothing overlapped, every launch waited for",
        run.paid.says,
        *([known.describe()] if known else []),
    ):
        console.print(line, markup=False)
    for one in _times([plan for _, plan in plans], run, console.width >= WIDE):
        console.print(one)
    total, limit = sum(best.memory.values()), best.trainer.limit
    rows = [(name, f"{size / 2**30:,.2f} GiB") for name, size in best.memory.items()]
    rows.append(("total", f"{total / 2**30:,.2f} GiB" + (f" of {limit / 2**30:,.1f} to plan with" if limit else "")))
    if best.rollout.devices:
        engine = best.engine
        rows.append(("each of the engine's", f"{engine.weights / 2**30:,.2f} GiB weights, {engine.tokens:,} KV tokens"))
    console.print(table(f"memory of a trainer's device, {best.name}", rows))
    console.print(f"the recipe lines of the first: {keys}", markup=False, soft_wrap=True)
    for why in dict.fromkeys(refused.values()):
        ways = "; ".join(line for line, reason in refused.items() if reason == why)
        console.print(f"not {ways}: {why}", style="dim", markup=False, soft_wrap=True)


def answer(accelerator: Any, plans: list[Any], run: Run) -> list[str]:
    """Return whether it fits, the fastest way to share the devices, its step, and the time and dollars of the run."""
    from dovetail.cli.plan_serve_table import span
    from dovetail.plan.cost import unit_of

    best = plans[0]
    unit, each = unit_of(run.seconds(best).worst)
    cost = run.dollars(best)
    paid = run.paid.says if cost is None else f"{dollar_span(cost)}{' spot' if run.spot else ''}"
    ways = f"{len(plans)} way{'s' if len(plans) > 1 else ''} to share {accelerator.name}"
    return [
        f"fits: {ways}; fastest: {_name(best)}",
        f"step: {span(best.step)} s, {span(best.tokens_per_second)} tok/s of answers",
        f"run:  {run}: {span(run.seconds(best), 1 / each)} {unit}, {paid}",
    ]


def dollar_span(bounds: Any) -> str:
    from dovetail.cli.plan_serve_table import short

    return f"${short(bounds.best)} - ${short(bounds.worst)}"


def _updates(count: int) -> str:
    return f"{count} update{'s' if count > 1 else ''}"


def _name(plan: Any) -> str:
    sleeps = ", asleep meanwhile" if not plan.rollout.devices and plan.rollout.kv_bytes is None else ""
    return plan.name + sleeps + (", overlapped" if plan.rollout.overlaps else "")


def _times(plans: list[Any], run: Run, wide: bool) -> list[Any]:
    """Return the parts of a step, and the step with the run; on a narrow screen in two tables."""
    from dovetail.cli.plan_serve_table import new_table, span
    from dovetail.plan.cost import unit_of

    unit, each = unit_of(max(run.seconds(plan).worst for plan in plans))
    part = lambda bounds: span(bounds) if bounds.best else "-"  # noqa: E731
    parts = [
        ("", _name),
        ("sampling", lambda plan: part(plan.sampling)),
        ("scoring", lambda plan: part(plan.scoring)),
        ("training", lambda plan: part(plan.training)),
        ("handing\nover", lambda plan: part(plan.sync)),
    ]
    whole = [
        ("step\ns", lambda plan: span(plan.step)),
        ("answer\ntok/s", lambda plan: span(plan.tokens_per_second)),
        (f"{run},\n{unit}", lambda plan: span(run.seconds(plan), 1 / each)),
    ]
    if run.paid.dollars is not None:
        whole.append((f"{run},\n$", lambda plan: span(run.dollars(plan))))
    halves = [("seconds of a step, by its parts", parts), ("the same: the step and the run", whole)]
    if wide:
        halves = [("seconds of a step, and the run", parts + whole)]
    made = []
    for title, columns in halves:
        out = new_table(title)
        for name in ("", *(name for name, _ in columns)):
            out.add_column(name, justify="right" if name else "left")
        for i, plan in enumerate(plans, 1):
            out.add_row(str(i), *(cell(plan) for _, cell in columns))
        made.append(out)
    return made


def as_json(plans: list[Any], run: Run) -> str:
    import json

    return json.dumps([_plain(plan, keys, run) for keys, plan in plans], indent=2)


def _plain(plan: Any, keys: str, run: Run) -> dict[str, Any]:
    from dataclasses import asdict

    dollars = run.dollars(plan)
    times = {name: asdict(getattr(plan, name)) for name in ("sampling", "scoring", "training", "sync", "step")}
    return {
        "name": plan.name, "recipe": keys, "memory": dict(plan.memory), "limit": plan.trainer.limit,
        "engine": asdict(plan.engine), "seconds": times, "tokens_per_second": asdict(plan.tokens_per_second),
        "run": {"steps": run.steps, "seconds": asdict(run.seconds(plan)), "dollars": dollars and asdict(dollars)},
    }  # fmt: skip
