"""The scripts of an attempt on Slurm: what sbatch is given, and what srun starts for each process."""

from __future__ import annotations

import shlex
from pathlib import Path

from dovetail.core.errors import UserError
from dovetail.jobs.attempt import Attempt
from dovetail.jobs.outcome import PREEMPTED, SIGTERM
from dovetail.jobs.spec import Spec

RESTARTS = "restarts"  # a file: how often Slurm had put the job back when it last began
STOP = "URG"  # a signal that programs ignore, for rank.sh alone
CANCELLED = "cancelled"  # a file: a person ended the job with scancel


def job_name(attempt: Attempt) -> str:
    """The name that squeue shows: it begins with the job's name, and ends with the attempt's, by which it is found."""
    return f"{attempt.spec.name}-{attempt.name}"


def options(attempt: Attempt, comment: str) -> list[str]:
    """Of sbatch. A zone, where the spec names some, is a partition."""
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
        raise UserError(f"accelerator {device} is a TPU, and Slurm has none: use backend gcp-tpu or gke")
    return str(device.chips_per_host)


def batch_script(attempt: Attempt) -> str:
    """Start the processes, and put a job that saved and ended early back into the queue, unless a person cancelled it.

    While a job ends, Slurm shows COMPLETING whatever the cause. At a time limit the reason is TimeLimit, after a
    preemption there is a PreemptTime, and a job that Slurm puts back itself has no EndTime yet: none of these is a
    person's scancel. In a preemption's grace time the state is RUNNING.
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
    # a node's name that nobody can look up: Slurm knows its address
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
    # Slurm puts back what it kills, not what saves and ends before that. Then it ends this script too.
    scontrol requeue "$SLURM_JOB_ID" && sleep 300
fi
exit $code
"""


def rank_script(attempt: Attempt) -> str:
    """One process: its log and its exit code in files of its own.

    Slurm signals the processes of a step one after another. A shell whose command dies first would go on to the next:
    so our own stop is another signal (STOP), at which the whole group gets SIGTERM at once. What ended with 0 while
    Slurm itself ended the step counts as ended by the signal.
    """
    told = {"DOVETAIL_JOB_DIR": str(attempt.home), **attempt.variables}
    if attempt.snapshot:
        told["DOVETAIL_CODE_DIR"] = str(attempt.home / "code")
    exports = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in told.items())
    return f"""#!/bin/sh
told= child=
trap 'told=1' TERM
trap 'told=1; {{ kill -s TERM -- "-$child" || kill -s TERM "$child"; }} 2> /dev/null' {STOP}
folder={shlex.quote(str(attempt.folder))}
exec >> "$folder/rank$SLURM_PROCID.log" 2>&1
{exports}
export DOVETAIL_RANK="$SLURM_PROCID"
if [ -n "$DOVETAIL_COORDINATOR" ]; then export DOVETAIL_PROCESS_ID="$SLURM_PROCID"; fi
setsid sh "$folder/script.sh" & child=$!
[ -z "$told" ] || kill -s TERM "$child"  # told so before there was anything to signal
# a signal interrupts `wait`: only when the child is gone is what it says the child's own code
while :; do wait "$child"; code=$?; kill -0 "$child" 2> /dev/null || break; done
wait "$child" 2> /dev/null; last=$?; [ $last = 127 ] || code=$last
if [ $code = 0 ]; then
    [ -n "$told" ] || sleep 0.2  # the signal that ended a command of it may be on its way to this shell too
    [ -z "$told" ] || code={SIGTERM}
fi
echo $code > "$folder/exit.$SLURM_PROCID.part" && mv "$folder/exit.$SLURM_PROCID.part" "$folder/exit.$SLURM_PROCID"
exit $code
"""


def preview(spec: Spec, root: Path, zone: str) -> tuple[list[str], str]:
    """Return (sbatch and its options, the batch script) of a job that is not created; its id will be another."""
    attempt = Attempt("job", 1, spec, root / "jobs" / "job", "owner", zone)
    return ["sbatch", *options(attempt, "dovetail:owner"), "batch.sh"], batch_script(attempt)
