"""Tables, arithmetic, recipe lines and JSON of `dovetail plan train`."""

import json
from typing import Any

from dovetail.cli.tables import frameless
from dovetail.core.units import format_count, format_duration, format_number

WIDE = 140  # columns of a terminal that holds everything in one table


def show(what: str, plans: list[Any], top: int, spot: bool, whose: str, explain: bool) -> None:
    """Print the answer, then the tables.

    Args:
        what: The recipe or model.
        plans: The plans of plan.train_plan, the best first.
        top: Number of plans to show.
        spot: Whether to use spot prices.
        whose: Where the run's number of tokens comes from, unless it was given.
        explain: Whether to print the arithmetic of the best plan.
    """
    from rich.console import Console

    console = Console(highlight=False)
    for line in answer(plans, spot, whose):
        console.print(line, style="bold", markup=False)
    console.print()
    for line in head(what, plans[0], spot):
        console.print(line, markup=False)
    columns = _columns(spot, plans[:top])
    parts = [columns] if console.width >= WIDE else [columns[:7], columns[7:]]
    titles = (f"the fastest of {len(plans):,} plans", f"the same plans: rate, and the run of {_tokens(plans[0])}")
    for part, title in zip(parts, titles, strict=False):
        console.print(_table(plans[:top], part, title))
    console.print(_memory(plans[0]), markup=False)
    if plans[0].time.exchanges:
        console.print(_exchanges(plans[0]))
    _show_losers(console, plans)
    if explain:
        console.print("\narithmetic of the first", style="bold")
        for line in arithmetic(plans[0]):
            console.print(line, markup=False, soft_wrap=True)
    console.print("\nrecipe lines", style="bold")
    console.print(recipe_lines(plans[0]), markup=False, end="")


def answer(plans: list[Any], spot: bool, whose: str) -> list[str]:
    """Return whether it fits, the fastest plan, its step time, and the run's time and cost."""
    best = plans[0]
    held, limit = best.plan.memory.total / 2**30, best.limit / 2**30
    mfu = "{:.0f} - {:.0f}".format(*(100 * share for share in best.mfu))
    unit, seconds = _unit([best])
    time = span((best.seconds[0] / seconds, best.seconds[1] / seconds))
    return [
        f"fits: {_plans(len(plans))} on {best.accelerator.name}; fastest: {mesh_text(best.plan.mesh)}, remat "
        f"{best.plan.remat}, {held:.1f} of {limit:.1f} GiB each",
        f"step: {span((best.time.lower, best.time.upper))} s, {_rate(best)} {_rate_unit(best)}, MFU {mfu}%",
        f"run:  {_tokens(best)}{f' ({whose})' if whose else ''}: {time} {unit}, {_paid(best, spot)}",
    ]


def _plans(count: int) -> str:
    return f"{count:,} plan{'s' if count > 1 else ''}"


def _paid(one: Any, spot: bool) -> str:
    """Return the cost of the run as text."""
    price = one.prices.spot if spot else one.prices.on_demand
    if price.dollars is None:
        return price.says
    low, high = (each.spot if spot else each.dollars for each in one.costs)
    return f"${format_number(low)} - ${format_number(high)}{' spot' if spot else ''}"


def _tokens(one: Any) -> str:
    settings = one.settings
    if one.cfg.images:
        return f"{format_count(settings.total_steps * settings.batch)} images"
    return f"{format_count(settings.tokens or settings.total_steps * settings.tokens_per_step)} tokens"


def _unit(plans: list[Any]) -> tuple[str, float]:
    """Return the unit for the runs' times, and its seconds."""
    from dovetail.plan.cost import unit_of

    return unit_of(max(one.seconds[1] for one in plans))


def head(what: str, best: Any, spot: bool) -> list[str]:
    """Return lines about accelerator, training, bounds and price."""
    from dovetail.core.spec import num_params
    from dovetail.models.spec import spec

    settings, chip = best.settings, best.chip
    many = format_count(num_params(spec(best.cfg)))
    price = best.prices.spot if spot else best.prices.on_demand
    lines = [
        best.accelerator.explain(),
        f"{what}: {many} weights, {settings.batch:,} {_rows(best)} per step "
        f"({_short(settings.tokens_per_step)}), {settings.optimizer.name}, computed in {settings.precision.compute}",
        "bounds: at peak rates with full overlap - at usual rates without overlap",
        price.says,
    ]
    if best.known:
        lines.append(best.known.describe())
    if chip.provisional:
        lines.append(f"the figures of {chip.name} are provisional: {chip.source}")
    return lines


