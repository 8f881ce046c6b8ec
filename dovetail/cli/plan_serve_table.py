"""Tables, arithmetic and JSON of `dovetail plan serve`."""

import json
from typing import Any

from dovetail.cli.tables import frameless
from dovetail.core.units import format_number

MOST_ROWS = 12  # rows of the frontier table
WIDE = 104  # columns of a terminal that holds everything in one table


def show(model: str, plans: list[Any], requests: int, explain: bool, price: str, start: Any) -> None:
    """Print the answer, then the tables.

    Args:
        model: The model's name.
        plans: The plans of plan.serve_plan, the best first.
        requests: Requests per day, or 0.
        explain: Whether to print the arithmetic.
        price: The source of the price, in words.
        start: Returns how to start a plan.
    """
    from rich.console import Console

    console = Console(highlight=False)
    for line in [*answer(plans), *(per_day(plans[0], requests) if requests else [])]:
        console.print(line, style="bold", markup=False)
    console.print()
    for line in head(model, plans, price):
        console.print(line, markup=False)
    for table in ways(plans, console.width >= WIDE):
        console.print(table)
    console.print("weights and KV of each device; KV tokens of each replica\n")
    console.print(frontier_table(plans, console.width >= WIDE))
    critical = f"{plans[0].replica.critical_batch:,.0f}"
    console.print(f"critical batch: {critical} (above it products take longer than reading the weights)")
    if explain:
        console.print()
        for line in arithmetic(plans[0]):
            console.print(line, markup=False, soft_wrap=True)
    console.print()
    console.print(start(plans[0]), markup=False, soft_wrap=True)


def answer(plans: list[Any]) -> list[str]:
    """Return whether it fits, the fastest plan, its speed, and the cost of a token."""
    best, work = plans[0], plans[0].workload
    where = best.replica.accelerator.name
    fits = f"fits: on {where}"
    if best.replica.machines > 1:
        fits = f"fits: on {best.replica.machines} machines of {where} together, on no single one"
    each = f"{_count(best.held.sequences(work.length))} sequences of {work.length:,} tokens"
    many = f"{best.replicas:,} replica{'s' if best.replicas > 1 else ''} of {best.tensor} device"
    lines = [
        f"{fits}; fastest: {many}{'s' if best.tensor > 1 else ''}, KV pages for {each} on each replica",
        f"speed: {span(best.chosen.rate)} output tok/s with {at_a_time(best)} at a time; first token after "
        f"{span(best.first_token, 1e3)} ms, the next every {span(best.chosen.per_token, 1e3)} ms",
    ]
    if best.dollars is not None:
        low, high = sorted((_whole_cost(best, best.chosen).best, _whole_cost(best, best.chosen).worst))
        lines.append(
            f"cost: ${best.dollars:,.2f} per hour; ${format_number(low)} - ${format_number(high)} per million output "
            "tokens with their prompts"
        )
    if best.unserved:
        lines.append(f"not served by Dovetail: {best.unserved}; the figures are for an engine that does")
    return lines


def at_a_time(plan: Any) -> str:
    """Return the concurrent sequences, with the requested number if not all fit."""
    return f"{plan.chosen.sequences:,}" + ("" if plan.holds_all else f" of {plan.workload.concurrency:,}")


def head(model: str, plans: list[Any], price: str) -> list[str]:
    """Return lines about accelerator, model, bounds and price."""
    from dovetail.core.spec import num_params
    from dovetail.models.spec import spec

    best, replica = plans[0], plans[0].replica
    work, kv = best.workload, replica.kv or replica.dtype
    many = num_params(spec(replica.cfg)) / 1e9
    lines = [
        replica.accelerator.explain(),
        f"{model}: {many:.3g}B weights in {replica.dtype}, KV in {kv}; {work.prompt:,} in + {work.output:,} out, "
        f"{work.concurrency} at a time",
        "bounds: at peak rates with full overlap - at half of them without overlap, with every launch",
        price,
    ]
    if own := _held_draft(replica):
        each = " on each device" if replica.tensor > 1 else ""
        lines.insert(2, f"draft model: {own.weights / 2**30:.2g} GiB, {own.per_token / 2**10:.3g} KiB per token{each}")
    if replica.fractions:
        lines.append(replica.fractions.describe())
    return lines


def _held_draft(replica: Any) -> Any:
    """Return the bytes of the replica's draft model on one device; None without one."""
    from dovetail.plan.serve_memory import held_draft

    if replica.draft is None:
        return None
    return held_draft(replica.draft, replica.chip, replica.tensor, replica.dtype, replica.kv)


