"""`dovetail doctor`: whether this machine is well, and what to do where it is not."""

from pathlib import Path

import typer

from dovetail.core.errors import UserError

MARKS = {"good": "[green]✓[/]", "note": "[cyan]·[/]", "warning": "[yellow]![/]", "fault": "[red]✗[/]"}


def doctor(
    speed: bool = typer.Option(True, help="Measure products, memory and links beside the chip's peak."),
    numerics: bool = typer.Option(
        False, help="How exactly the devices compute: top-k, argmax, products, repeatability."
    ),
    burn: float = typer.Option(0.0, min=0.0, help="Seconds in which every chip computes the same, bit for bit."),
    coordinator: str = typer.Option("", help="host:port at which the processes of a run meet."),
    bucket: str = typer.Option(
        "", help="gs://NAME that runs here read or write: whether it lies in this zone's region."
    ),
    zone: str = typer.Option("", help="Of this machine, such as us-central1-a; for --bucket."),
    compare: list[Path] = typer.Option([], help="What `dovetail doctor --json` printed on several hosts; repeat it."),
    as_json: bool = typer.Option(False, "--json", help="Print all of it as JSON."),
) -> None:
    """Look for faults of this machine. Exit code 0: well; 1: a warning; 2: something is broken."""
    if compare:
        _compare(compare, as_json)
        return
    from dovetail.core.regions import check_zone
    from dovetail.doctor.finding import exit_code

    if bool(bucket) != bool(zone):
        raise UserError("--bucket and --zone belong together: a bucket, and the zone of the machines that read it")
    zone = zone and check_zone("--zone", zone)
    findings = list(_examine(speed, numerics, burn, coordinator, quiet=as_json))
    if bucket:
        findings += _part("where its data lies", lambda: [_near(bucket, zone)], as_json)
    if as_json:
        import json

        from dovetail.doctor.hosts import report

        print(json.dumps(report(findings), indent=2))
    else:
        _summary(findings)
    raise typer.Exit(exit_code(findings))


def _examine(speed: bool, numerics: bool, burn: float, coordinator: str, quiet: bool):
    """Each part is shown as soon as it is known: measuring takes a while."""
    from dovetail.doctor.load import is_busy, load
    from dovetail.doctor.system import system

    seen = []
    parts = [("how it is set up", lambda: system(coordinator=coordinator)), ("what else runs", load)]
    if speed:
        from dovetail.doctor import speed as speeds

        parts.append(("how fast it is", lambda: speeds.speed(busy=is_busy(seen))))
    if numerics:
        from dovetail.doctor import numerics as exactness

        parts.append(("how exactly it computes", exactness.numerics))
    if burn:
        from dovetail.doctor import burn as burning

        parts.append((f"a burn-in of {burn:g} s", lambda: burning.burn(burn)))
    for title, look in parts:
        found = _part(title, look, quiet)
        seen += found
        yield from found


def _near(bucket: str, zone: str):
    """Reading a bucket of another region is slow, and billed by the gigabyte."""
    from dovetail.core.transfer import per_gb, region
    from dovetail.doctor.finding import Finding
    from dovetail.jobs.bucket import location

    found = location(bucket)
    if not found:
        how = "log in (gcloud auth application-default login), or look at it in the console"
        return Finding("note", "bucket", f"nobody here knows in which region {bucket} lies", how)
    dollars = per_gb(found, zone)
    if not dollars:
        return Finding("good", "bucket", f"{bucket} lies in {found}, and {zone} reads it for nothing")
    return Finding(
        "warning", "bucket", f"{bucket} lies in {found} and the machine in {zone}: ${dollars:.2f} per GB",
        f"use a bucket in {region(zone)}, or machines in {found}", {"dollars_per_gb": dollars},
    )  # fmt: skip


def _part(title: str, look, quiet: bool):
    from rich.console import Console

    if quiet:
        return look()
    console = Console(highlight=False)
    with console.status(title):
        found = look()
    console.print(f"[bold]{title}[/]")
    for one in found:
        _line(console, one)
    return found


def _line(console, one) -> None:
    from rich.markup import escape
    from rich.padding import Padding

    console.print(Padding(f"{MARKS[one.severity]} [bold]{escape(one.about)}[/]: {escape(one.found)}", (0, 0, 0, 2)))
    if one.advice:
        console.print(Padding(f"[dim]→ {escape(one.advice)}[/]", (0, 0, 0, 6)))


def _summary(findings) -> None:
    from rich.console import Console

    counts = {name: sum(one.severity == name for one in findings) for name in ("fault", "warning")}
    told = ", ".join(f"{count} {name}{'s' * (count != 1)}" for name, count in counts.items() if count)
    Console(highlight=False).print(f"\n{told or 'nothing is wrong'}")


def _compare(paths: list[Path], as_json: bool) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from dovetail.doctor.hosts import differences, read

    reports = [read(path) for path in paths]
    rows = differences(reports)
    hosts = [one["host"] for one in reports]
    if as_json:
        import json

        print(json.dumps({"hosts": hosts, "differences": [{"about": a, "said": said} for a, said in rows]}, indent=2))
    elif not rows:
        Console(highlight=False).print(f"{len(hosts)} hosts, and no difference: {', '.join(hosts)}")
    else:
        table = Table(title="where the hosts differ", title_justify="left", title_style="bold", box=box.ROUNDED)
        for column in ("", *hosts):
            table.add_column(column)
        for about, said in rows:
            table.add_row(about, *said)
        Console(highlight=False).print(table)
    raise typer.Exit(1 if rows else 0)
