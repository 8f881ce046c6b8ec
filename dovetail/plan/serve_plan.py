"""A model served on an accelerator: what fits, how fast, and what a token costs, for each way to split the devices.

The devices are dealt out as replicas of `tensor` devices each. An engine runs on one machine, so that a replica has no
more devices than a machine does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from dovetail.core.accelerator import Accelerator, parse
from dovetail.core.chips import CHIPS, GIB
from dovetail.models.config import ModelConfig
from dovetail.plan.calibration import Fractions
from dovetail.plan.pool import FRACTION, HELD, PLANNED_ONLY, SLACK, USABLE, Held, held, platform_of
from dovetail.plan.serve_time import Bounds, Replica

HOUR = 3600.0
MILLION = 1e6
BATCHES = tuple(2**i for i in range(11))
ELSEWHERE = ("v5e", "v6e", "v5p", "H100", "H200", "B200")  # what a refusal looks among


@dataclass(frozen=True)
class Workload:
    prompt: int  # tokens
    output: int
    concurrency: int  # sequences at a time, over all replicas

    def __post_init__(self) -> None:
        for name in ("prompt", "output", "concurrency"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")

    @property
    def length(self) -> int:
        return self.prompt + self.output


@dataclass(frozen=True)
class Point:
    """So many sequences at a time on each replica."""

    batch: int
    decode: Bounds  # seconds of a step
    per_token: Bounds  # the same with the prompts in between
    replicas: int
    most: int = 1 << 62  # sequences that there are, over all replicas: some may have fewer than `batch`, or none

    @property
    def sequences(self) -> int:
        """At a time, on all replicas."""
        return min(self.batch * self.replicas, self.most)

    @property
    def rate(self) -> Bounds:
        """Output tokens per second of all replicas; `best` is the most."""
        per, many = self.per_token, self.sequences
        return Bounds(many / per.best, many / per.worst, many / per.likely if per.likely else None)


@dataclass(frozen=True)
class ServePlan:
    """One way to deal the devices out."""

    replica: Replica
    replicas: int
    held: Held
    workload: Workload
    dollars: float | None  # of an hour of all devices
    points: tuple[Point, ...]  # by batch, as far as the pages reach
    chosen: Point  # at the workload's concurrency, or as much of it as fits

    @property
    def tensor(self) -> int:
        return self.replica.tensor

    @property
    def name(self) -> str:
        return f"{self.replicas} x {self.tensor}"

    @property
    def wanted(self) -> int:
        """Sequences that each replica is asked to take."""
        return -(-self.workload.concurrency // self.replicas)

    @property
    def holds_all(self) -> bool:
        return self.chosen.batch >= self.wanted

    @property
    def first_token(self) -> Bounds:
        """Of a prompt that comes alone."""
        return self.replica.prompt(self.workload.prompt)

    @property
    def last_of_all(self) -> Bounds:
        """The first token of the last prompt where all come at once."""
        each = self.replica.prompt_among_many(self.workload.prompt)
        return each.times(self.wanted - 1) + self.first_token

    @property
    def per_million_input(self) -> Bounds | None:
        """Dollars."""
        each = self.replica.prompt_among_many(self.workload.prompt).times(1 / self.workload.prompt / self.replicas)
        return None if self.dollars is None else each.times(self.dollars / HOUR * MILLION)

    @property
    def per_million_output(self) -> Bounds | None:
        """Dollars, of the decode steps alone: prompts are counted as input."""
        each = self.chosen.decode.times(1 / self.chosen.sequences)
        return None if self.dollars is None else each.times(self.dollars / HOUR * MILLION)

    def accelerators_for(self, requests_per_day: float) -> Bounds:
        """How many such accelerators it takes, if requests come evenly."""
        tokens = requests_per_day * self.workload.output / (24 * HOUR)
        rate = self.chosen.rate
        likely = None if rate.likely is None else tokens / rate.likely
        return Bounds(tokens / rate.best, tokens / rate.worst, likely)


def plan_serving(
    cfg: ModelConfig,
    accelerator: Accelerator,
    workload: Workload,
    *,
    dtype: str = "bf16",
    kv: str = "",
    dollars: float | None = None,
    fractions: Fractions | None = None,
    memory: int | None = None,
    tensor: int = 0,
) -> list[ServePlan]:
    """Every way that fits, the most output tokens per second first. `dollars`: of an hour of all devices. `memory`: of
    one device, where it is known better than from the table; `tensor`: the only degree to try."""
    for name, value in (("dtype", dtype), ("kv", kv or dtype)):
        if value not in HELD:
            raise ValueError(f"{name} is one of {', '.join(HELD)}; got {value!r}")
    if workload.length > cfg.max_len:
        raise ValueError(
            f"a prompt of {workload.prompt:,} and an answer of {workload.output:,} tokens are {workload.length:,}, and "
            f"the model takes {cfg.max_len:,} at most: lower --in or --out"
        )
    found = []
    for degree in (tensor,) if tensor else degrees(accelerator):
        replica = Replica(cfg, accelerator, degree, dtype, kv, fractions)
        plan = _plan(replica, workload, dollars, memory)
        found += [plan] if plan else []
    if not found:
        raise ValueError(refusal(cfg, accelerator, workload, dtype, kv, memory, tensor))
    return sorted(found, key=_worth, reverse=True)


def degrees(accelerator: Accelerator) -> list[int]:
    """Devices of a replica: powers of two up to what one machine has."""
    most = accelerator.chips_per_host * (accelerator.chip.devices if accelerator.chip else 1)
    return [n for n in (2**i for i in range(most.bit_length())) if most % n == 0]


def frontier(plans: Iterable[ServePlan]) -> list[tuple[ServePlan, Point]]:
    """Of all plans' points those that no other beats in both latency and throughput, the quickest first."""
    every = [(plan, point) for plan in plans for point in plan.points]
    every.sort(key=lambda each: (each[1].per_token.best, -each[1].rate.best))
    kept: list[tuple[ServePlan, Point]] = []
    for plan, point in every:
        if not kept or point.rate.best > kept[-1][1].rate.best * 1.001:
            kept.append((plan, point))
    return kept


