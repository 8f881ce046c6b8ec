"""A line of sh on the VMs of a TPU slice, on all at once: through gcloud, or by plain ssh to their addresses.

`Ssh` is the seam: a function that says which command line runs a line on a worker. What comes back of each worker is
kept apart (`gcloud ... --worker=all` mixes their output, and has one exit code for all).
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from dovetail.core.errors import UserError

AT_ONCE = 16  # each is a process here
# A key is taken at the first connection to a VM, and must be the same afterwards.
OPTIONS = (
    "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15", "-o", "LogLevel=ERROR",
    "-o", "StrictHostKeyChecking=accept-new", "-o", "HashKnownHosts=no",
)  # fmt: skip


@dataclass(frozen=True)
class Worker:
    """One VM of a slice."""

    rank: int  # over all slices
    node: str  # projects/P/locations/ZONE/nodes/NODE
    index: int  # in its node
    address: str = ""


@dataclass(frozen=True)
class Done:
    code: int
    out: bytes
    err: str


Ssh = Callable[[Worker, str | None], list[str]]  # None: a shell for a person
Run = Callable[[Sequence[str], bytes, float], Done]


def gcloud(internal: bool = False, program: str = "gcloud") -> Ssh:
    """It makes and spreads the keys by itself, and is slow: a second or more for each call.

    It remembers host keys by the id of the node, which no other slice has: a changed one is refused.
    """

    def command(worker: Worker, line: str | None) -> list[str]:
        _, project, _, zone, _, node = worker.node.split("/")
        words = [program, "compute", "tpus", "tpu-vm", "ssh", node, f"--project={project}", f"--zone={zone}"]
        words += [f"--worker={worker.index}", "--quiet"]
        words += ["--internal-ip"] if internal else []
        return words if line is None else [*words, f"--command={line}"]

    return command


def plain(known_hosts: Path, user: str = "", program: str = "ssh") -> Ssh:
    """For keys that are there already (in the project's metadata, or by OS Login).

    `known_hosts` is the file of one slice: the next has the addresses of old ones and other keys.
    """
    name = str(known_hosts).replace("%", "%%")  # ssh_config's escape; quoted, for it splits at spaces
    options = (*OPTIONS, "-o", f'UserKnownHostsFile="{name}"')

    def command(worker: Worker, line: str | None) -> list[str]:
        if not worker.address:
            raise UserError(f"rank {worker.rank} of {worker.node} has no address: see gcp.external_ips and gcp.network")
        whom = f"{user}@{worker.address}" if user else worker.address
        words = [program, *options, "--", whom]  # a name that begins with - is no option
        return words if line is None else [*words, line]

    return command


def check(program: str) -> None:
    """Raise ValueError where there is no way to reach a slice: it would be paid for, and do nothing."""
    if shutil.which(program) is None:
        other = "install it, or set gcp.ssh_user to use ssh" if program == "gcloud" else "install it"
        raise UserError(f"TPU VMs are reached by {program}, which is not in PATH here: {other}")


def run(words: Sequence[str], given: bytes, timeout: float) -> Done:
    """Run it here with `given` as its input. No program and no answer in time are ends like others."""
    try:
        done = subprocess.run(words, input=given, capture_output=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return Done(255, b"", f"no answer within {timeout:g} s")
    except OSError as error:
        return Done(255, b"", f"{words[0]}: {error.strerror}")
    return Done(done.returncode, done.stdout, done.stderr.decode(errors="replace").strip())


def on_all(
    workers: Sequence[Worker],
    lines: Sequence[str],
    ssh: Ssh,
    run: Run = run,
    given: Sequence[bytes] = (),
    timeout: float = 60.0,
) -> list[Done]:
    """One line, with its input, for each worker, at the same time; their ends in the workers' order."""
    if not workers:
        return []
    tasks = zip(workers, lines, given or [b""] * len(workers), strict=True)
    with ThreadPoolExecutor(min(AT_ONCE, len(workers))) as pool:
        futures = [pool.submit(run, ssh(worker, line), data, timeout) for worker, line, data in tasks]
        return [future.result() for future in futures]
