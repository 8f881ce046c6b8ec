"""Whether a Slurm cluster can ever meet a request: asked of `sbatch --test-only`, which submits nothing."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from dovetail.core.errors import UserError
from dovetail.jobs.attempt import Attempt
from dovetail.jobs.backends.slurm_script import options
from dovetail.jobs.spec import Spec

ASK_S = 30.0
# Words of a refusal that time does not change. Nodes that are down or busy, and a controller that is away, are none.
NEVER = ("configuration is not available", "invalid", "not permitted", "violates", "more processors requested")


def check(spec: Spec) -> str:
    """Return a remark, or ""; ValueError with sbatch's reason if the request can never be met.

    `zones` are partitions to try in turn: each of them has to be able to.
    """
    if shutil.which("sbatch") is None:
        return ""  # the backend's own check says so
    for zone in spec.zones or ("",):
        said = _refusal(options(Attempt("job", 1, spec, Path.cwd(), "owner", zone), "dovetail"))
        if any(word in said.lower() for word in NEVER):
            where = f" in partition {zone or spec.slurm.partition}" if zone or spec.slurm.partition else ""
            raise UserError(f"Slurm cannot meet this request{where} ({_asked(spec)}): {said}")
        if said:
            return f"not checked with Slurm: {said}"
    return ""


def _asked(spec: Spec) -> str:
    slurm = spec.slurm
    words = {"cpus_per_task": slurm.cpus_per_task, "mem": slurm.mem, "gpus_per_node": slurm.gpus_per_node,
             "constraint": slurm.constraint, "time": slurm.time}  # fmt: skip
    nodes = spec.processes // slurm.tasks_per_node
    return ", ".join([f"{nodes} nodes" if nodes > 1 else "1 node", *(f"{k} {v}" for k, v in words.items() if v)])


def _refusal(words: Sequence[str]) -> str:
    """Return what sbatch says against it; "" where it would take it."""
    command = ["sbatch", "--test-only", *words]
    try:
        done = subprocess.run(
            command, input="#!/bin/sh\n", capture_output=True, text=True, timeout=ASK_S, check=False
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return ""
    lines = [line.removeprefix("sbatch: ").removeprefix("error: ").strip() for line in done.stderr.splitlines()]
    return "; ".join(filter(None, lines)) or f"sbatch --test-only exits with {done.returncode}"
