"""`dovetail plan serve MODEL`: what an accelerator holds of a model's traffic, how fast, and what a token costs."""

import typer

from dovetail.cli.plan_recipe import MODEL, PRICE, REGION, SPOT
from dovetail.core.errors import UserError

ON = typer.Option(..., "--on", help="Such as v6e-8, v5litepod-8, h200x1, 2 x v5e-8, cpu.")


def serve(
    model: str = typer.Argument(help=MODEL),
    on: str = ON,
    prompt: int = typer.Option(2048, "--in", min=1, help="Tokens of a prompt."),
    output: int = typer.Option(512, "--out", min=1, help="Tokens of an answer."),
    concurrency: int = typer.Option(64, min=1, help="Requests at a time, over all devices."),
    dtype: str = typer.Option("", help="Of the weights: bf16, f16, f32, tf32; int8, fp8 and int4 to plan with."),
    kv: str = typer.Option("", help="Of the KV pages; otherwise as the weights, at least bf16."),
    tensor_parallel: int = typer.Option(0, min=0, help="Devices of a replica; otherwise every number is tried."),
    price: float = PRICE,
    spot: bool = SPOT,
    region: str = REGION,
    per_day: str = typer.Option("", help="Requests of a day, such as 1M: how many machines, for how much."),
    plot: str = typer.Option("", help="Draw latency against throughput into this .svg file."),
    html: str = typer.Option("", help="Write one page with pictures of it all into this .html file."),
    explain: bool = typer.Option(False, help="Show the arithmetic, with the numbers filled in."),
    as_json: bool = typer.Option(False, "--json", help="The same as JSON."),
) -> None:
    """KV capacity, latency, throughput and cost of serving MODEL: bounds, before a chip is paid for."""
    from dataclasses import replace
    from pathlib import Path

    from dovetail.cli import plan_serve_table as tables
    from dovetail.cli.plan_recipe import checked_region, outline_of
    from dovetail.cli.plan_start import starter
    from dovetail.core.accelerator import parse
    from dovetail.core.prices import rate
    from dovetail.core.recipe import read_count
    from dovetail.plan.calibration import fractions
    from dovetail.plan.pool import PLANNED_ONLY
    from dovetail.plan.serve_plan import Workload, plan_serving
    from dovetail.plan.train_plan import chip_to_plan

    if plot and Path(plot).suffix != ".svg":
        raise UserError(f"--plot draws SVG, which browsers show: name it {Path(plot).with_suffix('.svg')}")
    region, accelerator = checked_region(price, spot, region), parse(on)
    cfg, stored = outline_of(model)
    chip, dtype = chip_to_plan(accelerator), dtype or ("bf16" if accelerator.chip else "f32")
    accelerator = replace(accelerator, chip=chip)  # of a CPU, the one here
    paid = rate(chip, spot, region, price)
    dollars = None if paid.dollars is None else paid.dollars * accelerator.total_chips
    plans = plan_serving(
        cfg, accelerator, Workload(prompt, output, concurrency), dtype=dtype,
        kv=kv or ("bf16" if dtype in PLANNED_ONLY else dtype), dollars=dollars,
        fractions=fractions(chip.name), tensor=tensor_parallel,
    )  # fmt: skip
    start = starter(model, stored)
    requests = read_count(per_day, "--per-day") if per_day else 0
    if as_json:
        print(tables.as_json(model, plans, requests, start))
    else:
        tables.show(model, plans, requests, explain, paid.says, start)
    if plot:
        from dovetail.cli.plan_serve_plot import draw
        from dovetail.core.files import write_atomic

        write_atomic(plot, draw(model, plans))
    if html:
        from dovetail.cli.plan_page import write_serving

        write_serving(html, model, plans, start)
