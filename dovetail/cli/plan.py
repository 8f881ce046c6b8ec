"""`dovetail plan`: memory, time and cost of training, serving, RL and storage, before hardware is rented."""

from pathlib import Path
from typing import Any

import typer

from dovetail.cli import plan_rl, plan_serve, plan_train
from dovetail.cli.options import OptionCommand
from dovetail.cli.plan_recipe import RECIPE_OR_MODEL, outline_of, settings_of
from dovetail.cli.tables import pairs
from dovetail.core.errors import UserError
from dovetail.core.units import format_clock, format_decimal_bytes, format_duration

app = typer.Typer(
    help="Estimate memory, time and cost of training and serving before renting hardware.",
    invoke_without_command=True,
    no_args_is_help=True,
)
app.command("train")(plan_train.train)
app.command("serve", cls=OptionCommand)(plan_serve.serve)
app.command("rl")(plan_rl.rl)


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


def _size(count: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:,.3g} {unit}" if count < 1000 * size else f"{count / size:,.0f} {unit}"
    return f"{count:,.0f} bytes"