def _rows(one: Any) -> str:
    length = one.settings.length
    return f"images of {length:,} patches" if one.cfg.images else f"rows of {length:,} tokens"


def _rate(one: Any) -> str:
    """Return the rate as text: tokens, or images of a model of images."""
    low, high = one.tokens_per_second
    row = one.settings.length if one.cfg.images else 1
    return span((low / row, high / row))


def _rate_unit(one: Any) -> str:
    return "img/s" if one.cfg.images else "tok/s"


def _columns(spot: bool, plans: list[Any]) -> list[tuple[str, Any]]:
    """Return (title, cell) of each column; a narrow terminal shows the first seven in their own table."""
    unit, seconds = _unit(plans)
    return [
        ("mesh", lambda one: mesh_text(one.plan.mesh)),
        ("remat", lambda one: one.plan.remat),
        ("rows x\nparts", lambda one: f"{one.plan.rows} x {one.plan.microsteps}"),
        ("GiB per\ndevice", lambda one: f"{one.plan.memory.total / 2**30:.1f}"),
        ("products\ns", lambda one: _figure(one.time.products)),
        ("links\ns", lambda one: _figure(one.time.links)),
        ("step\ns", lambda one: span((one.time.lower, one.time.upper))),
        ("bound by", lambda one: one.time.bound_by),
        ("MFU\n%", lambda one: "{:.0f} - {:.0f}".format(*(100 * share for share in one.mfu))),
        (_rate_unit(plans[0]), _rate),
        (unit, lambda one: span((one.seconds[0] / seconds, one.seconds[1] / seconds))),
        ("$ spot" if spot else "$", lambda one: _dollars(one, spot)),
    ]


def _table(plans: list[Any], columns: list[tuple[str, Any]], title: str):

    out = frameless(title)
    out.add_column("")
    for name, _ in columns:
        is_text = name in ("mesh", "remat", "bound by")
        out.add_column(name, justify="left" if is_text else "right", no_wrap=name != "mesh")
    for i, one in enumerate(plans, 1):
        out.add_row(str(i), *(cell(one) for _, cell in columns))
    return out


def _memory(one: Any) -> str:
    from dataclasses import asdict

    kinds = {name: size for name, size in asdict(one.plan.memory).items() if size}
    parts = ", ".join(f"{name} {format_number(size / 2**30)}" for name, size in kinds.items())
    total, limit = one.plan.memory.total / 2**30, one.limit / 2**30
    return f"estimated memory per device of the first, GiB: {parts}; {total:.1f} of {limit:.1f} available"


def _exchanges(one: Any):

    out = frameless("what a device sends per step in the first, at peak link rates")
    for name in ("", "collective", "over"):
        out.add_column(name)
    for name in ("GB", "s", "can\noverlap"):
        out.add_column(name, justify="right", no_wrap=True)
    for each in one.time.exchanges:
        where, hides = f"{each.axis}, {each.over}", "yes" if each.overlaps else "no"
        out.add_row(
            each.what,
            f"{each.count:,} {each.kind}",
            where,
            f"{each.bytes / 1e9:.3g}",
            format_number(each.seconds),
            hides,
        )
    return out


def _show_losers(console: Any, plans: list[Any]) -> None:
    from dovetail.plan.train_plan import losers, misfits

    found = [*losers(plans)[:6], *misfits(plans[0])[:2]]
    if found:
        console.print("why others are slower", style="bold")
    for one in found:
        console.print(f"  {one.what}: {one.why}", markup=False)


def recipe_lines(one: Any) -> str:
    """Return the recipe keys that fix the plan."""
    mesh, settings = one.plan.mesh, one.settings
    axes = {name: getattr(mesh, name) for name in ("data", "fsdp", "expert", "context", "tensor")}
    whole = ", ".join(f"{name}: {size}" for name, size in axes.items())
    return (
        f"batch: {settings.batch}\nlength: {settings.length}\nmesh: {{{whole}}}\nremat: {one.plan.remat}\n"
        f"per_device: {one.plan.rows}\naccumulate: {one.plan.microsteps}\n"
    )


