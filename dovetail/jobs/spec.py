"""What a job is, before it is one: a YAML file or this dataclass. Unknown keys are refused with a suggestion.

    name: llama-1b
    recipe: llama3-1b
    overrides: [steps=20000]
    accelerator: v6e-16
    backend: gcp-tpu
    tier: spot
    zones: [us-east5-b, europe-west4-a]
    ceiling: {dollars: 400}

The same file runs here with `backend: local`, and on a cluster with `backend: slurm`.
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
from dovetail.core.errors import UserError

BACKENDS = ("local", "slurm", "gcp-tpu", "gke")
TIERS = ("on-demand", "spot", "flex-start", "reservation")
TRAININGS = ("pretrain", "sft", "dpo", "distill", "reward", "rl")
SECRETS = ("env", "file", "gcp")


@dataclass(frozen=True)
class Environment:
    """What Python the command finds: one of the three, or the one that is there."""

    lock: str = ""  # a requirements file with exact versions: a venv is made of it once per digest of the file
    venv: str = ""  # a venv that is there already
    conda: str = ""  # a conda environment, by name or path
    image: str = ""  # a container image (gke; slurm with pyxis)
    python: str = "python3"  # that makes the venv
    setup: tuple[str, ...] = ()  # lines of sh before the command, on every host

    def __post_init__(self) -> None:
        given = [name for name in ("lock", "venv", "conda", "image") if getattr(self, name)]
        require(len(given) <= 1, f"lock, venv, conda and image exclude each other; got {' and '.join(given)}: keep one")


@dataclass(frozen=True)
class Code:
    """The working tree as it is at the job's creation; every attempt runs that."""

    path: str = "."  # "": no code is taken along, and the command runs in the job's own folder
    # Folder of the code in which the command runs. If `path` lies in a git repository, `create` takes the whole of it
    # and sets this; `.` takes `path` alone.
    cwd: str = ""
    exclude: tuple[str, ...] = ()  # more patterns, as .gitignore has them
    file_mb: float = 20.0  # a larger file is refused: it is data, not code
    total_mb: float = 200.0

    def __post_init__(self) -> None:
        not_negative(self, "file_mb", "total_mb")
        inside = not self.cwd.startswith(("/", "~")) and ".." not in self.cwd.split("/")
        require(inside, f"cwd must be a folder below code.path, such as experiments/a; got {self.cwd!r}")


@dataclass(frozen=True)
class Mount:
    """A bucket (gs://) or folder that the command finds at `path`."""

    source: str
    path: str
    read_only: bool = False
    region: str = ""  # of the bucket, such as us-east5 or us: what reading it from each zone costs is then shown


@dataclass(frozen=True)
class Retries:
    """How often a job is started again, counted apart by whose fault it was."""

    preemptions: int = 1000  # they say nothing about the job
    faults: int = 10  # hosts and networks
    failures: int = 0  # the program's own
    backoff: float = 10.0  # seconds before the first retry; doubles with each in a row, up to:
    backoff_max: float = 900.0

    def __post_init__(self) -> None:
        not_negative(self, "preemptions", "faults", "failures", "backoff", "backoff_max")


@dataclass(frozen=True)
class Ceiling:
    """Where work stops, with a signal first so that it saves. 0: no ceiling."""

    dollars: float = 0.0
    hours: float = 0.0  # of running, over all attempts
    grace: float = 120.0  # seconds from the signal to the end

    def __post_init__(self) -> None:
        not_negative(self, "dollars", "hours", "grace")


@dataclass(frozen=True)
class Slurm:
    """Words of sbatch."""

    partition: str = ""
    account: str = ""
    qos: str = ""
    time: str = ""  # as sbatch takes it: 2-00:00:00
    gpus_per_node: str = ""  # 8, or h100:8; from the accelerator if not given
    cpus_per_task: int = 0
    mem: str = ""
    tasks_per_node: int = 1
    exclude: str = ""
    constraint: str = ""
    extra: tuple[str, ...] = ()  # whole options, such as --reservation=maint


@dataclass(frozen=True)
class Gcp:
    """Cloud TPU queued resources."""

    project: str = ""  # $GOOGLE_CLOUD_PROJECT if not given
    runtime: str = ""  # the accelerator's usual one if not given
    network: str = ""
    subnetwork: str = ""
    service_account: str = ""
    external_ips: bool = True
    wait_hours: float = 0.0  # a request still waiting after that is given back, and the next zone tried; 0: no limit
    ssh_user: str = ""
    bucket: str = ""  # gs://...: where code, logs and results lie
    labels: tuple[str, ...] = ()  # key=value


@dataclass(frozen=True)
class Gke:
    """A JobSet on a cluster."""

    context: str = ""  # of kubeconfig
    namespace: str = "default"
    queue: str = ""  # Kueue's local queue
    priority: str = ""  # a PriorityClass
    service_account: str = ""
    bucket: str = ""  # gs://...: where code and results lie
    labels: tuple[str, ...] = ()  # key=value


