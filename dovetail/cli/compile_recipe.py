"""`dovetail compile RECIPE`: a train step laid over a topology, compiled, and what the compiler says of it."""

from dovetail.cli.compile_table import Report, compiled, show


def compile_recipe(recipe: str, words: list[str], topology: str, wanted, as_json: bool) -> None:
    """`wanted`: the parsed topology, or None for the GPUs that are here."""
    from rich.console import Console

    ready = _ready(recipe, words, wanted)
    slices, console = ready.settings.mesh.slices, Console(highlight=False, stderr=as_json)
    for line in ready.derived.explain():
        console.print(line, markup=False)
    with console.status(f"compiling {recipe} for {ready.derived.devices} devices"):
        found = compiled(lambda told: ready.compile(ready.bucket(1), told=told))
    title = f"{recipe} on {f'{slices} x ' if slices > 1 else ''}{topology}"
    head = dict(recipe=recipe, topology=topology, slices=slices, devices=ready.derived.devices, mesh=ready.derived.axes)
    show(head, [report(title, ready, *found)], as_json)


def _ready(recipe: str, words: list[str], wanted):
    from dovetail.core.recipe import load
    from dovetail.plan import topology as topologies
    from dovetail.train.next_token import next_token
    from dovetail.train.prepare import prepare
    from dovetail.train.settings import Pretrain

    settings = load(recipe, words, Pretrain)
    if wanted:
        devices, platform = topologies.tpu_devices(wanted, settings.mesh.slices), "tpu"
    else:
        devices, platform = topologies.gpu_devices(), "cuda"
    return prepare(settings, next_token(settings), devices, platform)


def report(title: str, ready, program, assigned: int | None, seconds: float) -> Report:
    from dovetail.core.chips import chip_of
    from dovetail.plan.counted import count
    from dovetail.plan.derive import PLANNED
    from dovetail.plan.plans import flops
    from dovetail.plan.roofline import predict

    mesh, settings, limit = ready.placement.mesh, ready.settings, ready.derived.limit
    devices, chip = list(mesh.devices.flat), chip_of(mesh.devices.flat[0])
    counted = count(program, dict(mesh.shape), devices, assigned=assigned)
    each = flops(ready.cfg, settings.length, settings.remat) * settings.tokens_per_step / len(devices)
    # the state is read and written, and what is kept in between too
    held = 2 * (counted.memory.get("arguments", 0) + counted.memory.get("temporary", 0))
    moved = max(held, counted.bytes or 0)
    predicted = predict(chip, each, (moved, moved), counted.traffic, devices) if chip else None
    estimated = {"memory in all": ready.derived.memory.total, "FLOPs": each}
    return Report(title, counted, predicted, estimated, int(limit / PLANNED) if limit else None, seconds)
