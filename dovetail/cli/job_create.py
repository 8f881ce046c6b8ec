"""`dovetail job create`: read the spec, show a dry run, and ask before a job that costs money."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dovetail.core.errors import UserError

if TYPE_CHECKING:
    from dovetail.jobs.cost import Price
    from dovetail.jobs.spec import Spec


def read_spec(words: list[str]) -> tuple[Spec, Path]:
    """Return (spec, the folder that its code.path is relative to)."""
    from dovetail.jobs import spec as specs

    if words and "=" not in words[0]:
        return specs.load(words[0], words[1:]), Path(words[0]).expanduser().parent
    if not words:
        raise UserError("expected a job's file or key=value, such as name=hello command='echo hello'", param="SPEC")
    return specs.make(words), Path()


def dry_run(spec: Spec, base: Path, price: Price, notes: list[str], check: bool, as_json: bool) -> None:
    """Print the backend's request and the script of every process, then raise UserError if the job cannot start."""
    from dovetail.jobs import actions, preflight, snapshot

    _show(replace(spec, code=snapshot.settled(spec.code, base)), price.says, notes, as_json)
    try:
        actions.check(spec, base)
    except UserError as error:  # the request above may look complete
        raise UserError(f"this job would not be created: {error}", param=error.param, code=error.code) from error
    folder = snapshot.command_folder(spec.code, base)
    if note := preflight.check_fit(spec, folder, compiles=False) if check else "":
        typer.echo(f"note: {note}", err=True)


def _show(spec: Spec, price: str, notes: list[str], as_json: bool) -> None:
    from dovetail.jobs.secrets import masked
    from dovetail.jobs.spec import to_text

    spec = masked(spec)
    parts = _parts(spec)
    if as_json:
        found = {key: body for key, (_, body) in parts.items()}
        typer.echo(json.dumps({"spec": to_text(spec), "price": price, "warnings": notes} | found))
    elif "manifests" in parts:
        typer.echo(f"# {price}\n{parts['manifests'][1].rstrip()}")  # valid input of kubectl apply
    else:
        typer.echo(f"{to_text(spec).rstrip()}\n# {price}")
        for title, body in parts.values():
            typer.echo(f"# {title}:\n{_text(body).rstrip()}")


def _parts(spec: Spec) -> dict[str, tuple[str, Any]]:
    """Return key -> (title, body) of what a backend would receive."""
    from dovetail.jobs.script import interpreter, script

    zone = spec.zones[0] if spec.zones else ""
    if spec.backend == "gke":
        from dovetail.jobs.backends.gke import preview

        return {"manifests": ("manifests", preview(spec))}
    if spec.backend == "gcp-tpu":
        from dovetail.jobs.backends.tpu_request import preview

        key, title = ("gcloud", "gcloud command") if spec.tier == "flex-start" else ("request", "queued resource")
        return {key: (f"{title}, in {zone}", preview(spec)), "script": ("every process runs", script(spec))}
    ran = {"script": ("every process runs", script(spec, interpreter(spec)))}
    if spec.backend == "slurm":
        from dovetail.jobs.backends.slurm_script import preview
        from dovetail.jobs.files import jobs_home

        options, batch = preview(spec, jobs_home(), zone)
        return {"sbatch": ("sbatch command", options), "batch": ("batch script", batch)} | ran
    return ran


def _text(body: Any) -> str:
    """Return a command with one word per line, or a request as JSON."""
    if isinstance(body, list):
        return " \\\n    ".join(shlex.quote(word) for word in body)
    return body if isinstance(body, str) else json.dumps(body, indent=2)


def confirm(spec: Spec, price: Price, yes: bool) -> None:
    """Ask before a job that costs money, and show its ceiling."""
    if price.hourly == 0.0 or yes:
        return
    ends = [f"${spec.ceiling.dollars:g}"] * bool(spec.ceiling.dollars)
    ends += [f"{spec.ceiling.hours:g} hours"] * bool(spec.ceiling.hours)
    limit = f"it stops at {' or '.join(ends)}" if ends else "it has no ceiling (ceiling.dollars, ceiling.hours)"
    if not typer.confirm(f"{price.says}; {limit}. Create it?", err=True):
        raise typer.Exit(1)
