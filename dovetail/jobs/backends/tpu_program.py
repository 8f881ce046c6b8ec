"""The program of an attempt on all VMs of its slices: started, observed, stopped, its logs fetched.

A VM holds the files of an attempt in a folder:

    ~/.dovetail/attempts/NAME/    script.sh  run.sh  code/  log  keeper  pid  boot  exit

`run.sh` (the keeper) starts the program in its own process group and records its end, so that the end is known even if
the program is killed. Everything is sh and coreutils, because a bare image has nothing else.

The logs of a slice are lost with it, so each observation fetches the new part.
"""

from __future__ import annotations

import io
import re
import shlex
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dovetail.core.errors import RecipeError, UnsupportedError
from dovetail.jobs import secrets
from dovetail.jobs.backends.backend import (
    LogPart,
    Observed,
    UnavailableError,
    append_log,
    log_size,
    merge_log,
    read_log,
)
from dovetail.jobs.backends.tpu_ssh import Run, Ssh, SshResult, TpuHost, on_all
from dovetail.jobs.job import CALL_FOLDER, Attempt
from dovetail.jobs.outcome import NO_ENVIRONMENT, NO_FOLDER, SIGTERM, deciding
from dovetail.jobs.script import script
from dovetail.jobs.snapshot import extract
from dovetail.jobs.spec import Spec

SETTLE_S = 60.0  # for the other ranks to save and end, once one has failed
LOOK_S = 30.0  # for a host's answer
SEND_S = 300.0  # for the code to arrive
NO_SSH = 255
TAR_FINE = (0, 1)  # 1: a file grew while it was read
MAX_CHUNKS = 200  # of one log that are fetched at the end: the last 50 MB
MARK = b"dovetail-worker "
CHUNK = 256 * 1024  # bytes of a log that are fetched at a time
BUCKET = "$HOME/.dovetail/bucket"
HEALTH, METRICS = "run/health.jsonl", "run/metrics.jsonl"  # of a training, in the job's folder