@dataclass(frozen=True)
class Spec:
    name: str
    command: str = ""  # a line of sh, run in the code's folder by every process
    recipe: str = ""  # or a training by its recipe
    training: str = "pretrain"  # with recipe: which of the trainings
    overrides: tuple[str, ...] = ()  # with recipe: key=value
    backend: str = "local"
    accelerator: str = ""  # as core.accelerator reads it; "" and cpu: none
    others: tuple[str, ...] = ()  # accelerators to go on with where this one is not to be had (recipes resume on any)
    slices: int = 1  # `accelerator: 2 x v5p-128` says the same; both together multiply
    hosts: int = 0  # machines (local: processes that imitate them); 0: as many as the accelerator has
    tier: str = "on-demand"
    reservation: str = ""
    zones: tuple[str, ...] = ()  # in order of preference
    environment: Environment = field(default_factory=Environment)
    code: Code = field(default_factory=Code)
    mounts: tuple[Mount, ...] = ()
    env: tuple[str, ...] = ()  # NAME=value
    secrets: tuple[str, ...] = ()  # NAME=env:OTHER, NAME=file:PATH or NAME=gcp:SECRET: where each value is
    retries: Retries = field(default_factory=Retries)
    ceiling: Ceiling = field(default_factory=Ceiling)
    after: tuple[str, ...] = ()  # jobs that must have succeeded, by id or name; the ids are what is stored
    notify: str = ""  # a line of sh, run with DOVETAIL_JOB, DOVETAIL_JOB_NAME and DOVETAIL_JOB_STATUS when it has ended
    slurm: Slurm = field(default_factory=Slurm)
    gcp: Gcp = field(default_factory=Gcp)
    gke: Gke = field(default_factory=Gke)

    def __post_init__(self) -> None:
        require(
            bool(re.fullmatch(r"[A-Za-z0-9][\w.-]{0,62}", self.name)),
            f"name must be letters, digits, . _ and -, at most 63; got {self.name!r}",
        )
        require(
            bool(self.command) != bool(self.recipe),
            "command or recipe must be given, and not both: a line of sh, or a recipe's name",
        )
        require(bool(self.recipe) or not self.overrides, "overrides belong to a recipe; put them into the command")
        one_of("training", self.training, TRAININGS)
        one_of("backend", self.backend, BACKENDS)
        one_of("tier", self.tier, TIERS)
        require(
            (self.tier == "reservation") == bool(self.reservation),
            f"reservation must be named with tier: reservation, and only then; got {self.reservation!r}",
        )
        self._check_machines()
        for pair in self.env:
            _check_pair("env", pair)
        for pair in self.secrets:
            kind = _check_pair("secrets", pair).partition(":")
            require(
                bool(kind[1]) and kind[0] in SECRETS,
                f"secrets must say where each value is, such as KEY=env:KEY, KEY=file:PATH or KEY=gcp:NAME; got "
                f"{pair.partition('=')[0]}",
            )

    def _check_machines(self) -> None:
        for text in (self.accelerator, *self.others):
            parse(text)
        not_negative(self, "hosts")
        require(self.slices >= 1, f"slices must be 1 or more; got {self.slices}")
        require(
            not self.others or bool(self.recipe),
            "others needs a recipe: a command is not known to go on with another number of chips",
        )
        if self.backend in ("gcp-tpu", "gke"):
            require(
                self.device.is_tpu, f"accelerator must be a TPU for backend {self.backend}; got {self.accelerator!r}"
            )
            require(
                self.hosts in (0, self.device.total_hosts * self.slices),
                f"hosts of {self.slices} x {self.device} is {self.device.total_hosts * self.slices}; got {self.hosts}: "
                "leave it out",
            )

    @property
    def device(self) -> Accelerator:
        return parse(self.accelerator)

    @property
    def processes(self) -> int:
        """One for each host, over all slices; on Slurm as many as tasks_per_node says."""
        hosts = self.hosts or self.device.total_hosts * self.slices
        return hosts * (self.slurm.tasks_per_node if self.backend == "slurm" else 1)

    @property
    def line(self) -> str:
        """What every process runs, as a line of sh. A recipe's run is kept in the job's folder over all attempts."""
        if self.command:
            return self.command
        words = ["python", "-m", "dovetail", self.training, self.recipe, *self.overrides]
        return f'exec {shlex.join(words)} --run-dir "$DOVETAIL_JOB_DIR/run"'


def _check_pair(field_name: str, pair: str) -> str:
    name, equals, value = pair.partition("=")
    fine = bool(equals) and re.fullmatch(r"[A-Za-z_]\w*", name) is not None
    require(fine, f"{field_name} must be NAME=value each; got {name!r}")
    return value


def load(path: str | Path, overrides: Sequence[str] = ()) -> Spec:
    """From a YAML file, with key=value on top."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(f"expected a job's file, such as job.yaml, and there is no {path}; `dovetail job create -h`")
    return recipes.load(str(file), _typed(overrides), Spec)


@functools.lru_cache(256)
def from_text(text: str) -> Spec:
    """A supervisor reads each job's time and again."""
    return recipes.read(Spec, yaml_text.parse(text))


def to_text(spec: Spec) -> str:
    return recipes.to_yaml(spec)


def make(given: Mapping[str, Any] | Sequence[str]) -> Spec:
    """From values alone: a mapping, or key=value as they are typed."""
    return recipes.create(Spec, given if isinstance(given, Mapping) else _typed(given))


def changed(spec: Spec, words: Sequence[str]) -> Spec:
    """With key=value on top."""
    pairs = [word.partition("=") for word in _typed(words)]
    for key, equals, _ in pairs:
        require(bool(equals), f"an override is key=value, such as ceiling.dollars=800; got {key!r}")
        require(key.partition(".")[0] not in ("name", "backend", "code"), f"{key} cannot change any more: create a job")
    return recipes.change(spec, {key: yaml_text.parse(text) if text else "" for key, _, text in pairs})


def _typed(words: Sequence[str]) -> list[str]:
    """Lines of sh are taken as they were typed: what follows a # or a colon in them is not YAML's."""
    pairs = [(word, *word.partition("=")) for word in words]
    return [f"{key}={json.dumps(text)}" if key in ("command", "notify") else word for word, key, _, text in pairs]
