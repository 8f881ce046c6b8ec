"""`dovetail plan serve MODEL`: what an accelerator holds of a model's traffic, how fast, and what a token costs."""

from collections.abc import Callable
from typing import Any

import typer

from dovetail.cli.plan_recipe import JSON, MODEL, PRICE, REGION, SPOT, checked_region, outline_of, write_page
from dovetail.core.errors import UserError


def starter(model: str, stored: Any) -> Callable[[Any], str]:
    """Return a function that describes how to start a plan of `model`, whose weights have the dtype `stored`."""
    from dovetail.core.compute import compute_of
    from dovetail.io.hub import CATALOGUE
    from dovetail.io.outline import servable

    source, why = servable(model)
    # Published weights are in bf16; those of the catalogue may come as a .gguf file, whose type is another.
    own = compute_of(stored).name if stored else "" if source in CATALOGUE else "bf16"

    def start(plan: Any) -> str:
        if plan.unserved:
            return f"cannot be started: {plan.unserved}{_instead(plan)}"
        if not source:
            return f"cannot be started: {why}"
        replica = plan.replica
        usual = own if replica.accelerator.chip.kinds else "f32"  # a CPU computes in f32
        dtype = "" if replica.dtype == usual else replica.dtype
        many = (
            f" (for each of the {plan.replicas:,} replicas, on its own devices and port)" if plan.replicas > 1 else ""
        )
        return f"start it{many}: {plan.command(source, dtype)}"

    return start


def _instead(plan: Any) -> str:
    """Return the single machines that would hold a plan that spans several."""
    from dovetail.plan.serve_plan import elsewhere

    replica = plan.replica
    if replica.machines == 1:
        return ""
    found = elsewhere(replica.cfg, plan.workload, replica.dtype, replica.kv, replica.accelerator)
    return f"; one machine of {' or '.join(found)} holds it" if found else "; no single machine known here holds it"


def serve(
    model: str = typer.Argument(help=MODEL),
    on: str = typer.Option(..., "--on", help="Accelerator: v6e-8, v5litepod-8, h200x1, 2 x v5e-8, cpu."),
    prompt: int = typer.Option(2048, "--in", min=1, help="Tokens per prompt."),
    output: int = typer.Option(512, "--out", min=1, help="Tokens per completion."),
    concurrency: int = typer.Option(64, min=1, help="Concurrent requests, over all devices."),
    dtype: str = typer.Option("", help="Type of the weights: bf16, f16, f32, tf32; int8, fp8, int4 for planning only."),
    kv: str = typer.Option("", help="Type of the KV cache. Default: that of the weights, at least bf16."),
    tensor_parallel_size: int = typer.Option(
        0, min=0, show_default=False, help="Devices per replica. Default: try each number."
    ),
    price: float = PRICE,
    spot: bool = SPOT,
    region: str = REGION,
    per_day: str = typer.Option("", help="Requests per day, such as 1M: print the machines needed and their cost."),
    plot: str = typer.Option("", help="Plot latency against throughput to this .svg file."),
    html: str = typer.Option("", help="Write a page of plots to this .html file."),
    explain: bool = typer.Option(False, "--explain", help="Show the arithmetic of the best plan."),
    as_json: bool = JSON,
) -> None:
    """Estimate KV capacity, latency, throughput and cost of serving MODEL."""
    from dataclasses import replace
    from pathlib import Path

    from dovetail.cli import plan_serve_table as tables
    from dovetail.core.accelerator import parse
    from dovetail.core.cloud import rate
    from dovetail.core.recipe import read_count
    from dovetail.plan.calibration import fractions
    from dovetail.plan.serve_memory import PLANNED_ONLY
    from dovetail.plan.serve_plan import Workload, plan_serving
    from dovetail.plan.train_plan import chip_to_plan

    if plot and Path(plot).suffix != ".svg":
        raise UserError(
            f"--plot must be an .svg file, got {plot}: use {Path(plot).with_suffix('.svg')}", param="--plot"
        )
    region, accelerator = checked_region(price, spot, region), parse(on)
    cfg, stored = outline_of(model)
    chip, dtype = chip_to_plan(accelerator), dtype or ("bf16" if accelerator.chip else "f32")
    accelerator = replace(accelerator, chip=chip)  # for a CPU: this machine's
    paid = rate(chip, spot, region, price)
    dollars = None if paid.dollars is None else paid.dollars * accelerator.total_chips
    plans = plan_serving(
        cfg, accelerator, Workload(prompt, output, concurrency), dtype=dtype,
        kv=kv or ("bf16" if dtype in PLANNED_ONLY else dtype), dollars=dollars,
        fractions=fractions(chip.name), tensor=tensor_parallel_size,
    )  # fmt: skip
    start = starter(model, stored)
    requests = read_count(per_day, "--per-day") if per_day else 0
    if as_json:
        print(tables.as_json(model, plans, requests, start))
    else:
        tables.show(model, plans, requests, explain, paid.says, start)
    if plot:
        from dovetail.cli.plot import draw_plans
        from dovetail.core.files import write_atomic

        write_atomic(plot, draw_plans(model, plans))
    if html:
        from dovetail.plan.page.serving import serving_page

        write_page(html, serving_page(model, plans, start))
