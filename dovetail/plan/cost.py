"""Days and dollars of a run: from the bounds of its step, or from a share of the peak that is taken for granted."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dovetail.core.chips import Chip
from dovetail.core.cloud import CLASS_A, CLASS_B, PIECE_MB, per_gb, region, storage
from dovetail.core.errors import UserError
from dovetail.core.training import Mesh, Training
from dovetail.models.config import ModelConfig
from dovetail.models.lora import Lora
from dovetail.plan.flops import forward_flops
from dovetail.plan.train_memory import BYTES, Shape, moments_of, mtp_layers, shapes_of

DAY = 86_400.0
HOUR = 3_600.0
# a unit of time, its seconds, and up to how many of it a time is shown in it; then years
UNITS = (("seconds", 1.0, 120), ("minutes", 60.0, 120), ("hours", HOUR, 48), ("days", DAY, 1000))
YEAR = 365.25 * DAY


def unit_of(seconds: float) -> tuple[str, float]:
    """Return the unit to show a time in, and its seconds."""
    fits = ((name, each) for name, each, most in UNITS if seconds < most * each)
    return next(fits, ("years", YEAR))


@dataclass(frozen=True)
class Cost:
    """Of a whole run, without evaluation, checkpoints, failures and waiting for machines."""

    seconds: float
    dollars: float | None  # None: nobody publishes a price
    spot: float | None

    @property
    def days(self) -> float:
        return self.seconds / DAY


def cost(seconds: float, chips: int, price: float | None, spot: float | None) -> Cost:
    """`price` and `spot`: dollars per chip and hour."""
    chip_hours = chips * seconds / HOUR
    on_demand, cheaper = (None if each is None else each * chip_hours for each in (price, spot))
    return Cost(seconds, on_demand, cheaper)


def seconds_at(cfg: ModelConfig, tokens: float, chip: Chip, chips: int, mfu: float) -> float:
    """What `tokens` take where `chips` chips reach a share `mfu` of their peak: 6 FLOPs per weight and token."""
    if not 0 < mfu <= 1:
        raise UserError(f"an MFU is a share of the peak above 0 and up to 1, such as 0.4; got {mfu:g}")
    return 3 * forward_flops(cfg) * tokens / (chip.bf16 * chips * mfu)


def critical_batch(chip: Chip, weight_bytes: int = 2, flops: float | None = None) -> float:
    """Tokens of a product at which its weights arrive from memory as fast as they are multiplied: below, the chip waits
    for its memory. Two FLOPs per weight and token against the bytes of a weight."""
    return (flops or chip.bf16) * weight_bytes / (2 * chip.bandwidth)


# What a training keeps and moves: the size of its checkpoints and data, the time to save and restore, and the dollars.
#
# A checkpoint is the state: the master weights, the optimizer's moments, an average where one is kept. Every host
# writes
# the part that its devices alone hold, and reads what its devices hold.


GB = 1e9
HOST_GB_A_SECOND = 1.0  # of a bucket for one host, where none is said: an assumption, not a measurement
FILE_MB = 100  # of a checkpoint, about: each is one write
SMALL_VOCAB = 1 << 16  # up to here a token is two bytes on disk (data.tokenise)


@dataclass(frozen=True)
class Storage:
    """Of a whole training."""

    state: int  # bytes of a checkpoint
    export: int  # of the weights alone, in bf16
    data: int  # of the tokens
    saves: int
    kept: int  # checkpoints that are there at a time
    save_seconds: float  # of one, on all hosts at once
    restore_seconds: float
    month: float  # dollars: of what is kept
    operations: float  # dollars: writes and reads
    carried: float  # dollars: from or to another region
    warning: str = ""

    @property
    def dollars(self) -> float:
        """With a month of keeping."""
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
    """`bandwidth`: bytes per second of each host to where checkpoints go. `tokens`: of the data; the run's unless
    given. `bucket` and `zone`: the region of the one and the zone of the other; dollars of carrying need both."""
    if bandwidth <= 0 or hosts < 1:
        raise UserError(f"hosts and their bandwidth must be above 0; got {hosts} and {bandwidth:g} bytes/s")
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
    """Of one checkpoint."""
    weights, moments = 0, 0
    for shape, count in _shapes(cfg, settings).items():
        size = math.prod(shape[0])
        weights += size * count
        moments += moments_of(settings.optimizer.name, shape, size) * count
    average = 4 * weights if settings.ema else 0
    return weights * BYTES[settings.precision.params] + 4 * moments + average


def token_bytes(vocab: int) -> int:
    return 2 if vocab <= SMALL_VOCAB else 4


def _weights(cfg: ModelConfig, settings: Training) -> int:
    return sum(math.prod(shape[0]) * count for shape, count in _shapes(cfg, settings).items())


def _shapes(cfg: ModelConfig, settings: Training) -> dict[Shape, int]:
    adapter: Lora | None = settings.adapter
    return shapes_of(cfg, mtp_layers(cfg, settings), adapter)


def _forever(settings: Training) -> int:
    """Checkpoints that are kept for good."""
    every = settings.checkpoint.keep_every
    return settings.total_steps // every if every else 0


def _held_by_host(state: int, mesh: Mesh | None, hosts: int, devices: int) -> float:
    """What one host's devices hold of the state: all of it where they are as many as it is split over."""
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
