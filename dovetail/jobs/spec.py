"""The spec of a job: a YAML file, or this dataclass. Unknown keys are refused with a suggestion.

    name: llama-1b
    recipe: llama3-1b
    overrides: [steps=20000]
    accelerator: v6e-16
    backend: gcp-tpu
    tier: spot
    zones: [us-east5-b, europe-west4-a]
    ceiling: {dollars: 400}

The same file runs on this machine with `backend: local`, and on a cluster with `backend: slurm`.
"""

from __future__ import annotations

import functools
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dovetail.core import recipe as recipes
from dovetail.core import yaml_text
from dovetail.core.accelerator import Accelerator, parse
from dovetail.core.choice import not_negative, one_of, require
from dovetail.core.errors import MissingFileError

BACKENDS = ("local", "slurm", "gcp-tpu", "gke")
TIERS = ("on-demand", "spot", "flex-start", "reservation")
TRAININGS = ("pretrain", "sft", "dpo", "distill", "reward", "rl", "draft")
SECRETS = ("env", "file", "gcp")


@dataclass(frozen=True)
class EnvironmentSpec:
    """Choose the Python environment of the command: `lock`, `venv`, `conda` or `image`, or the machine's own."""

    lock: str = ""  # a requirements file with exact versions: a venv is made from it, once per digest of the file
    venv: str = ""  # an existing venv
    conda: str = ""  # a conda environment, by name or path
    image: str = ""  # a container image (gke; slurm with pyxis)
    python: str = "python3"  # the interpreter that makes the venv of `lock`
    setup: tuple[str, ...] = ()  # shell lines before the command, on every host

    def __post_init__(self) -> None:
        given = [name for name in ("lock", "venv", "conda", "image") if getattr(self, name)]
        require(len(given) <= 1, f"lock, venv, conda and image exclude each other; got {' and '.join(given)}: keep one")


@dataclass(frozen=True)
class CodeSpec:
    """Configure the copy of the working tree that is made when the job is created; every attempt runs it."""

    path: str = "."  # "": without code; the command runs in the job's own folder
    # Folder of the code in which the command runs. If `path` is in a git repository, `create` copies the whole
    # repository and sets this; `.` copies `path` alone.
    cwd: str = ""
    exclude: tuple[str, ...] = ()  # further patterns, as in .gitignore
    file_mb: float = 20.0  # a larger file is refused: it is data, not code
    total_mb: float = 200.0

    def __post_init__(self) -> None:
        not_negative(self, "file_mb", "total_mb")
        inside = not self.cwd.startswith(("/", "~")) and ".." not in self.cwd.split("/")
        require(inside, f"cwd must be a folder below code.path, such as experiments/a; got {self.cwd!r}", param="cwd")


@dataclass(frozen=True)
class Mount:
    """Mount a bucket (gs://) at `path`."""

    source: str
    path: str
    read_only: bool = False
    region: str = ""  # of the bucket, such as us-east5 or us: used to show the cost of reading it from each zone


@dataclass(frozen=True)
class Retries:
    """Limit how often a job is started again, counted separately by cause."""

    preemptions: int = 1000  # taken away by the backend
    faults: int = 10  # of hosts and networks
    failures: int = 0  # of the program itself
    backoff: float = 10.0  # seconds before the first retry; doubles with each retry in a row, up to `backoff_max`
    backoff_max: float = 900.0

    def __post_init__(self) -> None:
        not_negative(self, "preemptions", "faults", "failures", "backoff", "backoff_max")


@dataclass(frozen=True)
class Ceiling:
    """Set the limits at which a job is stopped, with a signal first so that it saves. 0: no limit."""

    dollars: float = 0.0
    hours: float = 0.0  # running time of all attempts
    grace: float = 120.0  # seconds from the signal to the end

    def __post_init__(self) -> None:
        not_negative(self, "dollars", "hours", "grace")


@dataclass(frozen=True)
class SlurmSpec:
    """Options of sbatch."""

    partition: str = ""
    account: str = ""
    qos: str = ""
    time: str = ""  # in sbatch's format: 2-00:00:00
    gpus_per_node: str = ""  # 8, or h100:8; from the accelerator if not given
    cpus_per_task: int = 0
    mem: str = ""
    tasks_per_node: int = 1
    exclude: str = ""
    constraint: str = ""
    extra: tuple[str, ...] = ()  # further options, such as --reservation=maint