def show_stages(one: Any, stages: int) -> None:
    """Print the estimate of a pipeline with this many stages."""
    from rich.console import Console

    from dovetail.plan.train_plan import staged

    found = staged(one, stages)
    Console(highlight=False).print(f"\n{found.says}", markup=False)


def as_json(what: str, plans: list[Any], count: int) -> str:
    """Return the plans as JSON; `count` is the number of all plans that fit."""
    from dataclasses import asdict

    def plain(one: Any) -> dict[str, Any]:
        low, high = one.costs
        return {
            "mesh": asdict(one.plan.mesh), "remat": one.plan.remat, "per_device": one.plan.rows,
            "accumulate": one.plan.microsteps, "scan": one.plan.scan, "memory_bytes": asdict(one.plan.memory),
            "limit_bytes": one.limit, "products_s": one.time.products, "memory_s": one.time.memory,
            "exchanges": [asdict(each) for each in one.time.exchanges], "step_s": [one.time.lower, one.time.upper],
            "bound_by": one.time.bound_by, "mfu_causal": one.mfu, "mfu_full": one.mfu_of(causal=False),
            "tokens_per_second": one.tokens_per_second, "run": [asdict(low), asdict(high)],
        }  # fmt: skip

    best = plans[0]
    return json.dumps(
        {
            "model": what, "accelerator": best.accelerator.name, "chip_source": best.chip.source,
            "batch": best.settings.batch, "length": best.settings.length, "price": best.prices.on_demand.says,
            "tokens": best.settings.tokens or best.settings.total_steps * best.settings.tokens_per_step,
            "fits": count,
            "plans": [plain(one) for one in plans],
        },
        indent=2,
    )  # fmt: skip


# --- figures ----------------------------------------------------------------------------------------------------------


def mesh_text(mesh: Any) -> str:
    """Return the mesh as `fsdp 64, tensor 4`."""
    axes = {name: getattr(mesh, name) for name in ("data", "fsdp", "expert", "context", "tensor")}
    return ", ".join(f"{name} {size}" for name, size in axes.items() if size > 1) or "one device"


def span(bounds: tuple[float, float]) -> str:
    """Return bounds as text."""
    low, high = bounds
    return f"{format_count(low)} - {format_count(high)}"


def _dollars(one: Any, spot: bool) -> str:
    low, high = (each.spot if spot else each.dollars for each in one.costs)
    return "-" if low is None or high is None else f"{format_number(low)} - {format_number(high)}"


def _figure(value: float) -> str:
    return f"{value:.3g}" if value >= 0.0005 else "0" if value == 0 else f"{value:.1e}"


