"""Plan serving on an accelerator: what fits, how fast, and what a token costs, for each way to split the devices.

The devices are split into replicas of `tensor` devices each. Dovetail's engine runs on one machine, so a replica has at
most the devices of one machine. If the model fits on no machine, replicas over several machines are planned, for
another engine (`ServePlan.unserved` says so).
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from dovetail.core.accelerator import Accelerator, parse
from dovetail.core.chips import CHIPS, GIB
from dovetail.core.errors import OutOfMemoryError, UserError
from dovetail.core.formats import KV_DTYPES
from dovetail.models.config import ModelConfig
from dovetail.models.draft.draft import DraftModel
from dovetail.plan.calibration import Fractions
from dovetail.plan.serve_memory import (
    HELD,
    MEMORY_UTILIZATION,
    QUANTIZED,
    SLACK,
    USABLE,
    Held,
    compute_dtype,
    held,
    platform_of,
)
from dovetail.plan.serve_time import Bounds, Replica, machine_devices

HOUR = 3600.0
MILLION = 1e6
BATCHES = tuple(2**i for i in range(11))
ELSEWHERE = ("v5e", "v6e", "v5p", "H100", "H200", "B200")  # the chips that a refusal suggests


@dataclass(frozen=True)
class Workload:
    """Describe the requests to serve."""

    prompt: int  # tokens
    output: int  # tokens
    concurrency: int  # sequences at a time, over all replicas

    def __post_init__(self) -> None:
        for name in ("prompt", "output", "concurrency"):
            if getattr(self, name) < 1:
                raise UserError(f"`{name}` must be at least 1, got {getattr(self, name)}", param=name)

    @property
    def length(self) -> int:
        """Return the tokens of a sequence at its end."""
        return self.prompt + self.output


@dataclass(frozen=True)
class Point:
    """Hold the times of serving `batch` sequences at a time on each replica."""

    batch: int
    decode: Bounds  # seconds of a decode step
    per_token: Bounds  # the same with the prompts between decode steps
    replicas: int
    most: int = 1 << 62  # sequences of the workload: some replicas may have fewer than `batch`

    @property
    def sequences(self) -> int:
        """Return the sequences at a time on all replicas."""
        return min(self.batch * self.replicas, self.most)

    @property
    def rate(self) -> Bounds:
        """Return the output tokens per second of all replicas; `best` is the most."""
        per, many = self.per_token, self.sequences
        return Bounds(many / per.best, many / per.worst, many / per.likely if per.likely else None)


@dataclass(frozen=True)
class ServePlan:
    """Hold one way to split the devices into replicas."""

    replica: Replica
    replicas: int
    held: Held
    workload: Workload
    dollars: float | None  # per hour for all devices
    points: tuple[Point, ...]  # by batch, up to what the pages hold
    chosen: Point  # at the workload's concurrency, or as much of it as fits

    @property
    def tensor(self) -> int:
        """Return the devices of a replica."""
        return self.replica.tensor

    @property
    def name(self) -> str:
        """Return the plan's name: replicas x devices of each."""
        return f"{self.replicas} x {self.tensor}"

    @property
    def unserved(self) -> str:
        """Return why Dovetail's engine cannot run the plan; empty if it can."""
        replica, kv, found = self.replica, self.replica.kv or self.replica.dtype, []
        if replica.machines > 1:
            each = machine_devices(replica.accelerator)
            found.append(f"a replica spans {replica.machines} machines of {each} devices, and the engine runs on one")
        own = compute_dtype(replica.dtype)
        if kv in QUANTIZED and kv not in KV_DTYPES:
            found.append(f"the engine has no KV pages in {kv}")
        elif kv != own and kv not in KV_DTYPES:
            found.append(f"the engine keeps KV pages in the type that it computes in, {own}")
        return "; ".join(found)

    @property
    def wanted(self) -> int:
        """Return each replica's share of the concurrent sequences."""
        return -(-self.workload.concurrency // self.replicas)

    @property
    def holds_all(self) -> bool:
        """Return whether all concurrent sequences fit."""
        return self.chosen.batch >= self.wanted

    @property
    def first_token(self) -> Bounds:
        """Return the time to first token of a single prompt."""
        return self.replica.prompt(self.workload.prompt)

    @property
    def last_of_all(self) -> Bounds:
        """Return the time to first token of the last prompt if all arrive at once."""
        each = self.replica.prompt_among_many(self.workload.prompt)
        return each.times(self.wanted - 1) + self.first_token

    @property
    def per_million_input(self) -> Bounds | None:
        """Return the dollars per million input tokens."""
        each = self.replica.prompt_among_many(self.workload.prompt).times(1 / self.workload.prompt / self.replicas)
        return None if self.dollars is None else each.times(self.dollars / HOUR * MILLION)

    @property
    def per_million_output(self) -> Bounds | None:
        """Return the dollars per million output tokens, for decode steps alone: prompts are counted as input."""
        each = self.chosen.decode.times(1 / self.chosen.sequences)
        return None if self.dollars is None else each.times(self.dollars / HOUR * MILLION)

    def command(self, source: str, dtype: str = "") -> str:
        """Return the command that starts one replica.

        Args:
            source: The model, as `dovetail serve` takes it.
            dtype: The dtype of the weights, if it is not the checkpoint's.
        """
        split = f" --tensor-parallel-size {self.tensor}" if self.tensor > 1 else ""
        held = f" --dtype {dtype}" if dtype else ""
        return (
            f"dovetail serve {shlex.quote(source)}{held}{split} --max-num-seqs {self.wanted} "
            f"--max-model-len {self.workload.length}"
        )

    def accelerators_for(self, requests_per_day: float) -> Bounds:
        """Return how many such accelerators are needed if requests arrive evenly."""
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
    draft: DraftModel | None = None,
) -> list[ServePlan]:
    """Return every plan that fits, the most output tokens per second first.

    Args:
        cfg: The model.
        accelerator: The devices.
        workload: The requests.
        dtype: How weights are held, a key of serve_memory.HELD.
        kv: How KV pages are held; default: as weights.
        dollars: Dollars per hour for all devices.
        fractions: The calibrated fractions of this chip.
        memory: Bytes of one device, if known better than from the chip's table.
        tensor: The only number of devices per replica to try; 0: all.
        draft: The draft model.

    Raises:
        OutOfMemoryError: No replica has room for one sequence; the message says what would.
        UserError: A value is out of range.
    """
    for name, value in (("dtype", dtype), ("kv", kv or dtype)):
        if value not in HELD:
            raise UserError(f"`{name}` must be one of {', '.join(HELD)}, got {value!r}", param=name)
    if workload.length > cfg.max_len:
        raise UserError(
            f"prompt and output together must have at most the model's {cfg.max_len:,} tokens, got "
            f"{workload.prompt:,} + {workload.output:,} = {workload.length:,}: lower --in or --out",
            param="--in",
        )
    wider = beyond(accelerator)
    if tensor and tensor not in (*degrees(accelerator), *wider):
        most = max((*degrees(accelerator), *wider))
        raise UserError(
            f"--tensor-parallel-size must be a power of two that divides the devices of {accelerator.name}, at most "
            f"{most}, got {tensor}",
            param="--tensor-parallel-size",
        )
    one = Replica(cfg, accelerator, 1, dtype, kv, fractions, draft=draft)
    for tried in ((tensor,),) if tensor else (degrees(accelerator), wider):
        replicas = [_of_size(one, accelerator, degree) for degree in tried]
        found = [plan for each in replicas if (plan := _plan(each, workload, dollars, memory))]
        if found:
            return sorted(found, key=_worth, reverse=True)
    raise OutOfMemoryError(refusal(one, workload, memory, tensor))