@dataclass(frozen=True)
class GcpSpec:
    """Configure Cloud TPU queued resources."""

    project: str = ""  # $GOOGLE_CLOUD_PROJECT if not given
    runtime: str = ""  # the accelerator's default runtime if not given
    network: str = ""
    subnetwork: str = ""
    service_account: str = ""
    external_ips: bool = True
    wait_hours: float = 0.0  # a request that waits longer is deleted, and the next zone tried; 0: no limit
    ssh_user: str = ""
    bucket: str = ""  # gs://...: for code, logs and results
    labels: tuple[str, ...] = ()  # key=value


@dataclass(frozen=True)
class GkeSpec:
    """Configure a JobSet on a GKE cluster."""

    context: str = ""  # of kubeconfig
    namespace: str = "default"
    queue: str = ""  # Kueue's local queue
    priority: str = ""  # a PriorityClass
    service_account: str = ""
    bucket: str = ""  # gs://...: for code and results
    labels: tuple[str, ...] = ()  # key=value


@dataclass(frozen=True)
class Spec:
    """Describe what to run, where, and within which limits."""

    name: str
    command: str = ""  # a shell line, run in the code's folder by every process
    recipe: str = ""  # instead of a command: a training by its recipe
    training: str = "pretrain"  # with recipe: the kind of training
    overrides: tuple[str, ...] = ()  # with recipe: key=value
    backend: str = "local"
    accelerator: str = ""  # as core.accelerator reads it; "" and cpu: none
    others: tuple[str, ...] = ()  # accelerators to continue on if this one is not available (with recipe)
    slices: int = 1  # `accelerator: 2 x v5p-128` has the same meaning; the two numbers multiply
    hosts: int = 0  # machines (local: processes that imitate them); 0: as many as the accelerator has
    tier: str = "on-demand"
    reservation: str = ""
    zones: tuple[str, ...] = ()  # in order of preference
    environment: EnvironmentSpec = field(default_factory=EnvironmentSpec)
    code: CodeSpec = field(default_factory=CodeSpec)
    mounts: tuple[Mount, ...] = ()
    env: tuple[str, ...] = ()  # NAME=value
    secrets: tuple[str, ...] = ()  # NAME=env:OTHER, NAME=file:PATH or NAME=gcp:SECRET: where each value comes from
    retries: Retries = field(default_factory=Retries)
    ceiling: Ceiling = field(default_factory=Ceiling)
    after: tuple[str, ...] = ()  # jobs that must have succeeded, by id or name; the store keeps the ids
    notify: str = ""  # a shell line, run with DOVETAIL_JOB, DOVETAIL_JOB_NAME and DOVETAIL_JOB_STATUS after the end
    slurm: SlurmSpec = field(default_factory=SlurmSpec)
    gcp: GcpSpec = field(default_factory=GcpSpec)
    gke: GkeSpec = field(default_factory=GkeSpec)

    def __post_init__(self) -> None:
        require(
            bool(re.fullmatch(r"[A-Za-z0-9][\w.-]{0,62}", self.name)),
            f"name must be letters, digits, . _ and -, at most 63; got {self.name!r}",
            param="name",
        )
        require(
            bool(self.command) != bool(self.recipe),
            "command or recipe must be given, and not both: a shell line, or the name of a recipe",
            param="command",
        )
        require(
            bool(self.recipe) or not self.overrides,
            "overrides require a recipe; put them into the command",
            param="overrides",
        )
        one_of("training", self.training, TRAININGS)
        one_of("backend", self.backend, BACKENDS)
        one_of("tier", self.tier, TIERS)
        require(
            (self.tier == "reservation") == bool(self.reservation),
            f"reservation must be given with tier: reservation, and only then; got {self.reservation!r}",
            param="reservation",
        )
        self._check_machines()
        for pair in self.env:
            _check_pair("env", pair)
        for pair in self.secrets:
            kind = _check_pair("secrets", pair).partition(":")
            require(
                bool(kind[1]) and kind[0] in SECRETS,
                f"secrets must say where each value comes from, such as KEY=env:KEY, KEY=file:PATH or KEY=gcp:NAME; "
                f"got {pair.partition('=')[0]}",
                param="secrets",
            )

    def _check_machines(self) -> None:
        for text in (self.accelerator, *self.others):
            parse(text)
        not_negative(self, "hosts")
        require(self.slices >= 1, f"slices must be 1 or more; got {self.slices}", param="slices")
        require(
            not self.others or bool(self.recipe),
            "others requires a recipe: a command may not work with another number of chips",
            param="others",
        )
        if self.backend in ("gcp-tpu", "gke"):
            require(
                self.device.is_tpu,
                f"accelerator must be a TPU for backend {self.backend}; got {self.accelerator!r}",
                param="accelerator",
            )
            require(
                self.hosts in (0, self.device.total_hosts * self.slices),
                f"hosts of {self.slices} x {self.device} is {self.device.total_hosts * self.slices}; got {self.hosts}: "
                "leave it out",
                param="hosts",
            )

    @property
    def device(self) -> Accelerator:
        """Return the parsed accelerator."""
        return parse(self.accelerator)

    @property
    def total_slices(self) -> int:
        """`slices` times the number in the accelerator's name."""
        return self.slices * self.device.slices

    @property
    def processes(self) -> int:
        """Return the number of processes: one per host, over all slices; on Slurm `tasks_per_node` per host."""
        hosts = self.hosts or self.device.total_hosts * self.slices
        return hosts * (self.slurm.tasks_per_node if self.backend == "slurm" else 1)

    @property
    def line(self) -> str:
        """Return the shell line that every process runs. A recipe's run folder is in the job's folder."""
        if self.command:
            return self.command
        words = ["python", "-m", "dovetail", self.training, self.recipe, *self.overrides]
        return f'exec {shlex.join(words)} --run-dir "$DOVETAIL_JOB_DIR/run"'


