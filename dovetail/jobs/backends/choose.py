"""The backend of a name, made once and loaded only where it is used: clients of clouds are extras."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dovetail.core.choice import one_of
from dovetail.jobs.backends.backend import Backend
from dovetail.jobs.spec import BACKENDS


def chooser(root: Path, owner: str) -> Callable[[str], Backend]:
    """`root`: the home of jobs. `owner`: the store's label."""
    made: dict[str, Backend] = {}

    def choose(name: str) -> Backend:
        if name not in made:
            made[name] = _open(name, root, owner)
        return made[name]

    return choose


def _open(name: str, root: Path, owner: str) -> Backend:
    one_of("backend", name, BACKENDS)
    if name == "local":
        from dovetail.jobs.backends.local import Local

        return Local(root, owner)
    if name == "slurm":
        from dovetail.jobs.backends.slurm import Slurm

        return Slurm(root, owner)
    if name == "gcp-tpu":
        from dovetail.jobs.backends.gcp_tpu import GcpTpu

        return GcpTpu(root, owner)
    from dovetail.jobs.backends.gke import Gke

    return Gke(root, owner)
