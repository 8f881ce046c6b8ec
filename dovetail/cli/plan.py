"""`dovetail plan`: memory, time and cost of training, serving, RL and storage, before hardware is rented."""

import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from dovetail.cli import plan_rl
from dovetail.cli.options import OptionCommand
from dovetail.cli.plan_recipe import (
    JSON,
    MODEL,
    PRICE,
    RECIPE_OR_MODEL,
    REGION,
    SPOT,
    TOKENS_PER_WEIGHT,
    checked_region,
    is_recipe,
    outline_of,
    settings_of,
    write_page,
)
from dovetail.cli.tables import pairs
from dovetail.core.errors import UserError
from dovetail.core.units import format_clock, format_decimal_bytes, format_duration

app = typer.Typer(
    help="Estimate memory, time and cost of training and serving before renting hardware.",
    invoke_without_command=True,
    no_args_is_help=True,
)


# --- calibration ------------------------------------------------------------------------------------------------------


@app.callback()
def _root(
    calibrate: str = typer.Option("", metavar="RUN_DIR", help="Calibrate later plans with the step times of a run."),
) -> None:
    if calibrate:
        _calibrate(calibrate)
        raise typer.Exit()


def _calibrate(folder: str) -> None:
    """Store the fractions of its chips' peaks that a run reached, and print what later plans will use."""
    from datetime import UTC, datetime

    from rich.console import Console

    from dovetail.plan.calibration import calibration_file, store
    from dovetail.plan.prediction import FILE
    from dovetail.train.report.goodput import split
    from dovetail.train.report.summary import read, step_seconds

    run = read(folder)
    measured = step_seconds(run)
    if run.prediction is None:
        raise UserError(
            f"{folder} must have a {FILE}, which a run writes if its chip is in the table of chips", param="--calibrate"
        )
    if measured is None or len(run.steps) < 4:
        raise UserError(
            f"{folder} must have at least 4 reports, got {len(run.steps)}: the first ones include compiling",
            param="--calibrate",
        )
    if any(split(line) for line in run.steps):
        raise UserError(
            f"{folder} is an RL run, whose steps differ in length: use a run of pretraining or fine-tuning",
            param="--calibrate",
        )
    last = datetime.fromtimestamp(run.steps[-1].get("time", 0.0), UTC).strftime("%Y-%m-%d")
    one = run.prediction.observed(_name(folder), measured, last)
    known = store(one)
    parts = {"products": one.products, "memory": one.memory, "links": one.links}
    parts_text = ", ".join(f"{name} {format_duration(seconds)}" for name, seconds in parts.items() if seconds)
    console = Console(highlight=False)
    console.print(
        f"{_name(folder)}: a step takes {format_duration(measured)} on {one.devices} x {one.chip}, bound by "
        f"{one.bound_by}; at peak rates {parts_text}",
        markup=False, soft_wrap=True,
    )  # fmt: skip
    console.print(f"{one.chip}: {known.describe()}", markup=False, soft_wrap=True)
    console.print(f"later plans for {one.chip} use it; kept in {calibration_file()}", style="dim", soft_wrap=True)


def _name(folder: str) -> str:
    """Return the last two parts of the path, which say enough without naming this machine's folders."""
    path = Path(folder).resolve()
    return f"{path.parent.name}/{path.name}" if path.parent.name else path.name


# --- training ---------------------------------------------------------------------------------------------------------


@app.command()
def train(
    what: str = RECIPE_OR_MODEL,
    overrides: list[str] = typer.Argument(
        None, metavar="[KEY=VALUE]...", help="Overrides, such as mesh.tensor=4 remat=full."
    ),
    on: str = typer.Option(..., "--on", help="Accelerator: v5e-256, v5p-128, h100x64, 2 x v6e-256, cpu."),
    batch: str = typer.Option("", help="Tokens per step, such as 4M. Default: the recipe's."),
    seq: int = typer.Option(0, min=0, show_default=False, help="Tokens per row. Default: the recipe's, or 4096."),
    tokens: str = typer.Option("", help="Tokens of the run, such as 1T. Default: the recipe's, or 20 per weight."),
    remat: str = typer.Option("", help="none, dots, attention or full. Default: try each."),
    stages: int = typer.Option(1, min=1, help="Estimate a pipeline of this many stages, which the trainer lacks."),
    top: int = typer.Option(5, min=1, help="Number of plans to show."),
    price: float = PRICE,
    spot: bool = SPOT,
    region: str = REGION,
    explain: bool = typer.Option(False, "--explain", help="Show the arithmetic of the best plan."),
    html: str = typer.Option("", help="Write a page of plots to this .html file."),
    as_json: bool = JSON,
) -> None:
    """Estimate memory, time and cost of training on every mesh that fits."""
    from dovetail.cli import plan_train_table as tables
    from dovetail.core.accelerator import parse
    from dovetail.core.cloud import rate
    from dovetail.plan.calibration import fractions
    from dovetail.plan.train_plan import Prices, plan_training
    from dovetail.train.settings import check_causal, check_pretrain

    region, accelerator = checked_region(price, spot, region), parse(on)
    settings = _settings(what, overrides or [], accelerator, batch, seq, tokens, remat)
    cfg = outline_of(settings.model)[0]
    if not cfg.images:
        check_pretrain(settings.loss, cfg) if is_recipe(what) else check_causal(cfg)
    prices = Prices(rate(accelerator.chip, False, region, price), rate(accelerator.chip, True, region, price))
    known = fractions(accelerator.chip.name if accelerator.chip else "CPU")
    plans = plan_training(cfg, settings, accelerator, prices=prices, known=known)
    if as_json:
        print(tables.as_json(what, plans[:top], len(plans)))
    else:
        tables.show(what, plans, top, spot, _whose(what, overrides or [], tokens), explain)
        if stages > 1:
            tables.show_stages(plans[0], stages)
    if html:
        from dovetail.plan.train_page import training_page

        write_page(html, training_page(plans[:top]))


