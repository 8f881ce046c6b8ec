"""The options and scripts of an attempt on Slurm, and whether the cluster can satisfy them."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from dovetail.core.errors import UnsupportedError, UserError
from dovetail.jobs.job import Attempt
from dovetail.jobs.outcome import PREEMPTED, SIGTERM
from dovetail.jobs.spec import Spec

RESTARTS = "restarts"  # a file: how often Slurm had requeued the job when it last began
STOP = "URG"  # a signal that programs ignore, for rank.sh alone
CANCELLED = "cancelled"  # a file: a person ended the job with scancel
ASK_S = 30.0
# Refusals that do not go away with time, unlike nodes that are down or busy, or a controller that is away.
NEVER = ("configuration is not available", "invalid", "not permitted", "violates", "more processors requested")


def job_name(attempt: Attempt) -> str:
    """Return the name that squeue shows: it begins with the job's name and ends with the attempt's."""
    return f"{attempt.spec.name}-{attempt.name}"


def options(attempt: Attempt, comment: str) -> list[str]:
    """Return the options of sbatch. The spec's zones are partitions."""
    spec, slurm, folder = attempt.spec, attempt.spec.slurm, attempt.folder
    nodes = spec.processes // slurm.tasks_per_node
    given = {
        "job-name": job_name(attempt), "comment": comment,
        "output": str(folder / "batch.log"), "chdir": str(attempt.home),
        "nodes": nodes, "ntasks": spec.processes, "ntasks-per-node": slurm.tasks_per_node, "export": "ALL",
        "partition": attempt.zone or slurm.partition, "account": slurm.account, "qos": slurm.qos, "time": slurm.time,
        "cpus-per-task": slurm.cpus_per_task, "mem": slurm.mem, "gpus-per-node": gpus(spec),
        "exclude": ",".join(filter(None, (slurm.exclude, *attempt.exclude))), "constraint": slurm.constraint,
        "reservation": spec.reservation,
    }  # fmt: skip
    words = [f"--{name}={value}" for name, value in given.items() if value]
    return [*words, "--requeue", "--open-mode=append", *slurm.extra]


def gpus(spec: Spec) -> str:
    """Return sbatch's `--gpus-per-node`; "" for none."""
    device = spec.device
    if spec.slurm.gpus_per_node or device.chip is None:
        return spec.slurm.gpus_per_node
    if device.is_tpu:
        raise UnsupportedError(
            f"`accelerator` {device} is a TPU, which Slurm does not have: use backend gcp-tpu or gke",
            param="accelerator",
        )
    return str(device.chips_per_host)


def batch_script(attempt: Attempt) -> str:
    """Return the script that starts the processes and requeues a job that saved and ended early.

    A job that a person cancelled is not requeued. While a job ends, Slurm shows COMPLETING whatever the cause. After a
    time limit the reason is TimeLimit, after a preemption there is a PreemptTime, and a job that Slurm requeues itself
    has no EndTime yet: none of these is a person's scancel. In a preemption's grace time the state is RUNNING.
    """
    folder = shlex.quote(str(attempt.folder))
    image = attempt.spec.environment.image
    words = ["srun", "--kill-on-bad-exit=0", *([f"--container-image={image}"] if image else [])]
    return f"""#!/bin/sh
trap : TERM
folder={folder}
rm -f "$folder"/exit.* "$folder/{CANCELLED}"
echo "${{SLURM_RESTART_COUNT:-0}}" > "$folder/{RESTARTS}.part" && mv "$folder/{RESTARTS}.part" "$folder/{RESTARTS}"
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
if [ "$SLURM_NTASKS" -gt 1 ] && ! getent hosts "$first" > /dev/null; then
    # the node's name cannot be resolved, but Slurm knows its address
    address=$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')
    export DOVETAIL_COORDINATOR="$address:$((61000 + SLURM_JOB_ID % 4000))"
    export DOVETAIL_NUM_PROCESSES="$SLURM_NTASKS"
fi
{shlex.join(words)} sh "$folder/rank.sh"
code=$?
shown=" $(scontrol show job -o "$SLURM_JOB_ID") "
case $shown in
*" PreemptTime=2"* | *" EndTime=Unknown "*) ;;
*" JobState=CANCELLED "* | *" JobState=COMPLETING Reason=None "*) : > "$folder/{CANCELLED}" ;;
esac
if grep -qx {PREEMPTED} "$folder"/exit.* && [ ! -e "$folder/stop" ] && [ ! -e "$folder/{CANCELLED}" ]; then
    # Slurm requeues jobs that it kills, but not those that save and end before. The requeue ends this script too.
    scontrol requeue "$SLURM_JOB_ID" && sleep 300
fi
exit $code
"""


