"""Start a real Slurm of two nodes on this machine: munge on a private socket, slurmctld, two slurmd."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel")
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])

CONF = """
ClusterName=dovetail
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={controller}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=5
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
NodeName=dta NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=2 State=UNKNOWN
NodeName=dtb NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=2 State=UNKNOWN
PartitionName=low Nodes=dta,dtb Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=60 MaxTime=INFINITE State=UP
PartitionName=high Nodes=dta,dtb PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
"""


class Unable(Exception):
    """Why no cluster can be had here."""


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """The environment in which its commands work. All that it starts ends with it."""
    missing = [name for name in NEEDED if shutil.which(name, path=PATH) is None]
    if missing:
        raise Unable(f"{', '.join(missing)} not installed (Debian: apt-get install slurm-wlm munge)")
    if os.getuid() != 0:
        raise Unable("slurmd starts jobs' steps as root, and these tests do not run as root")
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("state", "spool.dta", "spool.dtb"):
        (folder / name).mkdir()
    environ = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": PATH}
    first, second, controller = _free_ports(3)
    (folder / "slurm.conf").write_text(
        CONF.format(folder=folder, host=socket.gethostname(), user="root", first=first, second=second,
                    controller=controller)
    )  # fmt: skip
    started: list[subprocess.Popen] = []
    try:
        _munge(folder, environ, started)
        for command in (["slurmctld", "-D", "-c"], ["slurmd", "-D", "-N", "dta"], ["slurmd", "-D", "-N", "dtb"]):
            started.append(_start(command, folder, environ))
        _until_idle(environ, started, folder)
        yield {"SLURM_CONF": environ["SLURM_CONF"], "PATH": PATH}
    finally:
        subprocess.run(["scancel", "--state=RUNNING,PENDING", "--user=root"], env=environ, check=False, timeout=30,
                       capture_output=True)  # fmt: skip
        for process in reversed(started):
            process.terminate()
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
            process.kill()
            process.wait()


def _munge(folder: Path, environ: dict[str, str], started: list[subprocess.Popen]) -> None:
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    command = ["munged", "--force", "--foreground", f"--socket={folder}/munge.socket", f"--key-file={key}"]
    command += [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")]
    started.append(_start(command, folder, environ))
    for _ in range(100):
        if (folder / "munge.socket").exists():
            return
        time.sleep(0.05)
    raise Unable(f"munged does not start: {_last_words(folder)}")


def _start(command: list[str], folder: Path, environ: dict[str, str]) -> subprocess.Popen:
    with (folder / "output").open("ab") as output:
        return subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output)


def _until_idle(environ: dict[str, str], started: list[subprocess.Popen], folder: Path) -> None:
    for _ in range(300):
        shown = subprocess.run(["sinfo", "-h", "-N", "-p", "low", "-o", "%N %T"], env=environ, capture_output=True,
                               text=True, check=False)  # fmt: skip
        if sorted(shown.stdout.split()) == ["dta", "dtb", "idle", "idle"]:
            return
        if any(process.poll() is not None for process in started):
            break
        time.sleep(0.1)
    raise Unable(f"slurmd cannot run here: {_last_words(folder)}")


def _last_words(folder: Path) -> str:
    logs = [folder / "output", *folder.glob("*.log")]
    return " | ".join(path.read_text(errors="replace")[-300:].strip() for path in logs if path.exists())


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def until(holds: Callable[[], Any], seconds: float = 60.0) -> Any:
    """What `holds` comes to say."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := holds():
            return found
        time.sleep(0.1)
    raise AssertionError(f"it did not come to be in {seconds} s")


def preempt(seconds: float) -> None:
    """All nodes, by a job of the partition that goes first."""
    wanted = ["--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null"]
    subprocess.run(["sbatch", *wanted, "--wrap", f"srun sleep {seconds}"], check=True, capture_output=True)
