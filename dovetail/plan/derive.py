"""What a recipe leaves open, from the model and the hardware: mesh, remat, rows per device, accumulation, scan.

Of all plans that fit (plan.plans, plan.memory) the fastest is taken (plan.search). What the recipe gives is kept; what
cannot fit or divide is refused with what would.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace

from dovetail.core.accelerator import of_devices
from dovetail.core.chips import GIB, Chip
from dovetail.core.errors import UserError
from dovetail.core.training import REMATS, Mesh, Training
from dovetail.models.config import ModelConfig
from dovetail.models.repeats import repeats
from dovetail.models.spec import flops_per_token
from dovetail.plan.memory import Memory, memory
from dovetail.plan.plans import (
    Plan,
    axes_of,
    layers_folded,
    least_memory,
    meshes,
    most_unrolled,
    num_experts,
    num_heads,
    plans,
    recomputed,
    row_shards,
    row_splits,
)
from dovetail.plan.search import ranked

PLANNED = 0.92  # the share of a device's memory that a plan may fill; fragments and the runtime take the rest
# Of a host's memory less: a checkpoint being written holds the state twice over there. Measured with 135M weights:
# 9.3 GiB where 4.9 were estimated, 6.3 before the first save.
PLANNED_HOST = 0.5
MOST_DEVICES = 16_384


@dataclass(frozen=True)
class Derived:
    """What was open, decided; `settings` is the recipe with it filled in."""

    settings: Training
    devices: int
    hardware: str
    limit: int | None  # bytes that the plan may fill on a device; None: not known
    memory: Memory
    why: tuple[tuple[str, str, str], ...]  # (what, its value, the reason)
    beside: Mapping[str, int] = field(default_factory=dict)  # what else is on the device: Training.beside

    @property
    def axes(self) -> dict[str, int]:
        """For core.mesh.make_mesh."""
        return axes_of(self.settings.mesh)

    def explain(self) -> list[str]:
        """The lines to print: each value with its reason, then the memory table."""
        wide = max(len(value) for _, value, _ in self.why)
        lines = [f"derived for {self.hardware}"]
        lines += [f"  {what:<12}{value:<{wide}}  {reason}" for what, value, reason in self.why]
        lines.append("memory of one device at the worst moment of a step, estimated")
        parts = {f.name: getattr(self.memory, f.name) for f in fields(self.memory)} | dict(self.beside)
        wide = max(12, *(len(name) + 2 for name in parts))
        lines += [f"  {name:<{wide}}{_gib(size):>10}" for name, size in parts.items()]
        share = f"  of {_gib(self.limit)} to plan with" if self.limit else ""
        return [*lines, f"  {'total':<{wide}}{_gib(sum(parts.values())):>10}{share}"]


def derive(
    cfg: ModelConfig,
    settings: Training,
    chip: Chip | None = None,
    devices: int = 1,
    slices: int = 1,
    hbm: int | None = None,
    on_host: bool = False,
) -> Derived:
    """`devices` are jax devices, those of all `slices` together. `hbm` is a device's memory where it is known better
    than from the chip's table (core.chips.usable_bytes), for CPU devices (`on_host`) its share of the host's; with
    neither, memory is taken to suffice."""
    settings = replace(settings, mesh=_with_slices(settings.mesh, slices))
    if on_host:  # the devices of one machine share its memory: splitting layers or rows between them gains nothing
        mesh = settings.mesh
        settings = replace(settings, mesh=replace(mesh, tensor=mesh.tensor or 1, context=mesh.context or 1))
    check(cfg, settings)
    hbm = hbm or (chip.device_hbm if chip else None)
    whole, others = int(hbm * (PLANNED_HOST if on_host else PLANNED)) if hbm else None, settings.beside(cfg, hbm)
    limit = whole and max(1, whole - sum(others.values()))
    on_gpu = chip.pod is None if chip else bool(hbm) and not on_host  # a chip not in the table is a GPU
    on_tpu = chip is not None and chip.pod is not None
    found = list(plans(cfg, settings, devices, limit, on_gpu=on_gpu, on_tpu=on_tpu))
    if on_host:  # links and recomputation cost a CPU what the estimate does not know: without them where that fits
        found = [plan for plan in plans(cfg, settings, devices, None) if plan in found] or found
    if not found:
        raise UserError(_refusal(cfg, settings, _name(chip, hbm, on_host), devices, limit, on_host))
    machine = of_devices(chip, devices, settings.mesh.slices) if chip else None
    best = ranked(cfg, settings, found, chip, machine)[0].plan
    filled = replace(
        settings, mesh=best.mesh, scan=best.scan, remat=best.remat, per_device=best.rows, accumulate=best.microsteps
    )
    hardware = _hardware(_name(chip, hbm, on_host), devices, settings.mesh.slices, hbm)
    why = _reasons(cfg, settings, best, limit, on_gpu, on_tpu)
    return Derived(filled, devices, hardware, whole, best.memory, why, others)


def smallest(cfg: ModelConfig, settings: Training, chip: Chip) -> int | None:
    """The fewest chips, a power of two, on which the recipe fits; None where no number does."""
    chips = 1
    while chips * chip.devices <= MOST_DEVICES and chips <= (chip.pod or MOST_DEVICES):
        if _fits(cfg, settings, chips * chip.devices, int(chip.device_hbm * PLANNED)):
            return chips
        chips *= 2
    return None


def _fits(cfg: ModelConfig, settings: Training, devices: int, limit: int) -> bool:
    least = least_memory(cfg, settings, devices)
    return least is not None and least <= limit


def _with_slices(mesh: Mesh, slices: int) -> Mesh:
    """The slices that are there, unless the recipe says more (to rehearse them on one machine)."""
    if mesh.slices not in (1, slices) and slices > 1:
        raise UserError(f"mesh.slices={mesh.slices}, and the devices come from {slices} slices; leave it out")
    return replace(mesh, slices=max(slices, mesh.slices))


# --- saying why -------------------------------------------------------------------------------------------------------


def _reasons(
    cfg: ModelConfig, settings: Training, plan: Plan, limit: int | None, on_gpu: bool, on_tpu: bool
) -> tuple[tuple[str, str, str], ...]:
    shown = [f"{name} {size}" for name, size in axes_of(plan.mesh).items() if size > 1]
    return (
        ("mesh", " x ".join(shown) or "1 device", _why_mesh(cfg, settings, plan, limit)),
        ("remat", plan.remat, _why_remat(cfg, settings, plan, limit, on_tpu)),
        ("per_device", str(plan.rows), _why_rows(settings, plan)),
        ("accumulate", str(plan.microsteps), _why_accumulate(settings, plan)),
        ("scan", str(plan.scan).lower(), _why_scan(cfg, settings, plan, on_gpu)),
    )


def _why_scan(cfg: ModelConfig, settings: Training, plan: Plan, on_gpu: bool) -> str:
    if settings.scan is not None:
        return "given"
    if plan.scan:
        group = max(repeats(cfg), key=lambda one: one.period * one.times)
        one = "one" if group.period == 1 else f"a group of {group.period}"
        return f"{layers_folded(cfg)} layers in a row compile as {one}"
    return f"no more than {most_unrolled(plan.mesh, on_gpu)} layers in a row are alike"


def _why_mesh(cfg: ModelConfig, settings: Training, plan: Plan, limit: int | None) -> str:
    given = _given_axes(settings.mesh)
    state, whole = (
        m.weights + m.optimizer
        for m in (plan.memory, memory(cfg, settings, {"data": row_shards(plan.mesh)}, plan.remat, plan.rows))
    )
    if state < whole:
        return given + f"the state ({_gib(whole)}) is split: each device holds {_gib(state)} of it"
    if plan.mesh.context > 1:
        return given + "each row is split over devices, and weights are whole on each"
    if row_shards(plan.mesh) == 1:
        return given + "nothing is split"
    fits = f"the state ({_gib(state)}) fits on each, so no weight travels" if limit else "weights are whole on each"
    return given + f"rows are split over the devices; {fits}"


def _given_axes(mesh: Mesh) -> str:
    """What of the mesh the recipe said: all of it, or the names of some axes."""
    if mesh.data and mesh.fsdp and mesh.expert:
        return "given; "
    names = [name for name, size in axes_of(mesh).items() if size > (name not in ("data", "fsdp"))]
    return f"{', '.join(names)} given; " if names else ""


def _why_remat(cfg: ModelConfig, settings: Training, plan: Plan, limit: int | None, on_tpu: bool) -> str:
    extra = recomputed(cfg, settings.length, plan.remat) / flops_per_token(cfg, settings.length // 2, train=True)
    if settings.remat:
        return f"given; {extra:.0%} more FLOPs"
    if plan.remat == "none":
        return "nothing is recomputed: all activations fit" if limit else "nothing is recomputed"
    before = REMATS[REMATS.index(plan.remat) - 1]
    laid = replace(settings, scan=plan.scan)
    needed = memory(cfg, laid, axes_of(plan.mesh), before, plan.rows, on_tpu=on_tpu).total
    if limit and needed <= limit:
        return f"{extra:.0%} more FLOPs; the loop over layers would copy all that {before} keeps"
    return f"{extra:.0%} more FLOPs; {before} with as many rows would need {_gib(needed)}"


def _why_rows(settings: Training, plan: Plan) -> str:
    if settings.per_device:
        return "given"
    shared = plan.mesh.tensor * plan.mesh.context
    over = f"{_count(row_shards(plan.mesh), 'group')} of {shared} devices" if shared > 1 else ""
    over = over or _count(row_shards(plan.mesh), "device")
    return f"{settings.batch} rows = {over} x {_count(plan.rows, 'row')} x {_count(plan.microsteps, 'microstep')}"


def _why_accumulate(settings: Training, plan: Plan) -> str:
    if settings.accumulate:
        return "given"
    if plan.microsteps == 1:
        return "all rows at once"
    return f"follows from per_device={plan.rows}" if settings.per_device else "more rows at a time do not fit"


def _count(n: int, what: str) -> str:
    return f"{n} {what}" + ("s" if n != 1 else "")


def _name(chip: Chip | None, hbm: int | None, on_host: bool) -> str:
    return chip.name if chip else "device of a kind not in the table" if hbm and not on_host else "CPU device"


def _hardware(name: str, devices: int, slices: int, hbm: int | None) -> str:
    size = f", {_gib(hbm)} each" if hbm else ""
    return f"{devices} x {name}{size}" + (f", in {slices} slices" if slices > 1 else "")


def _gib(size: float) -> str:
    return f"{size / GIB:,.1f} GiB" if size >= GIB else f"{size / 2**20:.0f} MiB"


# --- refusing ---------------------------------------------------------------------------------------------------------


def check(cfg: ModelConfig, settings: Training) -> None:
    """What no number of devices would mend."""
    mesh, experts, heads = settings.mesh, num_experts(cfg), num_heads(cfg)
    if settings.length > cfg.max_len:
        raise UserError(
            f"length is {settings.length} and the model has {cfg.max_len} positions: lower length, or raise "
            "max_position_embeddings in its config.json"
        )
    if mesh.context and settings.length % mesh.context:
        raise UserError(f"mesh.context={mesh.context} must divide length, which is {settings.length}")
    if mesh.expert > 1 and (experts == 1 or experts % mesh.expert):
        has = f"{experts} experts" if experts > 1 else "no experts"
        raise UserError(f"mesh.expert={mesh.expert} must divide the model's experts; it has {has}")
    if mesh.tensor and heads % mesh.tensor:
        raise UserError(f"mesh.tensor={mesh.tensor} must divide the model's {heads} attention heads")
    split = mesh.fsdp * max(mesh.context, 1)
    if mesh.fsdp > 1 and cfg.dim % split:
        raise UserError(
            f"mesh.fsdp x mesh.context is {split} and must divide the model dim, {cfg.dim}: "
            "otherwise every weight would be whole on every device"
        )
    settings.check_model(cfg)


def shape_refusal(cfg: ModelConfig, settings: Training, devices: int, split_weights: bool) -> str | None:
    """Why the recipe cannot be laid over so many devices, whatever their memory; None where it can."""
    possible = list(meshes(cfg, settings, devices, split_weights))
    if not possible:
        given = " x ".join(f"{name} {size}" for name, size in axes_of(settings.mesh).items() if size > 1)
        slices = f" in {settings.mesh.slices} slices" if settings.mesh.slices > 1 else ""
        return (
            f"a mesh of {given or 'one device'} cannot be laid over {devices} devices{slices}: the sizes must multiply "
            "to that number, and data=0 and fsdp=0 are derived to fill it"
        )
    if not any(True for mesh in possible for _ in row_splits(settings, row_shards(mesh))):
        return _no_rows(settings, min(row_shards(mesh) for mesh in possible))
    return None


def _refusal(cfg: ModelConfig, settings: Training, name: str, devices: int, limit: int | None, on_host: bool) -> str:
    """Why no plan is left, and what would do."""
    shape = shape_refusal(cfg, settings, devices, split_weights=limit is not None)
    least = least_memory(cfg, settings, devices)
    if shape or least is None or limit is None:
        return shape or "no plan is left"
    remat = settings.remat or REMATS[-1]
    would = list(_remedies(cfg, settings, devices, limit, more=not on_host))[:2]
    would = would or ["more memory" if on_host else "a device with more memory"]
    share = ", its share of the memory that this host, container or job has"
    return (
        f"it does not fit: each of {devices} x {name} would need {_gib(least)} at least (remat={remat}) and has "
        f"{_gib(limit)} to plan with{share if on_host else ''}. What would do: {' or '.join(would)}"
    )


def _no_rows(settings: Training, shards: int) -> str:
    rows = settings.batch
    if rows % shards:
        more = -(-rows // shards) * shards
        share = f", or mesh.context={shards // rows} to share rows between devices" if shards % rows == 0 else ""
        return f"batch={rows} rows cannot be split evenly over {shards} devices: batch={more} can{share}"
    given = [f"{n}={getattr(settings, n)}" for n in ("per_device", "accumulate") if getattr(settings, n)]
    return (
        f"{' and '.join(given)} do not make up the batch: {rows} rows over {shards} devices are {rows // shards} a "
        "device, and per_device x accumulate must be that; leave out one of the two, or both"
    )


def _remedies(cfg: ModelConfig, settings: Training, devices: int, limit: int, more: bool) -> Iterator[str]:
    """`more`: whether further devices bring memory of their own."""
    mesh = settings.mesh
    heads = num_heads(cfg)
    changes = {
        "remat left open": replace(settings, remat=""),
        "per_device and accumulate left open": replace(settings, per_device=0, accumulate=0),
        "mesh.data and mesh.fsdp left open": replace(settings, mesh=replace(mesh, data=0, fsdp=0)),
        "mesh.expert=0 (derived)": replace(settings, mesh=replace(mesh, expert=0)),
    }
    wider = [n for n in (2, 4, 8) if 0 < mesh.tensor < n and heads % n == 0]
    changes |= {f"mesh.tensor={n}": replace(settings, mesh=replace(mesh, tensor=n)) for n in wider}
    for what, changed in changes.items():
        if changed != settings and _fits(cfg, changed, devices, limit):
            yield what
    count = 2 * devices
    while more and count <= MOST_DEVICES:
        if _fits(cfg, settings, count, limit):
            yield f"{count} devices"
            return
        count *= 2
