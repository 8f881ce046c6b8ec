"""Run shell lines on the VMs of a TPU slice, on all at once: through gcloud, or by ssh to their addresses.

`Ssh` is a function that returns the command line for a line on a host; tests replace it. The results of the hosts are
separate (`gcloud ... --worker=all` mixes their output, and has one exit code for all).
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from dovetail.core.errors import MissingPackageError, UserError

AT_ONCE = 16  # each is a process on this machine
# The key of a VM is accepted at the first connection, and must not change afterwards.
OPTIONS = (
    "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15", "-o", "LogLevel=ERROR",
    "-o", "StrictHostKeyChecking=accept-new", "-o", "HashKnownHosts=no",
)  # fmt: skip


@dataclass(frozen=True)
class TpuHost:
    """Hold one VM of a slice."""

    rank: int  # over all slices
    node: str  # projects/P/locations/ZONE/nodes/NODE
    index: int  # in its node
    address: str = ""


@dataclass(frozen=True)
class SshResult:
    """Hold the exit code and the output of a command."""

    code: int
    out: bytes
    err: str


Ssh = Callable[[TpuHost, str | None], list[str]]  # None: an interactive shell
Run = Callable[[Sequence[str], bytes, float], SshResult]


def gcloud(internal: bool = False, program: str = "gcloud") -> Ssh:
    """Return command lines of gcloud, which distributes the keys itself and takes a second or more per call.

    It remembers host keys by the id of the node, which is unique: a changed key is refused.
    """

    def command(host: TpuHost, line: str | None) -> list[str]:
        _, project, _, zone, _, node = host.node.split("/")
        words = [program, "compute", "tpus", "tpu-vm", "ssh", node, f"--project={project}", f"--zone={zone}"]
        words += [f"--worker={host.index}", "--quiet"]
        words += ["--internal-ip"] if internal else []
        return words if line is None else [*words, f"--command={line}"]

    return command


def plain(known_hosts: Path, user: str = "", program: str = "ssh") -> Ssh:
    """Return command lines of ssh, for keys in the project's metadata or OS Login.

    `known_hosts` is a file of one slice: the next slice may have the same addresses with other keys.
    """
    name = str(known_hosts).replace("%", "%%")  # ssh_config's escape; quoted, because it splits at spaces
    options = (*OPTIONS, "-o", f'UserKnownHostsFile="{name}"')

    def command(host: TpuHost, line: str | None) -> list[str]:
        if not host.address:
            raise UserError(
                f"rank {host.rank} of {host.node} has no address: see gcp.external_ips and gcp.network",
                param="gcp.network",
            )
        whom = f"{user}@{host.address}" if user else host.address
        words = [program, *options, "--", whom]  # a name that begins with - is not an option
        return words if line is None else [*words, line]

    return command


def check(program: str) -> None:
    """Raise MissingPackageError if the program that reaches a slice is missing: the slice would be paid for idle."""
    if shutil.which(program) is None:
        other = "install it, or set gcp.ssh_user to use ssh" if program == "gcloud" else "install it"
        raise MissingPackageError(f"TPU VMs are reached by {program}, which is not in PATH here: {other}")


def run(words: Sequence[str], given: bytes, timeout: float) -> SshResult:
    """Run a command with `given` as its input; a missing program and a timeout have exit code 255."""
    try:
        done = subprocess.run(words, input=given, capture_output=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return SshResult(255, b"", f"no answer within {timeout:g} s")
    except OSError as error:
        return SshResult(255, b"", f"{words[0]}: {error.strerror}")
    return SshResult(done.returncode, done.stdout, done.stderr.decode(errors="replace").strip())


def on_all(
    hosts: Sequence[TpuHost],
    lines: Sequence[str],
    ssh: Ssh,
    run: Run = run,
    given: Sequence[bytes] = (),
    timeout: float = 60.0,
) -> list[SshResult]:
    """Run one line, with its input, on each host at the same time; return the results in the order of the hosts."""
    if not hosts:
        return []
    tasks = zip(hosts, lines, given or [b""] * len(hosts), strict=True)
    with ThreadPoolExecutor(min(AT_ONCE, len(hosts))) as pool:
        futures = [pool.submit(run, ssh(host, line), data, timeout) for host, line, data in tasks]
        return [future.result() for future in futures]
