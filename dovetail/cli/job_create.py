"""`dovetail job create`: a spec from what was typed, what it would do, and a question before it costs money."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from dovetail.jobs.price import Price
    from dovetail.jobs.spec import Spec


def read_spec(words: list[str]) -> tuple[Spec, Path]:
    """(spec, what its code.path is relative to)."""
    from dovetail.jobs import spec as specs

    if words and "=" not in words[0]:
        return specs.load(words[0], words[1:]), Path(words[0]).expanduser().parent
    if not words:
        raise ValueError("expected a job's file or key=value, such as name=hello command='echo hello'")
    return specs.make(words), Path()


def show_only(spec: Spec, cost: str, as_json: bool) -> None:
    """For GKE the manifests, else the script that every process runs."""
    from dovetail.jobs.script import script
    from dovetail.jobs.spec import to_text

    if spec.backend == "gke":
        from dovetail.jobs.backends.gke import preview

        what, body = "manifests", preview(spec)
    else:
        what, body = "script", script(spec)
    if as_json:
        typer.echo(json.dumps({"spec": to_text(spec), "price": cost, what: body}))
    elif what == "manifests":
        typer.echo(f"# {cost}\n{body.rstrip()}")  # as kubectl apply takes it
    else:
        typer.echo(f"{to_text(spec).rstrip()}\n# {cost}\n# every process runs:\n{body.rstrip()}")


def confirm(spec: Spec, cost: Price, yes: bool) -> None:
    """Ask before anything that costs money, and say where it stops; warn of buckets that are far away."""
    from dovetail.jobs.bucket import keeping_warnings, locations, unknown_warnings
    from dovetail.jobs.price import transfer_warnings

    found = locations(spec)
    known = {source: region for source, region in found.items() if region}
    for line in (*transfer_warnings(spec, known), *unknown_warnings(found), *keeping_warnings(spec)):
        typer.echo(f"warning: {line}", err=True)
    if cost.hourly == 0.0 or yes:
        return
    ends = [f"${spec.ceiling.dollars:g}"] * bool(spec.ceiling.dollars)
    ends += [f"{spec.ceiling.hours:g} hours"] * bool(spec.ceiling.hours)
    limit = f"it stops at {' or '.join(ends)}" if ends else "it has no ceiling (ceiling.dollars, ceiling.hours)"
    if not typer.confirm(f"{cost.says}; {limit}. Create it?", err=True):
        raise typer.Exit(1)
