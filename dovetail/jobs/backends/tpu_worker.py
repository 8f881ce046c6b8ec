"""What happens on one VM of a slice: the files of an attempt, its program started once, and how that stands.

    ~/.dovetail/attempts/NAME/    script.sh  run.sh  code/  log  keeper  pid  boot  exit

`run.sh` (the keeper) starts the program in a group of its own and writes down its end, so that the program may be
killed and the end still be known. All of it is sh and coreutils: a bare image has no more.
"""

from __future__ import annotations

import io
import re
import shlex
import tarfile
from dataclasses import dataclass
from typing import Literal

from dovetail.core.errors import UserError
from dovetail.jobs import secrets
from dovetail.jobs.archive import extract
from dovetail.jobs.attempt import CALL, Attempt
from dovetail.jobs.backends import log_copy
from dovetail.jobs.outcome import SIGTERM
from dovetail.jobs.script import script
from dovetail.jobs.spec import Spec

MARK = b"dovetail-worker "
CHUNK = 256 * 1024  # of a log, at a time
BUCKET = "$HOME/.dovetail/bucket"
HEALTH, METRICS = "run/health.jsonl", "run/metrics.jsonl"  # of a training, in the job's folder


@dataclass(frozen=True)
class Standing:
    """How the program of one VM stands. Lost: it was started, and neither runs nor has ended (the VM was restarted)."""

    state: Literal["absent", "running", "exited", "lost"]
    code: int | None = None
    ended: float = 0.0  # by the VM's clock
    log: bytes = b""


def folder(name: str) -> str:
    """In the words of sh."""
    return f'"$HOME"/.dovetail/attempts/{shlex.quote(name)}'


def poll(name: str, since: int) -> str:
    """A line that tells how the program stands, then what its log has from byte `since` on."""
    return f"""cd {folder(name)} 2>/dev/null || {{ echo '{MARK.decode()}absent'; exit 0; }}
alive() {{ [ "$(cat boot)" = "$(cat /proc/sys/kernel/random/boot_id)" ] && kill -0 "$(cat keeper)"; }} 2>/dev/null
if [ ! -e started ]; then s=absent; elif [ ! -e exit ] && alive; then s=running
elif [ -e exit ]; then s="exited $(cat exit)"; else s=lost; fi
echo "{MARK.decode()}$s"; [ ! -e log ] || tail -c +{since + 1} log | head -c {CHUNK}"""


def standing(answer: bytes) -> Standing | None:
    """Of what `poll` printed; None where it did not run."""
    head, mark, rest = answer.partition(MARK)
    if not mark or (head and not head.endswith(b"\n")):
        return None
    line, end, log = rest.partition(b"\n")
    found = re.fullmatch(r"(absent|running|lost)|exited (\d+) ([\d.]+)", line.decode(errors="replace").strip())
    if not end or found is None:
        return None
    if found[1]:
        return Standing(found[1], log=log[:CHUNK])  # type: ignore[arg-type]
    return Standing("exited", int(found[2]), float(found[3]), log[:CHUNK])


def unpack(name: str) -> str:
    """A line that takes `files` from its input."""
    return f'umask 077; d={folder(name)}; mkdir -p "$d/code" && cd "$d" && tar xf - && tar xzf code.tar.gz -C code'


def files(attempt: Attempt) -> bytes:
    """A tar of the scripts and the code."""
    code = (attempt.home / "code.tar.gz").read_bytes() if attempt.snapshot else _empty()
    held = {"script.sh": script(attempt.spec).encode(), "run.sh": _keeper(attempt.spec).encode(), "code.tar.gz": code}
    call = sorted((attempt.home / CALL).glob("call.*")) if attempt.is_call else []
    return _tar({**held, **{f"{CALL}/{path.name}": path.read_bytes() for path in call}}, "w")


def answers(attempt: Attempt) -> str:
    """A line that prints a tar of what is to be kept of the job's folder there: what this attempt's function returned,
    the hosts that a training found at fault, its curves."""
    wanted = f"{CALL}/{attempt.number}.* {HEALTH} {METRICS}"
    there = f'for f in {wanted}; do [ ! -e "$f" ] || set -- "$@" "$f"; done'
    return f'set --; cd "{_job_folder(attempt)}" 2>/dev/null && {{ {there}; }}; tar cf - -T /dev/null "$@"'


def take(attempt: Attempt, archive: bytes, rank: int) -> bool:
    """Unpack what `answers` printed; False where it came in part.

    Only the files that were asked for: others who reach the VM could add any, such as the script of the next attempt.
    """
    value = re.compile(rf"{CALL}/{attempt.number}\.(\d+\.)?result\.pkl(\.mac)?")
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as tar:
            for member in tar.getmembers():
                held = tar.extractfile(member)
                if member.name == HEALTH and held is not None:  # every host may have one of its own
                    log_copy.merge(attempt.home / HEALTH, held.read().decode(errors="replace"))
                elif value.fullmatch(member.name) or (member.name == METRICS and rank == 0):
                    extract(tar, member, attempt.home)
    except tarfile.TarError:
        return False
    return True


def _job_folder(attempt: Attempt) -> str:
    """What all attempts of the job see, if there is a bucket; in the words of sh, within double quotes."""
    return f"{BUCKET if attempt.spec.gcp.bucket else '$HOME/.dovetail'}/jobs/{attempt.job}"