def rank_script(attempt: Attempt) -> str:
    """Return the script of one process, which writes its log and its exit code to files.

    Slurm signals the processes of a step one after another, and a shell whose command dies first would run its next
    command. So our own stop is another signal (STOP), on which the whole group gets SIGTERM at once. An exit code of 0
    while Slurm itself ended the step counts as ended by the signal.
    """
    variables = {"DOVETAIL_JOB_DIR": str(attempt.home), **attempt.variables}
    if attempt.snapshot:
        variables["DOVETAIL_CODE_DIR"] = str(attempt.home / "code")
    exports = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in variables.items())
    return f"""#!/bin/sh
signalled= child=
trap 'signalled=1' TERM
trap 'signalled=1; {{ kill -s TERM -- "-$child" || kill -s TERM "$child"; }} 2> /dev/null' {STOP}
folder={shlex.quote(str(attempt.folder))}
exec >> "$folder/rank$SLURM_PROCID.log" 2>&1
{exports}
export DOVETAIL_RANK="$SLURM_PROCID"
if [ -n "$DOVETAIL_COORDINATOR" ]; then export DOVETAIL_PROCESS_ID="$SLURM_PROCID"; fi
setsid sh "$folder/script.sh" & child=$!
[ -z "$signalled" ] || kill -s TERM "$child"  # the signal came before there was a process
# a signal interrupts `wait`: its code is the child's own only once the child is gone
while :; do wait "$child"; code=$?; kill -0 "$child" 2> /dev/null || break; done
wait "$child" 2> /dev/null; last=$?; [ $last = 127 ] || code=$last
if [ $code = 0 ]; then
    [ -n "$signalled" ] || sleep 0.2  # the signal that ended its command may reach this shell later
    [ -z "$signalled" ] || code={SIGTERM}
fi
echo $code > "$folder/exit.$SLURM_PROCID.part" && mv "$folder/exit.$SLURM_PROCID.part" "$folder/exit.$SLURM_PROCID"
exit $code
"""


def preview(spec: Spec, root: Path, zone: str) -> tuple[list[str], str]:
    """Return (sbatch with its options, the batch script) of a job that is not created; its id will be another."""
    attempt = Attempt("job", 1, spec, root / "jobs" / "job", "owner", zone)
    return ["sbatch", *options(attempt, "dovetail:owner"), "batch.sh"], batch_script(attempt)


def check_request(spec: Spec) -> str:
    """Ask `sbatch --test-only` whether the cluster can satisfy the request; return a note, or "".

    Raise UserError with sbatch's reason if it never can. `zones` are partitions to try in turn: all are checked.
    """
    if shutil.which("sbatch") is None:
        return ""  # the backend's own check reports it
    for zone in spec.zones or ("",):
        reason = _refusal(options(Attempt("job", 1, spec, Path.cwd(), "owner", zone), "dovetail"))
        if any(word in reason.lower() for word in NEVER):
            where = f" in partition {zone or spec.slurm.partition}" if zone or spec.slurm.partition else ""
            raise UserError(
                f"Slurm cannot satisfy this request{where} ({_summary(spec)}): {reason}",
                param="slurm",
                code="slurm_refused",
            )
        if reason:
            return f"not checked with Slurm: {reason}"
    return ""


def _summary(spec: Spec) -> str:
    slurm = spec.slurm
    words = {"cpus_per_task": slurm.cpus_per_task, "mem": slurm.mem, "gpus_per_node": slurm.gpus_per_node,
             "constraint": slurm.constraint, "time": slurm.time}  # fmt: skip
    nodes = spec.processes // slurm.tasks_per_node
    return ", ".join([f"{nodes} nodes" if nodes > 1 else "1 node", *(f"{k} {v}" for k, v in words.items() if v)])


def _refusal(words: Sequence[str]) -> str:
    """Return the refusal of sbatch; "" if it would accept the request."""
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