def _plan(replica: Replica, workload: Workload, dollars: float | None, memory: int | None) -> ServePlan | None:
    replicas = replica.accelerator.total_devices // replica.tensor
    wanted = -(-workload.concurrency // replicas)
    room = _held(replica, wanted, memory)
    fits = room.sequences(workload.length)
    if fits is not None and fits < 1:
        return None
    most = min(BATCHES[-1], fits) if fits else BATCHES[-1]
    here = min(wanted, fits) if fits else wanted
    batches = sorted({n for n in BATCHES if n <= most} | {most, here})
    points = {n: _point(replica, replicas, workload, n) for n in batches}
    chosen = replace(points[here], most=workload.concurrency)
    return ServePlan(replica, replicas, room, workload, dollars, tuple(points.values()), chosen)


def _held(replica: Replica, rows: int, memory: int | None) -> Held:
    return held(
        replica.cfg, replica.chip, replica.tensor, dtype=replica.dtype, kv=replica.kv, rows=rows, memory=memory
    )  # fmt: skip


def _point(replica: Replica, replicas: int, workload: Workload, batch: int) -> Point:
    decode = replica.decode(batch, workload.prompt + workload.output / 2)
    return Point(batch, decode, replica.per_token(batch, workload.prompt, workload.output), replicas)


def _worth(plan: ServePlan) -> float:
    """Between the bounds; sequences that have no room wait, which the rate says already."""
    rate = plan.chosen.rate
    return rate.likely or math.sqrt(rate.best * rate.worst)


# --- what would make it possible --------------------------------------------------------------------------------------


def refusal(
    cfg: ModelConfig, accelerator: Accelerator, workload: Workload, dtype: str, kv: str, memory: int | None, tensor: int
) -> str:
    degree = tensor or max(degrees(accelerator))
    chip = accelerator.chip
    assert chip is not None
    one = replace(workload, concurrency=1)
    need = _held(Replica(cfg, accelerator, degree, dtype, kv), 1, memory)
    usable = (memory or chip.device_hbm) * USABLE[platform_of(chip)] * FRACTION
    wanted = need.weights + need.step + SLACK + need.per_token * -(-one.length // need.page) * need.page
    ways = [
        *_elsewhere(cfg, one, dtype, kv, accelerator, degree),
        *([] if dtype in PLANNED_ONLY else _smaller(cfg, accelerator, one, kv, degree)),
    ]
    machine = ", all that one machine has," if not tensor and accelerator.hosts > 1 else ""
    hope = f"it fits {'; or '.join(ways)}" if ways else "no single machine known here holds it"
    return (
        f"{accelerator.name} cannot hold it: on each of {degree} devices{machine} weights of {need.weights / GIB:.1f} "
        f"GiB, a step's {need.step / GIB:.1f} and one sequence of {one.length:,} tokens are {wanted / GIB:.1f} GiB, "
        f"{wanted / usable:.3g}x the {usable / GIB:.1f} that an engine may take; {hope}"
    )


def _elsewhere(cfg: ModelConfig, workload: Workload, dtype: str, kv: str, here: Accelerator, degree: int) -> list[str]:
    """The smallest machine of some kinds of chip, this one first."""
    assert here.chip is not None
    found = []
    for name in dict.fromkeys((here.chip.name, *ELSEWHERE)):
        for size in _machines(name):
            more = size.chip != here.chip or max(degrees(size)) > degree
            if more and size.chip and _fits(cfg, size, workload, dtype, kv):
                found.append(size.name)
                break
    return [f"on {' or '.join(found[:4])}"] if found else []


def _machines(name: str) -> Sequence[Accelerator]:
    """One machine each, the smallest first."""
    sizes = []
    for chips in (1, 2, 4, 8):
        try:
            one = parse(f"{name}x{chips}") if CHIPS[name].pod is None else parse(f"{name}-{chips}")
        except ValueError:
            continue
        sizes += [one] if one.hosts == 1 else []
    return sizes


def _smaller(cfg: ModelConfig, accelerator: Accelerator, workload: Workload, kv: str, degree: int) -> list[str]:
    """Weights in fewer bits, which this engine does not have yet."""
    for dtype in ("int8", "int4"):
        if _fits(cfg, accelerator, workload, dtype, kv or "bf16", degree):
            return [f"here with weights of {dtype} (which this engine has not: --dtype {dtype} plans with them)"]
    return []


def _fits(cfg: ModelConfig, accelerator: Accelerator, workload: Workload, dtype: str, kv: str, degree: int = 0) -> bool:
    replica = Replica(cfg, accelerator, degree or max(degrees(accelerator)), dtype, kv)
    return (_held(replica, 1, None).sequences(workload.length) or 0) >= 1