def start(attempt: Attempt, rank: int) -> str:
    """The input of `sh -s` that starts the program, if that was not done. Secrets are in it, and go into the program's
    environment and no file."""
    here, fetched = secrets.read(attempt.home, attempt.spec), _fetched(attempt.spec)
    told = {**attempt.variables, "DOVETAIL_RANK": str(rank), **here}
    exports = [f"export {name}={shlex.quote(value)}" for name, value in told.items()]
    exports += [f'{name}="$({line})" && export {name} || exit 91' for name, line in fetched.items()]
    return "\n".join(
        [
            f"cd {folder(attempt.name)} || exit 90",
            f'export DOVETAIL_JOB_DIR="{_job_folder(attempt)}" DOVETAIL_CODE_DIR="$PWD/code"',
            *exports,
            "mkdir started 2>/dev/null || exit 0",
            "cat /proc/sys/kernel/random/boot_id > boot",
            "setsid sh run.sh > log 2>&1 < /dev/null & echo $! > keeper",
            "",
        ]
    )


def stop(name: str, grace: float) -> str:
    """A line that signals the program's whole group, and ends it for good after `grace` seconds. What has not begun
    will not: it counts as ended by the signal."""
    later = shlex.quote(f"sleep {max(grace, 0):g}; [ -e exit ] || {_kill('KILL', '$(cat pid)')}")
    return (
        f'd={folder(name)}; mkdir -p "$d" && cd "$d" && touch stop || exit 1; '
        f'if mkdir started 2>/dev/null; then echo "{SIGTERM} $(date +%s.%N)" > exit; exit 0; fi; '
        f"[ ! -e exit ] || exit 0; {_kill('TERM', '$(cat pid)')}; setsid sh -c {later} > /dev/null 2>&1 < /dev/null &"
    )


def _kill(signal: str, process: str) -> str:
    """The whole group; the process alone while it has not made its group yet."""
    return f'{{ kill -s {signal} -- "-{process}" || kill -s {signal} "{process}"; }} 2>/dev/null'


def check(spec: Spec) -> None:
    """Refuse what a TPU VM cannot be given."""
    if spec.environment.image:
        raise UserError("environment.image is for gke and slurm; on gcp-tpu give environment.lock, venv or conda")
    for mount in spec.mounts:
        if not mount.source.startswith("gs://"):
            raise UserError(f"mounts: a TPU VM can mount buckets alone, as gs://bucket/folder; got {mount.source!r}")
    if spec.gcp.bucket and not spec.gcp.bucket.startswith("gs://"):
        raise UserError(f"gcp.bucket must be a bucket, such as gs://my-jobs; got {spec.gcp.bucket!r}")


def _keeper(spec: Spec) -> str:
    mounts = [_mount(one.source, _quoted(one.path), one.read_only) for one in spec.mounts]
    if spec.gcp.bucket:
        mounts.append(_mount(spec.gcp.bucket, f'"{BUCKET}"', False))
    return "\n".join(
        [
            'finish() { echo "$1 $(date +%s.%N)" > exit.new && mv exit.new exit; exit; }',
            *(f"{line} || finish 91" for line in mounts),
            'mkdir -p "$DOVETAIL_JOB_DIR" || finish 90',
            f'[ ! -d {CALL} ] || cp -R {CALL} "$DOVETAIL_JOB_DIR/" || finish 90',
            "setsid sh script.sh & child=$!; echo $child > pid.new && mv pid.new pid",
            f"[ ! -e stop ] || {_kill('TERM', '$child')}",  # told so before there was anything to signal
            "wait $child; finish $?",
            "",
        ]
    )


def _mount(source: str, where: str, read_only: bool) -> str:
    """gcsfuse is not on every image: without it the attempt ends with 91, and the log says why."""
    bucket, _, inside = source.removeprefix("gs://").strip("/").partition("/")
    options = ["--implicit-dirs", *(["--only-dir", shlex.quote(inside)] if inside else []), *(["-o", "ro"] * read_only)]
    make = f'{{ mkdir -p {where} 2>/dev/null || {{ sudo mkdir -p {where} && sudo chown "$(id -u)" {where}; }}; }}'
    return f"{{ mountpoint -q {where} || {{ {make} && gcsfuse {' '.join(options)} {shlex.quote(bucket)} {where}; }}; }}"


def _quoted(path: str) -> str:
    return '"$HOME"/' + shlex.quote(path[2:]) if path.startswith("~/") else shlex.quote(path)


def _fetched(spec: Spec) -> dict[str, str]:
    """Return, for each secret in Google's Secret Manager, the line of sh that reads it on the VM."""
    pairs = [pair.partition("=") for pair in spec.secrets]
    there = {name: where.partition(":")[2] for name, _, where in pairs if where.startswith("gcp:")}
    fetch = "gcloud secrets versions access latest --secret="
    return {name: fetch + shlex.quote(one) for name, one in there.items()}


def _empty() -> bytes:
    return _tar({}, "w:gz")


def _tar(held: dict[str, bytes], mode: Literal["w", "w:gz"]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as tar:
        for name, data in held.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o600
            tar.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()
