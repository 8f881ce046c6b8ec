"""`dovetail compile`: a recipe's step compiled for hardware that need not be here, and what the compiler says of it."""

import typer


def compile_(
    recipe: str = typer.Argument(help="A recipe's name or file."),
    overrides: list[str] = typer.Argument(None, metavar="[KEY=VALUE]...", help="Such as per_device=2 mesh.slices=2."),
    topology: str = typer.Option(
        ..., help="A TPU slice, chip and grid: v5e:16x16, v4:2x2x1, v5p:4x4x4, v6e:8x8, 7x:2x2x1; or gpu: those here."
    ),
) -> None:
    """Compile a recipe's step for machines that are not here: memory, FLOPs."""
    from rich.console import Console

    from dovetail.plan import topology as topologies

    console = Console(highlight=False)
    wanted = None if topology.strip().lower() == "gpu" else topologies.parse(topology)
    if wanted:
        topologies.without_hardware()

    from dovetail.core.recipe import load
    from dovetail.train.next_token import next_token
    from dovetail.train.prepare import prepare
    from dovetail.train.settings import Pretrain

    settings = load(recipe, overrides or [], Pretrain)
    if wanted:
        devices, platform = topologies.tpu_devices(wanted, settings.mesh.slices), "tpu"
    else:
        devices, platform = topologies.gpu_devices(), "cuda"
    ready = prepare(settings, next_token(settings), devices, platform)
    for line in ready.derived.explain():
        console.print(line, markup=False)
    with console.status(f"compiling {recipe} for {len(devices)} devices"):
        compiled, seconds = _compiled(ready)
    console.print(table(f"{recipe} on {topology}", ready, compiled, seconds))


def _compiled(ready):
    """(the compiled step, seconds to lower it, seconds to compile it)."""
    import time

    from jax.errors import JaxRuntimeError

    start = time.perf_counter()
    lowered = ready.lower(ready.bucket(1))
    middle = time.perf_counter()
    try:
        compiled = lowered.compile()
    except JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = " ".join(str(error).partition("RESOURCE_EXHAUSTED:")[2].split())[:300].rstrip(".")
        raise ValueError(
            f"it was planned to fit and the compiler says it does not: {reason}. What would do: more devices, "
            "per_device=1, or remat=full"
        ) from error
    return compiled, (middle - start, time.perf_counter() - middle)


def table(title: str, ready, compiled, seconds: tuple[float, float]):
    """What the compiler counted beside what was estimated, of one device."""
    from rich import box
    from rich.table import Table

    out = Table(title=title, title_justify="left", title_style="bold", box=box.ROUNDED)
    out.add_column("of one device", style="cyan", no_wrap=True)
    out.add_column("compiled", justify="right")
    out.add_column("estimated", justify="right")
    for row in [*_memory(ready, compiled.memory_analysis()), *_work(ready, compiled.cost_analysis())]:
        out.add_row(*row)
    out.add_row("time to lower, to compile", "{:.1f} s, {:.1f} s".format(*seconds), "")
    return out


def _memory(ready, counted) -> list[tuple[str, str, str]]:
    from dovetail.plan.derive import PLANNED

    if counted is None:
        return [("memory in all", "not said", gib(ready.derived.memory.total))]
    new = counted.output_size_in_bytes - counted.alias_size_in_bytes
    parts = [
        ("arguments: state and batch", counted.argument_size_in_bytes),
        ("temporary", counted.temp_size_in_bytes),
        ("outputs not in their place", new),
        ("generated code", counted.generated_code_size_in_bytes),
    ]
    total, limit = sum(size for _, size in parts), ready.derived.limit
    share = f" ({total / (limit / PLANNED):.0%} of {gib(limit / PLANNED)})" if limit else ""
    rows = [(name, gib(size), "") for name, size in parts]
    return [*rows, ("memory in all", gib(total) + share, gib(ready.derived.memory.total))]


def _work(ready, counted) -> list[tuple[str, str, str]]:
    """As XLA counts them: a loop (microsteps, equal layers) once, and nothing inside of a Pallas kernel."""
    from dovetail.plan.plans import flops

    settings = ready.settings
    each = flops(ready.cfg, settings.length, settings.remat) * settings.tokens_per_step / ready.derived.devices
    found = counted or {}
    rows = [("FLOPs, a loop once", _count(found.get("flops")), f"{each:.3g}")]
    return [*rows, ("bytes accessed, a loop once", _count(found.get("bytes accessed")), "")]


def _count(value) -> str:
    return "not said" if value is None or value < 0 else f"{value:.3g}"


def gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**28 else f"{size / 2**20:.1f} MiB"