class TpuProgram:
    """Control the program of one attempt on the hosts of its slices."""

    def __init__(self, attempt: Attempt, hosts: Sequence[TpuHost], ssh: Ssh, run: Run) -> None:
        self._attempt, self._hosts, self._ssh, self._run = attempt, list(hosts), ssh, run

    def observe(self) -> Observed:
        """Return the state of the program; start it on hosts where it was not started."""
        found = self._look(self._hosts)
        names = tuple(host.address or f"{host.node}/{host.index}" for host in self._hosts)
        silent = [host.rank for host, one in zip(self._hosts, found, strict=True) if isinstance(one, SshResult)]
        if silent:
            first = found[silent[0]]
            why = first.err.splitlines()[-1:] if isinstance(first, SshResult) else []
            return Observed("unknown", f"{_ranks(silent)} not reached over ssh: {''.join(why)[:200]}", names)
        statuses = [one for one in found if isinstance(one, HostStatus)]
        absent = [host for host, one in zip(self._hosts, statuses, strict=True) if one.state == "absent"]
        if absent:
            return self._start(absent, names)
        return self._observed(statuses, names)

    def _look(self, hosts: Sequence[TpuHost]) -> list[HostStatus | SshResult]:
        """Return the status of each host, or the ssh that failed; append the new part of each log to its copy."""
        paths = [self._attempt.log(host.rank) for host in hosts]
        here = [log_size(path) for path in paths]
        lines = [status_line(self._attempt.name, since) for since in here]
        done = on_all(hosts, lines, self._ssh, self._run, timeout=LOOK_S)
        found: list[HostStatus | SshResult] = []
        for path, since, one in zip(paths, here, done, strict=True):
            status = parse_status(one.out)
            if status is not None:
                append_log(path, since, status.log)
            found.append(one if status is None else status)
        return found

    def _start(self, hosts: Sequence[TpuHost], names: tuple[str, ...]) -> Observed:
        attempt = self._attempt
        sent = self._on_all(hosts, unpack_line(attempt.name), [bundle(attempt)] * len(hosts), SEND_S)
        refused = _first_failed(hosts, sent)
        if refused is None:
            scripts = [start_script(attempt, host.rank).encode() for host in hosts]
            refused = _first_failed(hosts, self._on_all(hosts, "sh -s", scripts, LOOK_S))
        if refused is None:
            return Observed("running", f"started on {len(hosts)} of {len(self._hosts)} hosts", names)
        rank, one = refused
        if one.code in (NO_FOLDER, NO_ENVIRONMENT):  # reported by the host, and the same the next time
            return Observed("failed", f"rank {rank} could not be started: {one.err[-200:]}", names, one.code, rank)
        return Observed("waiting", f"rank {rank} could not be started yet: {one.err[-200:]}", names)

    def _on_all(self, hosts: Sequence[TpuHost], line: str, given: Sequence[bytes], timeout: float) -> list[SshResult]:
        return on_all(hosts, [line] * len(hosts), self._ssh, self._run, given, timeout)

    def _observed(self, statuses: Sequence[HostStatus], names: tuple[str, ...]) -> Observed:
        lost = [rank for rank, one in enumerate(statuses) if one.state == "lost"]
        codes = [one.code or 0 for one in statuses]
        ended = sorted(
            (rank for rank, one in enumerate(statuses) if one.code is not None), key=lambda r: statuses[r].ended
        )
        failed = [rank for rank in ended if codes[rank]]
        settled = bool(failed) and time.time() - statuses[failed[0]].ended > SETTLE_S
        if len(ended) + len(lost) < len(statuses) and not settled:
            detail = f"rank {failed[0]} exited with {codes[failed[0]]}; the others continue" if failed else ""
            return Observed("running", detail, names)
        self._drain(statuses)
        code, rank = deciding(codes, failed)
        if not self._has_results({0, rank or 0}):
            return Observed("unknown", "it is over, and its results could not be fetched yet", names)
        if failed:
            return Observed("failed", f"rank {rank} exited with {code}", names, code, rank)
        if lost:
            return Observed("failed", f"{_ranks(lost)} ended without an exit code: the machine was restarted", names)
        return Observed("succeeded", "", names, 0)

    def _drain(self, statuses: Sequence[HostStatus]) -> None:
        """Fetch the rest of the logs before the slice is deleted."""
        left = [host for host, one in zip(self._hosts, statuses, strict=True) if len(one.log) == CHUNK]
        for _ in range(MAX_CHUNKS):
            found = self._look(left) if left else []
            pairs = zip(left, found, strict=True)
            left = [host for host, one in pairs if isinstance(one, HostStatus) and len(one.log) == CHUNK]

    def _has_results(self, ranks: set[int]) -> bool:
        """Fetch the results before the slice is deleted; a remote function is not over without its value."""
        asked = [host for host in self._hosts if host.rank in ranks]
        done = self._on_all(asked, results_line(self._attempt), (), SEND_S)
        whole = [
            one.code in TAR_FINE and take_results(self._attempt, one.out, host.rank)
            for host, one in zip(asked, done, strict=True)
        ]
        return all(whole) or (not self._attempt.is_call and all(one.code != NO_SSH for one in done))

    def stop(self, grace: float) -> None:
        """Send SIGTERM on all hosts, and SIGKILL after `grace` seconds."""
        done = self._on_all(self._hosts, stop_line(self._attempt.name, grace), (), LOOK_S)
        failed = [one for one in done if one.code]
        if failed:
            raise UnavailableError(f"{len(failed)} of {len(done)} hosts could not be stopped: {failed[0].err[-200:]}")

    def logs(self, rank: int, since: int) -> LogPart:
        """Fetch the new part of a log, and return the part of the copy from byte `since` on."""
        self._look([host for host in self._hosts if host.rank == rank])
        return read_log(self._attempt.log(rank), since)


def _first_failed(hosts: Sequence[TpuHost], done: Sequence[SshResult]) -> tuple[int, SshResult] | None:
    return next(((host.rank, one) for host, one in zip(hosts, done, strict=True) if one.code), None)


def _ranks(ranks: Sequence[int]) -> str:
    named = ", ".join(map(str, ranks[:5])) + (", ..." if len(ranks) > 5 else "")
    return f"rank {named}" if len(ranks) == 1 else f"ranks {named}"


def check(spec: Spec) -> None:
    """Raise UserError for settings that a TPU VM does not support."""
    if spec.environment.image:
        raise UnsupportedError(
            "`environment.image` is for gke and slurm; on gcp-tpu give environment.lock, venv or conda",
            param="environment.image",
        )
    for mount in spec.mounts:
        if not mount.source.startswith("gs://"):
            raise RecipeError(
                f"`mounts` of a TPU VM must be buckets, such as gs://bucket/folder; got {mount.source!r}",
                param="mounts",
            )
    if spec.gcp.bucket and not spec.gcp.bucket.startswith("gs://"):
        raise RecipeError(
            f"`gcp.bucket` must be a bucket, such as gs://my-jobs; got {spec.gcp.bucket!r}", param="gcp.bucket"
        )


