"""`dovetail doctor`: check this machine, and say what to do about each fault."""

from pathlib import Path

import typer

from dovetail.core.errors import UserError

MARKS = {"good": "[green]✓[/]", "note": "[cyan]·[/]", "warning": "[yellow]![/]", "fault": "[red]✗[/]"}


def doctor(
    speed: bool = typer.Option(True, help="Measure products, memory and links, and compare with the chip's peak."),
    numerics: bool = typer.Option(
        False, help="Check how exactly the devices compute: top-k, argmax, products, repeatability."
    ),
    burn: float = typer.Option(0.0, min=0.0, help="Seconds of a burn-in that compares all chips bit for bit."),
    coordinator: str = typer.Option("", help="host:port of the coordinator of a multi-host run, to test."),
    bucket: str = typer.Option("", help="Bucket gs://NAME whose region is compared with that of --zone."),
    zone: str = typer.Option("", help="Zone of this machine, such as us-central1-a; for --bucket."),
    compare: list[Path] = typer.Option([], help="Output of `dovetail doctor --json` of one host; repeat it per host."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Check this machine for faults. Exit code 0: no problem; 1: a warning; 2: a fault."""
    if compare:
        _compare(compare, as_json)
        return
    from dovetail.core.cloud import check_zone
    from dovetail.doctor import exit_code, report

    if bool(bucket) != bool(zone):
        missing = "--zone" if bucket else "--bucket"
        raise UserError("`--bucket` and `--zone` must be given together", param=missing)
    zone = zone and check_zone("--zone", zone)
    findings = list(_examine(speed, numerics, burn, coordinator, quiet=as_json))
    if bucket:
        findings += _part("location of its data", lambda: [_near(bucket, zone)], as_json)
    if as_json:
        import json

        print(json.dumps(report(findings), indent=2))
    else:
        _summary(findings)
    raise typer.Exit(exit_code(findings))


def _examine(speed: bool, numerics: bool, burn: float, coordinator: str, quiet: bool):
    """Yield the findings, and show each part as soon as it is known, because measuring takes a while."""
    from dovetail.doctor import system

    seen = []
    parts = [("setup", lambda: system.system(coordinator=coordinator)), ("other work", lambda: system.load())]
    if speed:
        from dovetail.doctor import speed as speeds

        parts.append(("speed", lambda: speeds.speed(busy=system.is_busy(seen))))
    if numerics or burn:
        from dovetail.doctor import numerics as exactness

        parts += [("numerics", exactness.numerics)] if numerics else []
        parts += [(f"burn-in of {burn:g} s", lambda: exactness.burn(burn))] if burn else []
    for title, look in parts:
        found = _part(title, look, quiet)
        seen += found
        yield from found


def _near(bucket: str, zone: str):
    """Compare the regions of the bucket and the machine: reading from another region is slow and billed per GB."""
    from dovetail.core.cloud import per_gb, region
    from dovetail.doctor import Finding
    from dovetail.jobs.cost import location

    found = location(bucket)
    if not found:
        how = "log in (gcloud auth application-default login), or look at it in the console"
        return Finding("note", "bucket", f"the region of {bucket} is not known", how)
    dollars = per_gb(found, zone)
    if not dollars:
        return Finding("good", "bucket", f"{bucket} is in {found}: reading it from {zone} costs nothing")
    return Finding(
        "warning", "bucket", f"{bucket} is in {found} and the machine in {zone}: ${dollars:.2f} per GB",
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
    text = ", ".join(f"{count} {name}{'s' * (count != 1)}" for name, count in counts.items() if count)
    Console(highlight=False).print(f"\n{text or 'no problems found'}")


def _compare(paths: list[Path], as_json: bool) -> None:
    from rich.console import Console

    from dovetail.cli.tables import framed
    from dovetail.doctor import differences, read_report

    reports = [read_report(path) for path in paths]
    rows = differences(reports)
    hosts = [one["host"] for one in reports]
    if as_json:
        import json

        found = [{"about": about, "said": results} for about, results in rows]
        print(json.dumps({"hosts": hosts, "differences": found}, indent=2))
    elif not rows:
        Console(highlight=False).print(f"{len(hosts)} hosts, no differences: {', '.join(hosts)}")
    else:
        table = framed("differences between hosts", "", *hosts)
        for about, results in rows:
            table.add_row(about, *results)
        Console(highlight=False).print(table)
    raise typer.Exit(1 if rows else 0)
