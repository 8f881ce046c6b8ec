"""Plan a step of RL: the memory of a device, and the time of sampling, scoring, training and weight sync.

The recipe is given as numbers (`RolloutWorkload`) and as a `Training` (core.training). plan.derive plans the trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from dovetail.core.accelerator import Accelerator, of_devices
from dovetail.core.chips import GIB, Chip
from dovetail.core.errors import OutOfMemoryError, UserError
from dovetail.core.training import Training
from dovetail.models.config import ModelConfig
from dovetail.models.spec import flops_per_token
from dovetail.plan.calibration import Fractions
from dovetail.plan.derive import Derived, derive
from dovetail.plan.prediction import predict_training
from dovetail.plan.serve_memory import HELD, Held, held, local_weights
from dovetail.plan.serve_time import WORST, Bounds, Replica


@dataclass(frozen=True)
class RolloutWorkload:
    """Describe what the engine samples in a step, and how the trainer scores it."""

    prompts: int
    group: int  # answers per prompt; they share the prompt's pages
    prompt: int  # tokens
    answer: int  # the most tokens
    mean: float  # mean tokens of an answer
    at_once: int  # sequences that the engine runs at a time
    devices: int = 0  # the engine's own devices; 0: it shares the trainer's first
    kv_bytes: int | None = None  # bytes of the engine's pages; None: what is free
    passes: int = 0  # forward passes over all answers before the update: old policy, reference, teacher
    critic: bool = False  # whether a critic is trained too
    updates: int = 1
    overlaps: bool = False  # whether a step's answers are sampled while the previous step is trained
    spare_devices: int = 0  # devices of the engine and the reference, which the trainer leaves out
    beside: Mapping[str, int] = field(default_factory=dict)  # bytes of others on the trainer's devices, by name

    @property
    def answers(self) -> int:
        """Return the answers of a step."""
        return self.prompts * self.group


@dataclass(frozen=True)
class RlPlan:
    """Hold the memory and the times of one way to share the devices."""

    trainer: Derived
    rollout: RolloutWorkload
    engine: Held
    memory: Mapping[str, int]  # bytes on one of the trainer's devices, by part
    sampling: Bounds
    scoring: Bounds
    training: Bounds
    sync: Bounds

    @property
    def name(self) -> str:
        """Return the plan's name, such as `split: 4 train, 4 sample`."""
        own = self.rollout.devices
        return f"split: {self.trainer.devices} train, {own} sample" if own else f"colocated on {self.trainer.devices}"

    @property
    def step(self) -> Bounds:
        """Return the seconds of a whole step."""
        learning = self.scoring + self.training
        if not self.rollout.overlaps:
            return self.sampling + learning + self.sync
        both = _longer(self.sampling, learning)
        return both + self.sync

    @property
    def tokens_per_second(self) -> Bounds:
        """Return the rate of sampled tokens."""
        count = self.rollout.answers * self.rollout.mean
        return Bounds(count / self.step.best, count / self.step.worst)


def plan_rl(
    cfg: ModelConfig,
    settings: Training,
    accelerator: Accelerator,
    rollout: RolloutWorkload,
    fractions: Fractions | None = None,
) -> RlPlan:
    """Plan a step of RL.

    Args:
        cfg: The policy's model.
        settings: The recipe.
        accelerator: The devices of trainer, engine and reference together.
        rollout: The sampling and scoring of a step.
        fractions: The calibrated fractions of this chip.

    Raises:
        OutOfMemoryError: The trainer or the engine does not fit; the message says what would.
        UserError: The accelerator is not in the table, or has too few devices.
    """
    chip = accelerator.chip
    if chip is None:
        raise UserError("there is no prediction for a CPU: use an accelerator in the table of chips", param="--on")
    devices = accelerator.total_devices - rollout.spare_devices
    if devices < 1:
        raise UserError(
            f"{accelerator.name} must have more than the {rollout.spare_devices} devices of the engine and the "
            f"reference, got {accelerator.total_devices}: leave at least one to the trainer",
            param="--on",
        )
    trainer = _trainer(cfg, settings, chip, devices, rollout.beside)
    parts = {f.name: getattr(trainer.memory, f.name) for f in fields(trainer.memory)} | dict(trainer.beside)
    tensor = max(1, rollout.devices)
    machine = of_devices(chip, tensor) or Accelerator(chip, (tensor,))
    replica = Replica(cfg, machine, tensor, settings.precision.compute, fractions=fractions)
    room = _engine(cfg, chip, replica, rollout)
    train = predict_training(cfg, trainer, chip, fractions)
    learning = Bounds(train.best, train.worst, train.likely).times(rollout.updates * (2 if rollout.critic else 1))
    return RlPlan(
        trainer, rollout, room, {name: size for name, size in parts.items() if size},
        sampling=_sampling(replica, rollout, room), scoring=_scoring(cfg, trainer, chip, rollout), training=learning,
        sync=_sync(replica, chip, rollout),
    )  # fmt: skip