def ways(plans: list[Any], wide: bool) -> list[Any]:
    """Return a table with a row per plan; two tables on a narrow terminal."""
    title = "replicas x devices per replica"
    memory = [
        ("weights\nGiB", lambda plan: _gib(plan.held.weights)),
        ("KV\nGiB", lambda plan: _gib(plan.held.room)),
        ("KV\ntokens", lambda plan: _count(plan.held.tokens)),
        ("at a\ntime", at_a_time),
    ]
    speed = [
        ("first token\nms", lambda plan: span(plan.first_token, 1e3)),
        ("between\ntokens ms", lambda plan: span(plan.chosen.per_token, 1e3)),
        ("out\ntok/s", lambda plan: span(plan.chosen.rate)),
    ]
    if plans[0].dollars is not None:
        speed.append(("$/M\nin", lambda plan: span(plan.per_million_input)))
        speed.append(("$/M\nout", lambda plan: span(plan.per_million_output)))
    parts = [(title, memory + speed)] if wide else [(title, memory), ("the same plans: speed and cost", speed)]
    return [_columns(name, plans, columns) for name, columns in parts]


def _columns(title: str, plans: list[Any], columns: list[tuple[str, Any]]) -> Any:
    out = frameless(title)
    for name in ("", *(name for name, _ in columns)):
        out.add_column(name, justify="right")
    for plan in plans:
        out.add_row(plan.name, *(cell(plan) for _, cell in columns))
    return out


def frontier_table(plans: list[Any], wide: bool):
    """Return a table of the points that no other plan beats in both latency and throughput."""
    from dovetail.plan.serve_plan import frontier

    out = frameless("latency against throughput: points that no other plan beats in both")
    priced = plans[0].dollars is not None
    names = ("", "at a\ntime", "decode step\nms", "between\ntokens ms", *(("tok/s\nof each",) if wide else ()))
    for name in (*names, "out\ntok/s", *(("$/M out,\nwith prompts",) if priced else ())):
        out.add_column(name, justify="right")
    for plan, point in _thinned(frontier(plans)):
        cells = [plan.name, f"{point.sequences:,}", span(point.decode, 1e3), span(point.per_token, 1e3)]
        cells += [span(point.rate.times(1 / point.sequences))] if wide else []
        out.add_row(*cells, span(point.rate), *([span(_whole_cost(plan, point))] if priced else []))
    return out


def _whole_cost(plan: Any, point: Any) -> Any:
    """Return dollars per million output tokens, prompts included."""
    return point.per_token.times(plan.dollars / 3600 * 1e6 / point.sequences)


def _thinned(points: list[Any]) -> list[Any]:
    if len(points) <= MOST_ROWS:
        return points
    kept = {round(i * (len(points) - 1) / (MOST_ROWS - 1)) for i in range(MOST_ROWS)}
    return [point for i, point in enumerate(points) if i in kept]


def per_day(plan: Any, requests: int) -> list[str]:
    """Return how many accelerators the requests of a day need, and their cost."""
    import math

    need = plan.accelerators_for(requests)
    low, high = math.ceil(need.best), math.ceil(need.worst)
    many = f"{low:,} to {high:,}" if high > low else f"{low:,}"
    lines = [
        f"{requests:,} requests per day, evenly spread ({requests / 86400:,.1f} per second): {need.best:.2f} to "
        f"{need.worst:.2f} x {plan.replica.accelerator.name} busy all day, so {many} of them; at a peak of 3x the mean "
        f"{math.ceil(3 * need.best):,} to {math.ceil(3 * need.worst):,}"
    ]
    if plan.dollars is not None:
        day = plan.dollars * 24
        each = [
            f"${count * day:,.0f} per day (${count * day / requests * 1000:,.2f} per 1,000 requests)"
            for count in dict.fromkeys((low, high))
        ]
        lines.append(" to ".join(each))
    return lines