# --- what runs on one host --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HostStatus:
    """Hold the status of the program on one VM. lost: started, but neither running nor ended (the VM was restarted)."""

    state: Literal["absent", "running", "exited", "lost"]
    code: int | None = None
    ended: float = 0.0  # by the VM's clock
    log: bytes = b""


def attempt_folder(name: str) -> str:
    """Return the folder of an attempt on a VM, quoted for sh."""
    return f'"$HOME"/.dovetail/attempts/{shlex.quote(name)}'


def _job_folder(attempt: Attempt) -> str:
    """Return the folder that all attempts of the job share if there is a bucket, for sh within double quotes."""
    return f"{BUCKET if attempt.spec.gcp.bucket else '$HOME/.dovetail'}/jobs/{attempt.job}"


def status_line(name: str, since: int) -> str:
    """Return a shell line that prints the status, then the log from byte `since` on."""
    return f"""cd {attempt_folder(name)} 2>/dev/null || {{ echo '{MARK.decode()}absent'; exit 0; }}
alive() {{ [ "$(cat boot)" = "$(cat /proc/sys/kernel/random/boot_id)" ] && kill -0 "$(cat keeper)"; }} 2>/dev/null
if [ ! -e started ]; then s=absent; elif [ ! -e exit ] && alive; then s=running
elif [ -e exit ]; then s="exited $(cat exit)"; else s=lost; fi
echo "{MARK.decode()}$s"; [ ! -e log ] || tail -c +{since + 1} log | head -c {CHUNK}"""


def parse_status(answer: bytes) -> HostStatus | None:
    """Parse the output of `status_line`; None if it did not run."""
    head, mark, rest = answer.partition(MARK)
    if not mark or (head and not head.endswith(b"\n")):
        return None
    line, end, log = rest.partition(b"\n")
    found = re.fullmatch(r"(absent|running|lost)|exited (\d+) ([\d.]+)", line.decode(errors="replace").strip())
    if not end or found is None:
        return None
    if found[1]:
        return HostStatus(found[1], log=log[:CHUNK])  # type: ignore[arg-type]
    return HostStatus("exited", int(found[2]), float(found[3]), log[:CHUNK])


def unpack_line(name: str) -> str:
    """Return a shell line that unpacks a `bundle` from its input."""
    folder = attempt_folder(name)
    return f'umask 077; d={folder}; mkdir -p "$d/code" && cd "$d" && tar xf - && tar xzf code.tar.gz -C code'


def bundle(attempt: Attempt) -> bytes:
    """Return a tar of the scripts and the code."""
    code = (attempt.home / "code.tar.gz").read_bytes() if attempt.snapshot else _tar({}, "w:gz")
    held = {"script.sh": script(attempt.spec).encode(), "run.sh": _keeper(attempt.spec).encode(), "code.tar.gz": code}
    call = sorted((attempt.home / CALL_FOLDER).glob("call.*")) if attempt.is_call else []
    return _tar({**held, **{f"{CALL_FOLDER}/{path.name}": path.read_bytes() for path in call}}, "w")


def results_line(attempt: Attempt) -> str:
    """Return a shell line that prints a tar of the results.

    These are the value of a remote function, the hosts that a training found at fault, and its metrics.
    """
    wanted = f"{CALL_FOLDER}/{attempt.number}.* {HEALTH} {METRICS}"
    there = f'for f in {wanted}; do [ ! -e "$f" ] || set -- "$@" "$f"; done'
    return f'set --; cd "{_job_folder(attempt)}" 2>/dev/null && {{ {there}; }}; tar cf - -T /dev/null "$@"'


def take_results(attempt: Attempt, archive: bytes, rank: int) -> bool:
    """Unpack the output of `results_line`; return False if it is incomplete.

    Only the requested files: others who reach the VM could add any, such as the script of the next attempt.
    """
    value = re.compile(rf"{CALL_FOLDER}/{attempt.number}\.(\d+\.)?result\.pkl(\.mac)?")
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as tar:
            for member in tar.getmembers():
                held = tar.extractfile(member)
                if member.name == HEALTH and held is not None:  # every host may have its own
                    merge_log(attempt.home / HEALTH, held.read().decode(errors="replace"))
                elif value.fullmatch(member.name) or (member.name == METRICS and rank == 0):
                    extract(tar, member, attempt.home)
    except tarfile.TarError:
        return False
    return True