def _whose(what: str, overrides: list[str], tokens: str) -> str:
    """Return where the number of tokens comes from, unless it was given."""
    if tokens or any(word.startswith(("tokens=", "steps=")) for word in overrides):
        return ""
    return "the recipe's" if is_recipe(what) else f"{TOKENS_PER_WEIGHT} per weight; set --tokens"


def _settings(what: str, overrides: list[str], accelerator, batch: str, seq: int, tokens: str, remat: str):
    """Return the recipe with the options applied; a batch in tokens becomes rows that the devices can share."""
    from dovetail.core.recipe import read_count
    from dovetail.plan.train_plan import rows_of

    words = [*overrides, *([f"remat={remat}"] if remat else [])]
    count = read_count(tokens, "--tokens") if tokens else 0
    settings = settings_of(what, words, count, length=seq)
    if not batch:
        return settings
    wanted = read_count(batch, "--batch")
    if wanted < settings.length:
        raise UserError(
            f"--batch must be at least one row of {settings.length:,} tokens, got {wanted:,}", param="--batch"
        )
    return settings_of(what, words, count, rows_of(wanted, settings.length, accelerator), seq)


# --- serving ----------------------------------------------------------------------------------------------------------


def starter(model: str, stored: Any, more: str = "") -> Callable[[Any], str]:
    """Return a function that describes how to start a plan.

    Args:
        model: The model.
        stored: The dtype of its weights; None if not known.
        more: Further options of the command.
    """
    from dovetail.core.compute import compute_of
    from dovetail.io.hub import CATALOGUE
    from dovetail.io.load import servable
    from dovetail.plan.serve_memory import QUANTIZED, compute_dtype

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
        computed = compute_dtype(replica.dtype)
        dtype = "" if computed == usual else computed
        quantized = f" --quantization {replica.dtype}" if replica.dtype in QUANTIZED else ""
        quantized += f" --kv-cache-dtype {replica.kv}" if replica.kv in ("fp8", "int8") else ""
        many = (
            f" (for each of the {plan.replicas:,} replicas, on its own devices and port)" if plan.replicas > 1 else ""
        )
        return f"start it{many}: {plan.command(source, dtype)}{quantized}{more}"

    return start


def _instead(plan: Any) -> str:
    """Return the single machines that would hold a plan that spans several."""
    from dovetail.plan.serve_plan import elsewhere

    replica = plan.replica
    if replica.machines == 1:
        return ""
    found = elsewhere(replica, plan.workload)
    return f"; one machine of {' or '.join(found)} holds it" if found else "; no single machine known here holds it"


def _draft(model: str, cfg: Any, config: str) -> Any:
    """Return the draft model of a speculative config; None if it names none."""
    from dovetail.engine.options import EngineOptions
    from dovetail.engine.spec.draft_weights import outline_draft_of

    options = EngineOptions(speculative_config=config or None).with_own_draft(model)
    return outline_draft_of(options.speculative_config, cfg)


