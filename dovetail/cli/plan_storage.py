"""`dovetail plan storage RECIPE_OR_MODEL`: what a training keeps and moves, how long that takes and what it costs."""

from typing import Any

import typer

from dovetail.cli.plan_recipe import MODEL


def storage(
    what: str = typer.Argument(metavar="RECIPE_OR_MODEL", help=f"A recipe; or a model: {MODEL[0].lower()}{MODEL[1:]}"),
    overrides: list[str] = typer.Argument(None, metavar="[KEY=VALUE]...", help="Such as checkpoint.every=500."),
    on: str = typer.Option("", "--on", help="What it runs on, such as v4-64: so many hosts save at once."),
    tokens: str = typer.Option("", help="Of the data, such as 300B; otherwise as many as the recipe trains on."),
    epochs: float = typer.Option(1.0, min=0.0, help="Over that data, with --tokens."),
    bandwidth: float = typer.Option(1.0, min=0.001, help="GB/s of each host to the bucket."),
    bucket: str = typer.Option("", help="Its region or multi-region: us-central2, us."),
    zone: str = typer.Option("", help="Of the machines: us-central2-b."),
    as_json: bool = typer.Option(False, "--json", help="The same as JSON."),
) -> None:
    """Checkpoint and data size, time to save and restore, dollars; a warning where bucket and zone differ."""
    import json
    from dataclasses import asdict

    from rich.console import Console

    from dovetail.cli.plan_recipe import outline_of, settings_of
    from dovetail.core.accelerator import parse
    from dovetail.core.recipe import read_count
    from dovetail.core.regions import check_place, check_zone
    from dovetail.plan.storage import plan_storage

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
    console.print(table(what, found, machine.total_hosts if machine else 1, bandwidth))
    if found.warning:
        console.print(f"warning: {found.warning}", style="yellow", markup=False, soft_wrap=True)


def table(what: str, found: Any, hosts: int, bandwidth: float):
    from dovetail.cli.info import table as two_columns
    from dovetail.train.report.live import clock_text

    each = f"{hosts} host{'s' if hosts > 1 else ''} at {bandwidth:g} GB/s each"
    rows = [
        ("checkpoint", f"{_size(found.state)}: masters, moments; {_size(found.export)} of weights alone in bf16"),
        ("saves", f"{found.saves:,}, of which {found.kept:,} are kept: {_size(found.kept * found.state)}"),
        ("save", f"at least {clock_text(found.save_seconds)}, {each}; training goes on meanwhile"),
        ("restore", f"at least {clock_text(found.restore_seconds)}"),
        ("data", f"{_size(found.data)} of tokens"),
        ("keeping", f"${found.month:,.2f} per month"),
        ("operations", f"${found.operations:,.2f}"),
        ("carrying", f"${found.carried:,.2f} between regions"),
    ]
    return two_columns(f"storage of {what}: estimated, list prices of Google Cloud, 2026-08", rows)


def _size(count: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:,.3g} {unit}" if count < 1000 * size else f"{count / size:,.0f} {unit}"
    return f"{count:,.0f} bytes"
