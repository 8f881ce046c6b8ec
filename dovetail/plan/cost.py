"""Price a training run: time and dollars from the seconds of its step, and the storage of its checkpoints and data.

A checkpoint is the state: master weights, optimizer moments, and the average of weights if one is kept. Every host
writes the part that only its devices hold, and reads what its devices hold.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dovetail.core.cloud import CLASS_A, CLASS_B, PIECE_MB, per_gb, region, storage
from dovetail.core.errors import UserError
from dovetail.core.training import Mesh, Training
from dovetail.models.config import ModelConfig
from dovetail.plan.train_memory import BYTES, Shape, moments_of, mtp_layers, shapes_of

DAY = 86_400.0
HOUR = 3_600.0
# (unit, its seconds, the number of units from which the next unit is used); then years
UNITS = (("seconds", 1.0, 120), ("minutes", 60.0, 120), ("hours", HOUR, 48), ("days", DAY, 1000))
YEAR = 365.25 * DAY


def unit_of(seconds: float) -> tuple[str, float]:
    """Return the unit to show a time in, and its seconds."""
    fits = ((name, each) for name, each, most in UNITS if seconds < most * each)
    return next(fits, ("years", YEAR))


@dataclass(frozen=True)
class Cost:
    """Hold the cost of a whole run, without evaluation, checkpoints, failures and waiting for machines."""

    seconds: float
    dollars: float | None  # None: no price is published
    spot: float | None

    @property
    def days(self) -> float:
        """Return the time of the run in days."""
        return self.seconds / DAY


def cost(seconds: float, chips: int, price: float | None, spot: float | None) -> Cost:
    """Return the cost of `seconds` on `chips` chips. `price` and `spot`: dollars per chip and hour."""
    chip_hours = chips * seconds / HOUR
    on_demand, cheaper = (None if each is None else each * chip_hours for each in (price, spot))
    return Cost(seconds, on_demand, cheaper)


# --- storage ----------------------------------------------------------------------------------------------------------

GB = 1e9
HOST_GB_A_SECOND = 1.0  # default bandwidth between a bucket and one host: an assumption, not a measurement
FILE_MB = 100  # approximate size of a checkpoint's files; each is one write
SMALL_VOCAB = 1 << 16  # up to this vocabulary a token takes two bytes on disk (data.tokenise)


@dataclass(frozen=True)
class Storage:
    """Hold the storage of a whole training run."""

    state: int  # bytes of a checkpoint
    export: int  # bytes of the weights alone, in bf16
    data: int  # bytes of the tokens
    saves: int
    kept: int  # checkpoints that exist at a time
    save_seconds: float  # of one checkpoint, on all hosts at once
    restore_seconds: float
    month: float  # dollars per month for what is kept
    operations: float  # dollars for writes and reads
    carried: float  # dollars for traffic between regions
    warning: str = ""

    @property
    def dollars(self) -> float:
        """Return the dollars of the run with one month of storage."""
        return self.month + self.operations + self.carried


def plan_storage(
    cfg: ModelConfig,
    settings: Training,
    *,
    hosts: int = 1,
    devices_per_host: int = 1,
    mesh: Mesh | None = None,
    bandwidth: float = HOST_GB_A_SECOND * GB,
    tokens: int = 0,
    epochs: float = 1.0,
    bucket: str = "",
    zone: str = "",
) -> Storage:
    """Return the storage of a run.

    Args:
        cfg: The model.
        settings: The recipe.
        hosts: The number of hosts.
        devices_per_host: jax devices of each.
        mesh: The mesh of the run; None: every host reads an equal part of the state.
        bandwidth: Bytes per second between each host and the checkpoints' storage.
        tokens: Tokens of the data; 0: as many as the run reads.
        epochs: Passes over the data, if `tokens` is given.
        bucket: The bucket's region.
        zone: The zone of the machines; the price of traffic needs both.

    Raises:
        UserError: `hosts` or `bandwidth` is not positive.
    """
    if hosts < 1:
        raise UserError(f"`hosts` must be at least 1, got {hosts}", param="hosts")
    if bandwidth <= 0:
        raise UserError(f"`bandwidth` must be above 0 bytes/s, got {bandwidth:g}", param="bandwidth")
    state, run = state_bytes(cfg, settings), settings.total_steps * settings.tokens_per_step
    data = (tokens or run) * token_bytes(cfg.vocab)
    read = data * (epochs if tokens else 1.0)
    saves = settings.total_steps // settings.checkpoint.every if settings.checkpoint.every else 1
    kept = min(saves, settings.checkpoint.keep) + _forever(settings)
    pieces = PIECE_MB * 1e6
    ops = saves * math.ceil(state / FILE_MB / 1e6) * CLASS_A + math.ceil(read / pieces) * CLASS_B
    each = per_gb(bucket, zone) if bucket and zone else 0.0
    return Storage(
        state=state, export=2 * _weights(cfg, settings), data=data, saves=saves, kept=kept,
        save_seconds=state / hosts / bandwidth,
        restore_seconds=_held_by_host(state, mesh, hosts, devices_per_host) / bandwidth,
        month=storage((kept * state + data) / GB, bucket), operations=ops,
        carried=each * (read + saves * state) / GB, warning=_warning(bucket, zone, each, read, saves * state),
    )  # fmt: skip


def state_bytes(cfg: ModelConfig, settings: Training) -> int:
    """Return the bytes of one checkpoint."""
    weights, moments = 0, 0
    for shape, count in _shapes(cfg, settings).items():
        size = math.prod(shape[0])
        weights += size * count
        moments += moments_of(settings.optimizer.name, shape, size) * count
    average = 4 * weights if settings.ema else 0
    return weights * BYTES[settings.precision.params] + 4 * moments + average


def token_bytes(vocab: int) -> int:
    """Return the bytes of one token on disk."""
    return 2 if vocab <= SMALL_VOCAB else 4


def _weights(cfg: ModelConfig, settings: Training) -> int:
    return sum(math.prod(shape[0]) * count for shape, count in _shapes(cfg, settings).items())


def _shapes(cfg: ModelConfig, settings: Training) -> dict[Shape, int]:
    return shapes_of(cfg, mtp_layers(cfg, settings), settings.step_models.adapter)


def _forever(settings: Training) -> int:
    """Return the number of checkpoints that are never deleted."""
    every = settings.checkpoint.keep_every
    return settings.total_steps // every if every else 0


def _held_by_host(state: int, mesh: Mesh | None, hosts: int, devices: int) -> float:
    """Return the bytes of the state on one host's devices: all of it if the host has as many as it is split over."""
    if mesh is None:
        return state / hosts
    split = math.prod(max(1, getattr(mesh, name)) for name in ("fsdp", "expert", "context", "tensor"))
    return state * min(1.0, devices / split)


def _warning(bucket: str, zone: str, each: float, read: float, saved: float) -> str:
    if not each:
        return ""
    return (
        f"the bucket is in {bucket} and the machines are in {region(zone)}: every GB between them costs ${each:.2f}, "
        f"{read / GB:,.0f} GB of data and {saved / GB:,.0f} of checkpoints ${each * (read + saved) / GB:,.0f}; make a "
        f"bucket in {region(zone)}, or run where the data is"
    )