def _trainer(cfg: ModelConfig, settings: Training, chip: Chip, devices: int, beside: Mapping[str, int]) -> Derived:
    """Return the trainer's plan. If it does not fit, the error lists what else is on its devices."""
    try:
        return derive(cfg, settings, chip, devices, beside=beside)
    except OutOfMemoryError as error:
        listed = ", ".join(f"{name} {size / GIB:.1f} GiB" for name, size in beside.items() if size)
        if not listed:
            raise
        raise OutOfMemoryError(f"{error} (beside the trainer on each: {listed})", param=error.param) from error


def _engine(cfg: ModelConfig, chip: Chip, replica: Replica, rollout: RolloutWorkload) -> Held:
    room = held(cfg, chip, replica.tensor, dtype=replica.dtype, rows=rollout.at_once)
    if rollout.kv_bytes is not None:
        room = Held(room.tensor, room.weights, room.per_token, room.page, room.step, rollout.kv_bytes)
    if (room.sequences(rollout.prompt + rollout.answer) or 0) < 1:
        raise OutOfMemoryError(
            f"the engine has no room for one answer of {rollout.prompt + rollout.answer:,} tokens on {replica.tensor} "
            f"x {chip.name}: give it more devices of its own (engine.devices), or a larger "
            "engine.kv_cache_memory_bytes",
            param="engine.devices",
        )
    return room


def _sampling(replica: Replica, rollout: RolloutWorkload, room: Held) -> Bounds:
    """Return the time of sampling with as many sequences at a time as fit.

    At best the next sequence starts when one ends; at worst each batch waits for an answer of the greatest length.
    """
    fits = room.sequences(rollout.prompt + rollout.answer) or 1
    at_once = max(1, min(rollout.at_once, fits, rollout.answers))
    each = replica.decode(at_once, rollout.prompt + rollout.mean / 2)
    prompts = replica.prompt_among_many(rollout.prompt).times(rollout.prompts)
    short, long = rollout.answers / at_once * rollout.mean, -(-rollout.answers // at_once) * rollout.answer
    likely = None if each.likely is None else each.likely * short
    return prompts + Bounds(each.best * short, each.worst * long, likely)


def _scoring(cfg: ModelConfig, trainer: Derived, chip: Chip, rollout: RolloutWorkload) -> Bounds:
    """Return the time of the forward passes over all rows of a step."""
    settings = trainer.settings
    tokens = settings.tokens_per_step * rollout.updates / trainer.devices
    each = tokens * flops_per_token(cfg, settings.length // 2) / chip.device_bf16
    return Bounds(each, each / WORST, None).times(rollout.passes)


def _sync(replica: Replica, chip: Chip, rollout: RolloutWorkload) -> Bounds:
    """Return the time to copy the master weights to the engine in its dtype, on the same device or to another."""
    size = sum(size for _, size in local_weights(replica.cfg, chip, replica.tensor, replica.dtype))
    masters = size * 4 / HELD[replica.dtype]
    if not rollout.devices:
        return _both((size + masters) / replica.bandwidth, replica.fractions and replica.fractions.memory)
    links = (chip.network or chip.dcn or chip.bandwidth) / chip.devices
    return _both(size / links, replica.fractions and replica.fractions.links)


def _both(seconds: float, share: float | None) -> Bounds:
    return Bounds(seconds, seconds / WORST, seconds / share if share else None)


def _longer(a: Bounds, b: Bounds) -> Bounds:
    likely = None if a.likely is None or b.likely is None else max(a.likely, b.likely)
    return Bounds(max(a.best, b.best), max(a.worst, b.worst), likely)