def degrees(accelerator: Accelerator) -> list[int]:
    """Return the numbers of devices that a replica may have: powers of two up to those of one machine."""
    most = machine_devices(accelerator)
    return [n for n in (2**i for i in range(most.bit_length())) if most % n == 0]


def beyond(accelerator: Accelerator) -> list[int]:
    """Return the same for a replica over several machines: those of one TPU slice, or all GPUs."""
    devices, most = accelerator.total_devices, machine_devices(accelerator)
    is_gpu = platform_of(accelerator.chip) == "cuda"
    reach = devices // accelerator.slices if accelerator.is_tpu else devices if is_gpu else 0
    return [n for n in (2**i for i in range(reach.bit_length())) if n > most and reach % n == 0]


def _of_size(replica: Replica, accelerator: Accelerator, degree: int) -> Replica:
    """Return the replica on `degree` devices of an accelerator."""
    spread = degree > machine_devices(accelerator)
    return replace(replica, accelerator=accelerator, tensor=degree, spread=spread)


def frontier(plans: Iterable[ServePlan]) -> list[tuple[ServePlan, Point]]:
    """Return the points that no other point beats in both latency and throughput, the lowest latency first."""
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
        replica.cfg, replica.chip, replica.tensor, dtype=replica.dtype, kv=replica.kv, rows=rows, memory=memory,
        spread=replica.spread, draft=replica.draft,
    )  # fmt: skip