@app.command(cls=OptionCommand)
def serve(
    model: str = typer.Argument(help=MODEL),
    on: str = typer.Option(..., "--on", help="Accelerator: v6e-8, v5litepod-8, h200x1, 2 x v5e-8, cpu."),
    prompt: int = typer.Option(2048, "--in", min=1, help="Tokens per prompt."),
    output: int = typer.Option(512, "--out", min=1, help="Tokens per completion."),
    concurrency: int = typer.Option(64, min=1, help="Concurrent requests, over all devices."),
    dtype: str = typer.Option("", help="Type of the weights: bf16, f16, f32, tf32, or quantised to int8, fp8, int4."),
    kv: str = typer.Option("", help="Type of the KV cache. Default: that of the weights, at least bf16."),
    tensor_parallel_size: int = typer.Option(
        0, min=0, show_default=False, help="Devices per replica. Default: try each number."
    ),
    speculative_config: str = typer.Option(
        "", metavar="JSON", help="Count the memory of a draft model, as in `dovetail serve`; its config.json suffices."
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
    from dovetail.cli import plan_serve_table as tables
    from dovetail.core.accelerator import parse
    from dovetail.core.cloud import rate
    from dovetail.core.recipe import read_count
    from dovetail.plan.calibration import fractions
    from dovetail.plan.serve_memory import HELD, compute_dtype
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
        kv=kv or (compute_dtype(dtype) if dtype in HELD else dtype), dollars=dollars,
        fractions=fractions(chip.name), tensor=tensor_parallel_size, draft=_draft(model, cfg, speculative_config),
    )  # fmt: skip
    more = f" --speculative-config {shlex.quote(speculative_config)}" if speculative_config else ""
    start = starter(model, stored, more)
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
        from dovetail.plan.serve_page import serving_page

        write_page(html, serving_page(model, plans, start))


app.command("rl")(plan_rl.rl)

# --- storage ----------------------------------------------------------------------------------------------------------


@app.command()
def storage(
    what: str = RECIPE_OR_MODEL,
    overrides: list[str] = typer.Argument(
        None, metavar="[KEY=VALUE]...", help="Overrides, such as checkpoint.every=500."
    ),
    on: str = typer.Option("", "--on", help="Accelerator, such as v4-64: its hosts save in parallel."),
    tokens: str = typer.Option("", help="Tokens of the data, such as 300B. Default: those of the recipe."),
    epochs: float = typer.Option(1.0, min=0.0, help="Passes over the data, with --tokens."),
    bandwidth: float = typer.Option(1.0, min=0.001, help="GB/s between a host and the bucket."),
    bucket: str = typer.Option("", help="Region or multi-region of the bucket: us-central2, us."),
    zone: str = typer.Option("", help="Zone of the machines: us-central2-b."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Estimate checkpoint and data size, time to save and restore, and cost."""
    import json
    from dataclasses import asdict

    from rich.console import Console

    from dovetail.core.accelerator import parse
    from dovetail.core.cloud import check_place, check_zone
    from dovetail.core.recipe import read_count
    from dovetail.plan.cost import plan_storage

    bucket, zone = bucket and check_place("--bucket", bucket), zone and check_zone("--zone", zone)
    count = read_count(tokens, "--tokens") if tokens else 0
    settings, machine = settings_of(what, overrides or [], count), parse(on) if on else None
    found = plan_storage(
        outline_of(settings.model)[0], settings, hosts=machine.total_hosts if machine else 1, bandwidth=bandwidth * 1e9,
        devices_per_host=machine.total_devices // machine.total_hosts if machine else 1,
        mesh=settings.mesh if settings.mesh.fsdp else None, tokens=count, epochs=epochs, bucket=bucket, zone=zone,
    )  # fmt: skip
    if as_json:
        print(json.dumps(asdict(found) | {"dollars": found.dollars}, indent=2))
        return
    console = Console(highlight=False)
    console.print(_table(what, found, machine.total_hosts if machine else 1, bandwidth))
    if found.warning:
        console.print(f"warning: {found.warning}", style="yellow", markup=False, soft_wrap=True)


def _table(what: str, found: Any, hosts: int, bandwidth: float):
    each = f"{hosts} host{'s' if hosts > 1 else ''} at {bandwidth:g} GB/s each"
    state, export = format_decimal_bytes(found.state), format_decimal_bytes(found.export)
    rows = [
        ("checkpoint", f"{state}: weights in f32 and optimizer state; {export} for an export in bf16"),
        ("saves", f"{found.saves:,}, {found.kept:,} of them kept: {format_decimal_bytes(found.kept * found.state)}"),
        ("save", f"at least {format_clock(found.save_seconds)}, {each}; training continues"),
        ("restore", f"at least {format_clock(found.restore_seconds)}"),
        ("data", f"{format_decimal_bytes(found.data)} of tokens"),
        ("storage", f"${found.month:,.2f} per month"),
        ("operations", f"${found.operations:,.2f}"),
        ("transfer", f"${found.carried:,.2f} between regions"),
    ]
    return pairs(f"storage of {what}: estimated, list prices of Google Cloud, 2026-08", rows)