def arithmetic(plan: Any) -> list[str]:
    """Return the formulas of the best plan with their numbers."""
    from dovetail.plan.serve_memory import MEMORY_UTILIZATION, SLACK, USABLE
    from dovetail.plan.serve_time import HOST, KERNELS, LAUNCH, WORST

    replica, room, work, batch = plan.replica, plan.held, plan.workload, plan.chosen.batch
    chip, context = replica.chip, work.prompt + work.output / 2
    read, keys = replica.weight_bytes(batch), replica.kv_bytes(context)
    flops, attended = replica.decode_flops, replica.attention_flops(context)
    usable = USABLE[replica.platform]
    lines = [
        f"each device, {plan.name}:",
        f"  KV room = {chip.device_hbm / 2**30:.0f} GiB x {usable:g} (jax's) x {MEMORY_UTILIZATION:g} (the engine's) - "
        f"{room.weights / 2**30:.2f} weights - {room.step / 2**30:.2f} step (estimated) - {SLACK / 2**30:.1f} "
        f"= {_gib(room.room)} GiB",
        f"  KV of a token = {room.per_token:,} bytes in pages of {room.page}, so {_count(room.tokens)} tokens, "
        f"{room.sequences(work.length):,} sequences of {work.length:,}",
        f"a decode step of {batch} sequences at {context:,.0f} tokens:",
        f"  products: {batch} x {flops / 1e9:.3g} GFLOP / {replica.peak / 1e12:.0f} TFLOP/s "
        f"= {_ms(batch * flops / replica.peak)}",
        f"  weights read: {read / 1e9:.3g} GB / {replica.bandwidth / 1e12:.3g} TB/s = {_ms(read / replica.bandwidth)}",
        f"  keys and values: {batch} x {keys / 1e6:.4g} MB / {replica.bandwidth / 1e12:.3g} TB/s "
        f"= {_ms(batch * keys / replica.bandwidth)}; attention: {batch} x {attended / 1e9:.3g} GFLOP "
        f"= {_ms(batch * attended / replica.peak)}",
    ]
    if replica.span:
        sent = replica.sent(batch, batch)
        lines.append(
            f"  sums over {replica.tensor} devices: {_ms(sent)} over {replica.span.over} at "
            f"{replica.span.bandwidth / 1e9:.0f} GB/s"
        )
    small = HOST + len(replica.cfg.layers) * KERNELS * LAUNCH[replica.platform]
    lines += [
        "  at best max(products, weights) + max(attention, keys and values), or the sums: "
        f"{_ms(plan.chosen.decode.best)}",
        f"  at worst all of it one after another / {WORST:g} + {_ms(small)} of launches and host: "
        f"{_ms(plan.chosen.decode.worst)}",
        f"a prompt of {work.prompt:,} among many: {span(replica.prompt_among_many(work.prompt), 1e3)} ms, {batch} of "
        f"them while each sequence gets its {work.output:,} tokens: {span(plan.chosen.per_token, 1e3)} ms between two",
        f"where all come at once, the last one's first token after {span(plan.last_of_all, 1e3)} ms",
        f"critical batch = weights / bandwidth / (FLOPs of a token / peak) = {replica.critical_batch:,.0f}",
    ]
    return lines


def as_json(model: str, plans: list[Any], requests: int, start: Any) -> str:
    """Return the plans as JSON."""
    from dataclasses import asdict

    from dovetail.plan.serve_plan import frontier

    best = plans[0]
    found: dict[str, Any] = {
        "model": model, "accelerator": best.replica.accelerator.name, "workload": asdict(best.workload),
        "dtype": best.replica.dtype, "kv": best.replica.kv or best.replica.dtype, "dollars_per_hour": best.dollars,
        "calibration": best.replica.fractions.describe() if best.replica.fractions else None,
        "start": "" if best.unserved else start(best), "unserved": best.unserved,
        "plans": [_plain(plan) for plan in plans],
        "frontier": [{"replicas": p.replicas, "tensor": p.tensor, **_point(q)} for p, q in frontier(plans)],
    }  # fmt: skip
    if own := _held_draft(best.replica):
        found["draft"] = own._asdict()
    if requests:
        found["accelerators_for"] = {"requests_per_day": requests, **asdict(best.accelerators_for(requests))}
    return json.dumps(found, indent=2)


def _plain(plan: Any) -> dict[str, Any]:
    from dataclasses import asdict

    costs = {"per_million_input": plan.per_million_input, "per_million_output": plan.per_million_output}
    return {
        "replicas": plan.replicas, "tensor": plan.tensor, "machines": plan.replica.machines,
        "critical_batch": plan.replica.critical_batch,
        "memory": asdict(plan.held), "kv_tokens": plan.held.tokens,
        "kv_sequences": plan.held.sequences(plan.workload.length), "holds_all": plan.holds_all,
        "first_token_seconds": asdict(plan.first_token), "last_of_all_seconds": asdict(plan.last_of_all),
        "at": _point(plan.chosen), "points": [_point(point) for point in plan.points],
        "dollars": {name: value and asdict(value) for name, value in costs.items()},
    }  # fmt: skip


def _point(point: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "batch": point.batch, "sequences": point.sequences, "decode_seconds": asdict(point.decode),
        "per_token_seconds": asdict(point.per_token), "output_tokens_per_second": asdict(point.rate),
    }  # fmt: skip


def span(bounds: Any, factor: float = 1.0) -> str:
    """Return bounds as `3.1 - 9.9`, with the calibrated value if known: `3.1 - 9.9 (4.2)`."""
    low, high = sorted((bounds.best * factor, bounds.worst * factor))
    likely = "" if bounds.likely is None else f" ({short(bounds.likely * factor)})"
    return f"{short(low)} - {short(high)}{likely}"


def short(value: float) -> str:
    """Return a number with about three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value >= 1 else f"{value:.2g}"


def _ms(seconds: float) -> str:
    return f"{format_number(seconds * 1e3)} ms"


def _gib(size: int | None) -> str:
    return "?" if size is None else f"{size / 2**30:.1f}"


def _count(number: int | None) -> str:
    return "?" if number is None else f"{number:,}"