def _point(replica: Replica, replicas: int, workload: Workload, batch: int) -> Point:
    decode = replica.decode(batch, workload.prompt + workload.output / 2)
    return Point(batch, decode, replica.per_token(batch, workload.prompt, workload.output), replicas)


def _worth(plan: ServePlan) -> float:
    """Return the rate that plans are ranked by: calibrated, or else the geometric mean of the bounds."""
    rate = plan.chosen.rate
    return rate.likely or math.sqrt(rate.best * rate.worst)


# --- what would fit ---------------------------------------------------------------------------------------------------


def refusal(replica: Replica, workload: Workload, memory: int | None, tensor: int) -> str:
    """Return the message that no replica has room for one sequence, with what would fit.

    Args:
        replica: A replica of any size.
        workload: The requests.
        memory: Bytes of one device, if known better than from the chip's table.
        tensor: The only number of devices per replica that was tried; 0: all.
    """
    accelerator = replica.accelerator
    degree = tensor or max((*degrees(accelerator), *beyond(accelerator)))
    chip = accelerator.chip
    assert chip is not None
    one = replace(workload, concurrency=1)
    replica = _of_size(replica, accelerator, degree)
    need = _held(replica, 1, memory)
    usable = (memory or chip.device_hbm) * USABLE[platform_of(chip)] * MEMORY_UTILIZATION
    wanted = need.weights + need.step + SLACK + need.per_token * -(-one.length // need.page) * need.page
    ways = [
        *([f"on {' or '.join(found)}"] if (found := elsewhere(replica, one, degree)) else []),
        *([] if replica.dtype in QUANTIZED else _smaller(replica, one)),
    ]
    machine = f" on {replica.machines} machines" if replica.machines > 1 else ""
    each = f"each of {degree} devices{machine}" if degree > 1 else "a device"
    hope = f"it fits {'; or '.join(ways)}" if ways else "no single machine known here holds it"
    return (
        f"it does not fit on {accelerator.name}: {each} needs {wanted / GIB:.1f} GiB at least (weights "
        f"{need.weights / GIB:.1f}, a step {need.step / GIB:.1f}, one sequence of {one.length:,} "
        f"tokens), {wanted / usable:.3g}x the {usable / GIB:.1f} GiB that an engine may take. What would do: {hope}"
    )


def elsewhere(replica: Replica, workload: Workload, degree: int = 0) -> list[str]:
    """Return the smallest machines that fit, one per kind of chip, this chip first.

    `degree`: the number of devices of this chip that is too small.
    """
    here, found = replica.chip, []
    for name in dict.fromkeys((*((here.name,) if here.name in CHIPS else ()), *ELSEWHERE)):
        for size in _machines(name):
            more = size.chip != here or max(degrees(size)) > degree
            if more and size.chip and _fits(_of_size(replica, size, max(degrees(size))), workload):
                found.append(size.name)
                break
    return found[:4]


def _machines(name: str) -> Sequence[Accelerator]:
    """Return the accelerators of one machine with this chip, the smallest first."""
    sizes = []
    for chips in (1, 2, 4, 8):
        try:
            one = parse(f"{name}x{chips}") if CHIPS[name].pod is None else parse(f"{name}-{chips}")
        except UserError:  # there is no such slice
            continue
        sizes += [one] if one.hosts == 1 else []
    return sizes


def _smaller(replica: Replica, workload: Workload) -> list[str]:
    """Return the weight dtype with fewer bits that would fit, as a suggestion."""
    for dtype in ("int8", "int4"):
        if _fits(replace(replica, dtype=dtype, kv=replica.kv or "bf16"), workload):
            return [f"here with {dtype} weights (--dtype {dtype})"]
    return []


def _fits(replica: Replica, workload: Workload) -> bool:
    return (_held(replica, 1, None).sequences(workload.length) or 0) >= 1