def start_script(attempt: Attempt, rank: int) -> str:
    """Return the input of `sh -s` that starts the program, unless it was started.

    It contains the secrets, which go into the program's environment and no file.
    """
    here, fetched = secrets.read(attempt.home, attempt.spec), _fetched(attempt.spec)
    variables = {**attempt.variables, "DOVETAIL_RANK": str(rank), **here}
    exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    exports += [f'{name}="$({line})" && export {name} || exit 91' for name, line in fetched.items()]
    return "\n".join(
        [
            f"cd {attempt_folder(attempt.name)} || exit 90",
            f'export DOVETAIL_JOB_DIR="{_job_folder(attempt)}" DOVETAIL_CODE_DIR="$PWD/code"',
            *exports,
            "mkdir started 2>/dev/null || exit 0",
            "cat /proc/sys/kernel/random/boot_id > boot",
            "setsid sh run.sh > log 2>&1 < /dev/null & echo $! > keeper",
            "",
        ]
    )


def stop_line(name: str, grace: float) -> str:
    """Return a shell line that sends SIGTERM to the program's group, and SIGKILL after `grace` seconds.

    A program that was not started will not be: it counts as ended by the signal.
    """
    later = shlex.quote(f"sleep {max(grace, 0):g}; [ -e exit ] || {_kill('KILL', '$(cat pid)')}")
    return (
        f'd={attempt_folder(name)}; mkdir -p "$d" && cd "$d" && touch stop || exit 1; '
        f'if mkdir started 2>/dev/null; then echo "{SIGTERM} $(date +%s.%N)" > exit; exit 0; fi; '
        f"[ ! -e exit ] || exit 0; {_kill('TERM', '$(cat pid)')}; setsid sh -c {later} > /dev/null 2>&1 < /dev/null &"
    )


def _kill(signal: str, process: str) -> str:
    """Return a command that signals the group, or the process alone before it has made its group."""
    return f'{{ kill -s {signal} -- "-{process}" || kill -s {signal} "{process}"; }} 2>/dev/null'


def _keeper(spec: Spec) -> str:
    mounts = [_mount(one.source, _quoted(one.path), one.read_only) for one in spec.mounts]
    if spec.gcp.bucket:
        mounts.append(_mount(spec.gcp.bucket, f'"{BUCKET}"', False))
    return "\n".join(
        [
            'finish() { echo "$1 $(date +%s.%N)" > exit.new && mv exit.new exit; exit; }',
            *(f"{line} || finish 91" for line in mounts),
            'mkdir -p "$DOVETAIL_JOB_DIR" || finish 90',
            f'[ ! -d {CALL_FOLDER} ] || cp -R {CALL_FOLDER} "$DOVETAIL_JOB_DIR/" || finish 90',
            "setsid sh script.sh & child=$!; echo $child > pid.new && mv pid.new pid",
            f"[ ! -e stop ] || {_kill('TERM', '$child')}",  # the stop came before there was a process
            "wait $child; finish $?",
            "",
        ]
    )


def _mount(source: str, where: str, read_only: bool) -> str:
    """Return a shell line that mounts a bucket. Without gcsfuse on the image the attempt ends with 91."""
    bucket, _, inside = source.removeprefix("gs://").strip("/").partition("/")
    options = ["--implicit-dirs", *(["--only-dir", shlex.quote(inside)] if inside else []), *(["-o", "ro"] * read_only)]
    make = f'{{ mkdir -p {where} 2>/dev/null || {{ sudo mkdir -p {where} && sudo chown "$(id -u)" {where}; }}; }}'
    return f"{{ mountpoint -q {where} || {{ {make} && gcsfuse {' '.join(options)} {shlex.quote(bucket)} {where}; }}; }}"


def _quoted(path: str) -> str:
    return '"$HOME"/' + shlex.quote(path[2:]) if path.startswith("~/") else shlex.quote(path)


def _fetched(spec: Spec) -> dict[str, str]:
    """Return, for each secret in Google's Secret Manager, the shell line that reads it on the VM."""
    pairs = [pair.partition("=") for pair in spec.secrets]
    there = {name: where.partition(":")[2] for name, _, where in pairs if where.startswith("gcp:")}
    fetch = "gcloud secrets versions access latest --secret="
    return {name: fetch + shlex.quote(one) for name, one in there.items()}


def _tar(held: dict[str, bytes], mode: Literal["w", "w:gz"]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as tar:
        for name, data in held.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o600
            tar.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()