def _check_pair(field_name: str, pair: str) -> str:
    name, equals, value = pair.partition("=")
    fine = bool(equals) and re.fullmatch(r"[A-Za-z_]\w*", name) is not None
    require(fine, f"{field_name} must be NAME=value each; got {name!r}", param=field_name)
    return value


def load(path: str | Path, overrides: Sequence[str] = ()) -> Spec:
    """Read a YAML file, with key=value overrides."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise MissingFileError(
            f"expected a job's file, such as job.yaml, and there is no {path}; see `dovetail job create -h`",
            param="SPEC",
        )
    return recipes.load(str(file), _typed(overrides), Spec)


@functools.lru_cache(256)  # a supervisor reads the spec of each job again and again
def from_text(text: str) -> Spec:
    """Read the YAML of `to_text`."""
    return recipes.read(Spec, yaml_text.parse(text))


def to_text(spec: Spec) -> str:
    """Return the spec as YAML."""
    return recipes.to_yaml(spec)


def make(given: Mapping[str, Any] | Sequence[str]) -> Spec:
    """Make a spec from a mapping, or from key=value words."""
    return recipes.create(Spec, given if isinstance(given, Mapping) else _typed(given))


def changed(spec: Spec, words: Sequence[str]) -> Spec:
    """Return the spec with key=value changes."""
    pairs = [word.partition("=") for word in _typed(words)]
    for key, equals, _ in pairs:
        require(bool(equals), f"an override is key=value, such as ceiling.dollars=800; got {key!r}", param=key)
        fixed = key.partition(".")[0] in ("name", "backend", "code")
        require(not fixed, f"{key} cannot be changed after a job was created: create another job", param=key)
    return recipes.change(spec, {key: yaml_text.parse(text) if text else "" for key, _, text in pairs})


def _typed(words: Sequence[str]) -> list[str]:
    """Quote the values of shell lines: # and : in them must not be read as YAML."""
    pairs = [(word, *word.partition("=")) for word in words]
    return [f"{key}={json.dumps(text)}" if key in ("command", "notify") else word for word, key, _, text in pairs]