def _short(value: float) -> str:
    """Return a number with three digits and a unit: 1234567 is 1.23M."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size * (10 if unit == "k" else 1):
            return f"{value / size:.3g}{unit}"
    return f"{value:,.0f}" if abs(value) >= 1000 else _figure(value)


def arithmetic(one: Any) -> list[str]:
    """Return the formulas of a training plan with their numbers."""
    return [*_products(one), *_traffic(one), *_links(one), *_bounds(one), *_run(one)]


def _products(one: Any) -> list[str]:
    from dovetail.plan.flops import forward_flops, mean_keys, recomputed
    from dovetail.plan.train_time import peak, product_flops

    cfg, settings, plan = one.cfg, one.settings, one.plan
    weights, length = forward_flops(cfg), settings.length
    keys = mean_keys(cfg, length)
    attention = forward_flops(cfg, keys) - weights
    again, whole = recomputed(cfg, length, plan.remat), product_flops(cfg, settings, plan)
    tokens = plan.rows * length // plan.mesh.context
    last = ""
    if plan.mesh.context > 1:
        n = plan.mesh.context
        last = f"; the last of {n} slices of a row sees {(2 * n - 1) / n:.3g}x the mean number of keys"
    return [
        f"tokens of a device per microstep = {plan.rows} x {length:,} / context {plan.mesh.context} = {tokens:,}",
        f"FLOPs of a token = 3 x (2 x {weights / 2e9:.4g}B active weights + {attention / 1e9:.3g}B in attention over "
        f"{keys:,} keys on average) + {again / 1e9:.3g}B again (remat {plan.remat}) = "
        f"{(3 * (weights + attention) + again) / 1e9:.4g}B{last}",
        f"products = {tokens:,} tokens x {plan.microsteps} microsteps x FLOPs / tensor {plan.mesh.tensor} = "
        f"{whole:.3g} FLOPs / {peak(one.chip, settings) / 1e12:.4g} TFLOP/s = "
        f"{format_duration(_at_peak(one, 'products'))}",
    ]


def _traffic(one: Any) -> list[str]:
    from dovetail.plan.train_time import moved_bytes

    moved = moved_bytes(one.cfg, one.settings, one.plan, one.chip)
    rate = one.chip.bandwidth / one.chip.devices
    return [
        f"memory = {moved / 1e9:.3g} GB (the state read and written; weights in 3 passes of each microstep; what the "
        f"backward pass needs) / {rate / 1e12:.3g} TB/s = {format_duration(_at_peak(one, 'memory'))}"
    ]


def _links(one: Any) -> list[str]:
    lines = [_span(one, span) for span in one.spans]
    for each in one.time.exchanges:
        lines.append(
            f"{each.what} = {each.count:,} x {each.kind} over {each.axis}: {each.bytes / 1e9:.3g} GB sent in "
            f"{format_duration(each.seconds)}, {each.bytes / each.seconds / 1e9:.3g} GB/s with hops"
        )
    return lines


def _span(one: Any, span: Any) -> str:
    taken = " x ".join(f"{count} along side {side} of {one.accelerator.topology}" for side, count in span.sides)
    far = f", {span.far} groups joined at {span.far_bandwidth / 1e9:.3g} GB/s" if span.far > 1 else ""
    near = f" ({taken})" if taken else ""
    return f"{span.axis} {span.size}{near}: {span.bandwidth / 1e9:.4g} GB/s of a device over its links{far}"


def _bounds(one: Any) -> list[str]:
    from dovetail.plan.exchange import by_axis
    from dovetail.plan.train_time import USUAL_LINKS, USUAL_MEMORY, usual_products

    time, known = one.time, one.known
    hidden, waits = by_axis(time.exchanges, True), sum(by_axis(time.exchanges, False).values())
    parts = {"products": time.products, "memory": time.memory, **hidden}
    named = ", ".join(f"{name} {format_duration(seconds)}" for name, seconds in parts.items())
    on_top = f" + {format_duration(waits)} that must be waited for" if waits else ""
    slower = {"products": usual_products(one.chip), "memory": USUAL_MEMORY, "links": USUAL_LINKS}
    slower = {name: getattr(known, name, None) or share for name, share in slower.items()}
    shares = ", ".join(f"{name} at {share:.0%}" for name, share in slower.items())
    return [
        f"lower bound = max({named}){on_top} = {format_duration(time.lower)}",
        f"upper bound = products + memory + links, one after another ({shares}) = {format_duration(time.upper)}",
        f"ranked by (lower + 2 x upper) / 3 = {format_duration(time.likely)}",
    ]


def _run(one: Any) -> list[str]:
    from dovetail.plan.cost import unit_of
    from dovetail.plan.flops import train_flops_per_token

    settings, chips = one.settings, one.accelerator.total_chips
    each = train_flops_per_token(one.cfg, settings.length, True, settings.step_models.adapter is not None)
    low, high = one.mfu
    full = one.mfu_of(causal=False)
    lines = [
        f"MFU = {each / 1e9:.4g}B FLOPs x {settings.tokens_per_step:,} tokens / step / ({chips:,} chips x "
        f"{one.chip.bf16 / 1e12:.4g} TFLOP/s) = {low:.1%} - {high:.1%} (causal attention), "
        f"{full[0]:.1%} - {full[1]:.1%} (full)",
    ]
    if settings.total_steps:
        unit, seconds = unit_of(one.seconds[1])
        time = " - ".join(f"{each / seconds:.3g}" for each in one.seconds)
        lines.append(f"run = {settings.total_steps:,} steps x the step = {time} {unit} of {chips:,} chips")
    lines.append(f"peak, memory and links of {one.chip.name}: {one.chip.source}")
    return lines


def _at_peak(one: Any, name: str) -> float:
    """Return the time at peak rates, without the calibration."""
    return getattr(one.time, name) * (getattr(one.known, name, None) or 1.0)
