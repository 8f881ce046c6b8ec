"""Test how a run finds its processes from launchers' variables; only the last test starts jax."""

import socket
import subprocess
import sys

import pytest
from refusals import refuses

from dovetail.train.distributed import PORT, Cluster, detect, first_host

SLURM = {
    "SLURM_JOB_ID": "4242", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[007-008]", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}  # fmt: skip
GKE = {"TPU_WORKER_HOSTNAMES": "w-0.x,w-1.x", "TPU_WORKER_ID": "1"}
SLICES = {"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1", "MEGASCALE_COORDINATOR_ADDRESS": "w-0.y:8080"}
TORCHRUN = {"MASTER_ADDR": "head", "MASTER_PORT": "29500", "WORLD_SIZE": "8", "RANK": "5"}
MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
OURS = {"DOVETAIL_COORDINATOR": "node0:1234", "DOVETAIL_NUM_PROCESSES": "2", "DOVETAIL_PROCESS_ID": "0"}
JOBSET = {"JOB_COMPLETION_INDEX": "2", "JAX_COORDINATOR_ADDRESS": "train-0-0.train", "JAX_NUM_PROCESSES": "4"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (OURS, Cluster("environment", "node0:1234", 2, 0)),
        ({**OURS, "DOVETAIL_COORDINATOR": "node0"}, Cluster("environment", f"node0:{PORT}", 2, 0)),
        (SLURM, Cluster("slurm", "gpu007:61242", 4, 3)),
        ({**SLURM, "CUDA_VISIBLE_DEVICES": "0,1"}, Cluster("slurm", "gpu007:61242", 4, 3, local=1)),
        ({**SLURM, "CUDA_VISIBLE_DEVICES": "1"}, Cluster("slurm", "gpu007:61242", 4, 3)),
        (GKE, Cluster("gke", f"w-0.x:{PORT}", 2, 1)),
        ({**GKE, **SLICES}, Cluster("gke", f"w-0.y:{PORT}", 4, 3)),
        (JOBSET, Cluster("kubernetes", f"train-0-0.train:{PORT}", 4, 2)),
        (TORCHRUN, Cluster("torchrun", "head:29501", 8, 5)),
        (
            {**TORCHRUN, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"},
            Cluster("torchrun", "head:29501", 8, 5, local=1),
        ),
        ({**MPI, "MASTER_ADDR": "head"}, Cluster("open mpi", f"head:{PORT}", 2, 1)),
        (
            {**MPI, "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"},
            Cluster("open mpi", f"10.96.0.1:{PORT}", 2, 1),
        ),
        ({**SLURM, **OURS}, Cluster("environment", "node0:1234", 2, 0)),
    ],
)
def test_launchers_are_detected(environ, expected):
    assert detect(environ) == expected


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"},  # a shell of salloc
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
        {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"},
        {"JOB_COMPLETION_INDEX": "0"},  # an indexed Job of one pod
        {**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"},
        {**MPI, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        {**SLURM, "DOVETAIL_NUM_PROCESSES": "1"},
    ],
)
def test_a_single_process(environ):
    assert detect(environ) is None


@pytest.mark.parametrize(
    ("environ", "param", "naming"),
    [
        ({"DOVETAIL_COORDINATOR": "a:1"}, "DOVETAIL_NUM_PROCESSES", "DOVETAIL_PROCESS_ID"),
        ({**OURS, "DOVETAIL_PROCESS_ID": "2"}, None, "from 0 to 1"),
        ({**OURS, "DOVETAIL_NUM_PROCESSES": "two"}, "DOVETAIL_NUM_PROCESSES", "'two'"),
        ({**OURS, "DOVETAIL_COORDINATOR": "node0:http"}, None, "'node0:http'"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "1"}, None, "srun dovetail"),
        ({k: v for k, v in SLURM.items() if "NODELIST" not in k}, "SLURM_STEP_NODELIST", ""),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, "TPU_WORKER_ID", ""),
        ({**GKE, "MEGASCALE_NUM_SLICES": "2"}, "MEGASCALE_SLICE_ID", "MEGASCALE_COORDINATOR_ADDRESS"),
        ({"JOB_COMPLETION_INDEX": "0", "JOBSET_NAME": "t"}, "JAX_COORDINATOR_ADDRESS", ""),
        ({"WORLD_SIZE": "8", "RANK": "1"}, "MASTER_ADDR", "WORLD_SIZE=8, RANK=1"),
        ({**TORCHRUN, "RANK": "8"}, None, "from 0 to 7"),
        (MPI, "MASTER_ADDR", ""),
    ],
)
def test_partial_or_wrong_variables_are_refused(environ, param, naming):
    with refuses(param, naming=naming):
        detect(environ)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("n1", "n1"), ("gpu[003-005,9],login", "gpu003"), ("a-1,b[2-3]", "a-1"), ("rack[1-2]node[07-09]", "rack1node07")],
)
def test_the_first_host_of_a_slurm_list(nodes, host):
    assert first_host(nodes) == host


CHILD = """
import jax
jax.config.update("jax_platforms", "cpu")
from dovetail.train.distributed import start
cluster = start()
start()  # a second call changes nothing
print(cluster.kind, jax.process_index(), jax.process_count(), len(jax.devices()))
"""


@pytest.mark.slow
def test_two_processes_find_each_other():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    import os

    base = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    ours = {"DOVETAIL_COORDINATOR": f"127.0.0.1:{port}", "DOVETAIL_NUM_PROCESSES": "2"}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD], env={**base, **ours, "DOVETAIL_PROCESS_ID": str(i)}, stdout=subprocess.PIPE
        )
        for i in range(2)
    ]
    try:
        outputs = [child.communicate(timeout=120)[0].decode().split() for child in children]
    finally:
        for child in children:
            child.kill()
    assert outputs == [["environment", "0", "2", "2"], ["environment", "1", "2", "2"]]
