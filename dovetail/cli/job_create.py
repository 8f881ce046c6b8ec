"""`dovetail job create`: a spec from what was typed, what it would do, and a question before it costs money."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dovetail.core.errors import UserError

if TYPE_CHECKING:
    from dovetail.jobs.price import Price
    from dovetail.jobs.spec import Spec


def read_spec(words: list[str]) -> tuple[Spec, Path]:
    """(spec, what its code.path is relative to)."""
    from dovetail.jobs import spec as specs

    if words and "=" not in words[0]:
        return specs.load(words[0], words[1:]), Path(words[0]).expanduser().parent
    if not words:
        raise UserError("expected a job's file or key=value, such as name=hello command='echo hello'")
    return specs.make(words), Path()


def show_only(spec: Spec, cost: str, notes: list[str], as_json: bool) -> None:
    """Print what would be asked of the backend, and the script that every process runs."""
    from dovetail.jobs.sensitive import masked
    from dovetail.jobs.spec import to_text

    spec = masked(spec)
    parts = _parts(spec)
    if as_json:
        found = {key: body for key, (_, body) in parts.items()}
        typer.echo(json.dumps({"spec": to_text(spec), "price": cost, "warnings": notes} | found))
    elif "manifests" in parts:
        typer.echo(f"# {cost}\n{parts['manifests'][1].rstrip()}")  # as kubectl apply takes it
    else:
        typer.echo(f"{to_text(spec).rstrip()}\n# {cost}")
        for title, body in parts.values():
            typer.echo(f"# {title}:\n{_text(body).rstrip()}")


def _parts(spec: Spec) -> dict[str, tuple[str, Any]]:
    """Key -> (title, body) of what a backend would be given."""
    from dovetail.jobs.script import interpreter, script

    zone = spec.zones[0] if spec.zones else ""
    if spec.backend == "gke":
        from dovetail.jobs.backends.gke import preview

        return {"manifests": ("manifests", preview(spec))}
    if spec.backend == "gcp-tpu":
        from dovetail.jobs.backends.tpu_request import preview

        flexible = spec.tier == "flex-start"
        title = "gcloud asks for the slice" if flexible else "the queued resource that is asked for"
        key = "gcloud" if flexible else "request"
        return {key: (f"{title}, in {zone}", preview(spec)), "script": ("every process runs", script(spec))}
    ran = {"script": ("every process runs", script(spec, interpreter(spec)))}
    if spec.backend == "slurm":
        from dovetail.jobs.backends.slurm_script import preview
        from dovetail.jobs.home import jobs_home

        options, batch = preview(spec, jobs_home(), zone)
        return {"sbatch": ("sbatch is given", options), "batch": ("this batch script", batch)} | ran
    return ran


def _text(body: Any) -> str:
    """A command of many words has one per line; a request is JSON."""
    if isinstance(body, list):
        return " \\\n    ".join(shlex.quote(word) for word in body)
    return body if isinstance(body, str) else json.dumps(body, indent=2)


def warnings(spec: Spec) -> list[str]:
    """What a person should know before the job is created: buckets that are far away, or whose place is not known."""
    from dovetail.jobs.bucket import keeping_warnings, locations, unknown_warnings
    from dovetail.jobs.price import transfer_warnings

    found = locations(spec)
    known = {source: region for source, region in found.items() if region}
    return [*transfer_warnings(spec, known), *unknown_warnings(found), *keeping_warnings(spec)]


def confirm(spec: Spec, cost: Price, yes: bool) -> None:
    """Ask before anything that costs money, and say where it stops."""
    if cost.hourly == 0.0 or yes:
        return
    ends = [f"${spec.ceiling.dollars:g}"] * bool(spec.ceiling.dollars)
    ends += [f"{spec.ceiling.hours:g} hours"] * bool(spec.ceiling.hours)
    limit = f"it stops at {' or '.join(ends)}" if ends else "it has no ceiling (ceiling.dollars, ceiling.hours)"
    if not typer.confirm(f"{cost.says}; {limit}. Create it?", err=True):
        raise typer.Exit(1)
