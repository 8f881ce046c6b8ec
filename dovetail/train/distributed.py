"""Join the processes of a run: their number and addresses come from the environment, so one command works everywhere.

In this order: our own variables, Slurm, TPUs on GKE, a Kubernetes JobSet, torchrun, Open MPI. On a Cloud TPU VM jax
reads the machine's metadata itself. An incomplete or contradictory set of variables is refused: a process that guessed
would wait for the others forever.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dovetail.core.errors import UserError
from dovetail.train.guard.exits import LOST, on_abort

PORT = 8476  # the coordinator's port if the environment names only its host


@dataclass(frozen=True)
class Cluster:
    """Describe one process's place among all. Without a coordinator jax finds the others itself."""

    kind: str
    coordinator: str | None = None  # host:port of process 0
    processes: int | None = None
    index: int | None = None
    local: int | None = None  # its index on its host, if each process there uses one device


def detect(environ: Mapping[str, str]) -> Cluster | None:
    """Return the cluster that the variables describe; None for a single process."""
    for read in (_explicit, _slurm, _gke_tpu, _jobset, _torchrun, _open_mpi):
        cluster = read(environ)
        if cluster is not None:
            return _checked(cluster) if cluster.processes != 1 else None
    return None


def start(environ: Mapping[str, str] | None = None) -> Cluster | None:
    """Join the other processes, once; return None for a single process, without importing jax.

    Call it before anything uses jax's devices.
    """
    cluster = detect(os.environ if environ is None else environ)
    if cluster is None and environ is None and _on_tpu_vm():
        cluster = Cluster("cloud tpu")
    if cluster is None:
        return None
    import jax

    if jax.distributed.is_initialized():
        return cluster
    on_abort(lambda: _not_all_came(cluster))
    jax.config.update("jax_enable_preemption_service", False)  # it would handle SIGTERM in place of train.guard.stop
    if cluster.coordinator is None:
        jax.distributed.initialize()
        return Cluster(cluster.kind, None, jax.process_count(), jax.process_index())
    jax.distributed.initialize(
        coordinator_address=cluster.coordinator,
        num_processes=cluster.processes,
        process_id=cluster.index,
        local_device_ids=None if cluster.local is None else [cluster.local],
    )
    return cluster


def _not_all_came(cluster: Cluster) -> None:
    """Report that processes are missing: jax aborts after waiting five minutes for them."""
    where = f" at {cluster.coordinator}" if cluster.coordinator else ""
    print(
        f"error: the {cluster.processes or ''} processes of the run did not all connect{where}: check that each "
        "was started with its own index, and that this host reaches process 0's",
        file=sys.stderr, flush=True,
    )  # fmt: skip
    os._exit(LOST)


def _on_tpu_vm() -> bool:
    has_chips = Path("/dev/accel0").exists() or Path("/dev/vfio/0").exists()
    return has_chips and importlib.util.find_spec("libtpu") is not None


def _checked(cluster: Cluster) -> Cluster:
    processes, index = cluster.processes, cluster.index
    if processes is not None and (processes < 1 or index is None or not 0 <= index < processes):
        raise UserError(
            f"{cluster.kind}: a process's index must be from 0 to {max(processes - 1, 0)}, because there are "
            f"{processes} processes, got {index}: give each process its own index"
        )
    return cluster


# --- one function per launcher ----------------------------------------------------------------------------------------


def _explicit(env: Mapping[str, str]) -> Cluster | None:
    names = ("DOVETAIL_COORDINATOR", "DOVETAIL_NUM_PROCESSES", "DOVETAIL_PROCESS_ID")
    if not any(env.get(name) for name in names):
        return None
    if _number(env, names[1], 0) == 1:  # a single process, whatever the launcher's variables say
        return Cluster("environment", None, 1, 0)
    _all_of(env, names, "DOVETAIL_COORDINATOR is the host:port of process 0")
    return Cluster("environment", _address(env[names[0]]), _number(env, names[1]), _number(env, names[2]))


def _slurm(env: Mapping[str, str]) -> Cluster | None:
    if "SLURM_PROCID" not in env:  # an allocation without a task: an salloc shell
        return None
    tasks = _number(env, "SLURM_STEP_NUM_TASKS", _number(env, "SLURM_NTASKS", 1))
    if tasks == 1:
        return Cluster("slurm", None, 1, 0)
    if not any(name.startswith("SLURM_STEP") for name in env):
        raise UserError(
            f"slurm: this is the batch script itself, and the job has {tasks} tasks: start it as `srun dovetail ...`, "
            "so that each task is a process (or set DOVETAIL_NUM_PROCESSES=1 for a single process)"
        )
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
    if not nodes:
        raise UserError(
            f"slurm: SLURM_STEP_NODELIST must be set for {tasks} tasks, got none", param="SLURM_STEP_NODELIST"
        )
    # by job, because two jobs may share a node; above the ephemeral ports
    port = 61_000 + _number(env, "SLURM_JOB_ID", 0) % 4_000
    return Cluster("slurm", f"{first_host(nodes)}:{port}", tasks, _number(env, "SLURM_PROCID"), _one_device_each(env))


