"""Backends: the places where jobs run. Each is loaded only when it is used, because cloud clients are extras."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dovetail.core.choice import one_of
from dovetail.jobs.backends.backend import JobBackend
from dovetail.jobs.spec import BACKENDS


def chooser(root: Path, owner: str) -> Callable[[str], JobBackend]:
    """Return a function from a backend's name to the backend; each backend is made once.

    Args:
        root: The folder of jobs.
        owner: The store's label of all resources.
    """
    made: dict[str, JobBackend] = {}

    def choose(name: str) -> JobBackend:
        if name not in made:
            made[name] = _open(name, root, owner)
        return made[name]

    return choose


def _open(name: str, root: Path, owner: str) -> JobBackend:
    one_of("backend", name, BACKENDS)
    if name == "local":
        from dovetail.jobs.backends.local import LocalBackend

        return LocalBackend(root, owner)
    if name == "slurm":
        from dovetail.jobs.backends.slurm import SlurmBackend

        return SlurmBackend(root, owner)
    if name == "gcp-tpu":
        from dovetail.jobs.backends.gcp_tpu import GcpTpuBackend

        return GcpTpuBackend(root, owner)
    from dovetail.jobs.backends.gke import GkeBackend

    return GkeBackend(root, owner)