def _one_device_each(env: Mapping[str, str]) -> int | None:
    """Return the task's GPU if Slurm shows every task all GPUs of its node: tasks take one each, in order."""
    shown = [x for x in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if x]
    on_node = re.match(r"\d+", env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or "1")
    if len(shown) > 1 and on_node and int(on_node[0]) == len(shown):
        return _number(env, "SLURM_LOCALID")
    return None


def first_host(nodes: str) -> str:
    """Return the first host of a node list: `gpu003` of `gpu[003-005,9],login`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes.strip())
    if not first:
        raise UserError(f"slurm: cannot parse the node list {nodes!r}")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])


def _gke_tpu(env: Mapping[str, str]) -> Cluster | None:
    hosts = [host for host in env.get("TPU_WORKER_HOSTNAMES", "").split(",") if host]
    slices = _number(env, "MEGASCALE_NUM_SLICES", 1)
    if not hosts or len(hosts) * slices == 1:
        return None
    needed = ["TPU_WORKER_ID"] + ["MEGASCALE_SLICE_ID", "MEGASCALE_COORDINATOR_ADDRESS"] * (slices > 1)
    _all_of(env, needed, f"TPU_WORKER_HOSTNAMES lists {len(hosts)} hosts, in {slices} slices")
    first = env["MEGASCALE_COORDINATOR_ADDRESS"].partition(":")[0] if slices > 1 else hosts[0]
    index = _number(env, "TPU_WORKER_ID") + len(hosts) * _number(env, "MEGASCALE_SLICE_ID", 0)
    return Cluster("gke", f"{first}:{PORT}", len(hosts) * slices, index)


def _jobset(env: Mapping[str, str]) -> Cluster | None:
    """Read a Kubernetes JobSet: an indexed Job sets the pod's index; the manifest must set number and address."""
    if "JOB_COMPLETION_INDEX" not in env or ("JAX_COORDINATOR_ADDRESS" not in env and "JOBSET_NAME" not in env):
        return None
    where = "set JAX_COORDINATOR_ADDRESS (the first pod's address) and JAX_NUM_PROCESSES in the pod's manifest"
    _all_of(env, ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES"), where)
    processes = _number(env, "JAX_NUM_PROCESSES")
    index = _number(env, "JAX_PROCESS_ID", _number(env, "JOB_COMPLETION_INDEX"))
    return Cluster("kubernetes", _address(env["JAX_COORDINATOR_ADDRESS"]), processes, index)


def _torchrun(env: Mapping[str, str]) -> Cluster | None:
    names = ("MASTER_ADDR", "WORLD_SIZE", "RANK")
    if "WORLD_SIZE" not in env or ("RANK" not in env and "MASTER_ADDR" not in env):
        return None
    _all_of(env, names, "torchrun sets them all")
    # torchrun uses the port itself; the next one is likely free
    port = _number(env, "MASTER_PORT", PORT - 1) + 1
    local = _number(env, "LOCAL_RANK") if _number(env, "LOCAL_WORLD_SIZE", 1) > 1 else None
    return Cluster("torchrun", f"{env['MASTER_ADDR']}:{port}", _number(env, "WORLD_SIZE"), _number(env, "RANK"), local)


def _open_mpi(env: Mapping[str, str]) -> Cluster | None:
    names = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")
    if not any(name in env for name in names):
        return None
    _all_of(env, names, "mpirun sets both")
    processes = _number(env, names[0])
    if processes == 1:
        return Cluster("open mpi", None, 1, 0)
    host = env.get("MASTER_ADDR") or _mpirun_host(env.get("OMPI_MCA_orte_hnp_uri", ""))
    if not host:
        raise UserError(
            f"open mpi: {processes} processes, and the host of rank 0 is not known: "
            "pass `-x MASTER_ADDR=host` to mpirun",
            param="MASTER_ADDR",
        )
    return Cluster("open mpi", f"{host}:{PORT}", processes, _number(env, names[1]))


def _mpirun_host(uri: str) -> str | None:
    """Return the host of mpirun: `10.96.0.1` of `1531576320.0;tcp://10.96.0.1,10.148.0.1:34911`."""
    found = re.search(r"tcp://([^,:;]+)", uri)
    return found[1] if found else None


# --- reading variables ------------------------------------------------------------------------------------------------


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name, "")
    if not text and default is not None:
        return default
    if not text.strip().isdecimal():
        raise UserError(f"`{name}` must be a whole number, got {text!r}", param=name)
    return int(text)


def _all_of(env: Mapping[str, str], names, why: str) -> None:
    missing = [name for name in names if not env.get(name)]
    if missing:
        raise UserError(f"{', '.join(missing)} missing beside {_present(env, names)}: {why}", param=missing[0])


def _present(env: Mapping[str, str], names) -> str:
    return ", ".join(f"{name}={env[name]}" for name in names if env.get(name)) or "the others"


def _address(text: str) -> str:
    """Return host:port, with our port if only a host is given."""
    host, colon, port = text.rpartition(":")
    if not colon:
        return f"{text}:{PORT}"
    if not host or not port.isdecimal():
        raise UserError(f"the coordinator must be host:port, such as node0:{PORT}, got {text!r}")
    return text
