"""`dovetail compile`: compile the step of a recipe or of an engine for hardware that need not be present."""

from dataclasses import dataclass, field
from typing import Any

import typer
from typer.core import TyperGroup

from dovetail.cli.options import OptionCommand, takes_engine_options
from dovetail.core.errors import OutOfMemoryError
from dovetail.core.units import format_bytes, format_duration

TOPOLOGY = typer.Option(..., help="TPU slice: v5e:16x16, v4:2x2x1, v5p:4x4x4, v6e:8x8, 7x:2x2x1.")
JSON = typer.Option(False, "--json", help="Print JSON.")


class RecipeUnlessNamed(TyperGroup):
    """Read `dovetail compile tiny` as `dovetail compile recipe tiny`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert `recipe` unless the first word names a command."""
        named = not args or args[0] in self.commands or args[0] in ctx.help_option_names
        return super().parse_args(ctx, args if named else ["recipe", *args])


app = typer.Typer(
    cls=RecipeUnlessNamed,
    help="Compile the step of a recipe or of an engine for hardware that is not present.",
    no_args_is_help=True,
)


@app.command("recipe")
def compile_recipe(
    recipe: str = typer.Argument(help="Name or file of a recipe."),
    overrides: list[str] = typer.Argument(None, metavar="[KEY=VALUE]...", help="Overrides, such as per_device=2."),
    topology: str = typer.Option(..., help=f"{TOPOLOGY.help} Or gpu: the GPUs of this machine."),
    slices: int = typer.Option(
        0, min=0, show_default=False, help="Number of slices, connected by the data-center network. Default: 1."
    ),
    as_json: bool = JSON,
) -> None:
    """Compile the training step of RECIPE; `dovetail compile RECIPE` is short for it."""
    from dovetail.plan import topology as topologies

    wanted = None if topology.strip().lower() == "gpu" else topologies.parse(topology)
    if wanted:
        topologies.without_hardware()

    from rich.console import Console

    ready = _ready(recipe, [*(overrides or []), *([f"mesh.slices={slices}"] if slices else [])], wanted)
    slices, console = ready.settings.mesh.slices, Console(highlight=False, stderr=as_json)
    for line in ready.derived.explain():
        console.print(line, markup=False)
    with console.status(f"compiling {recipe} for {ready.derived.devices} devices"):
        found = compiled(lambda options: ready.compile(ready.bucket(1), options=options))
    title = f"{recipe} on {f'{slices} x ' if slices > 1 else ''}{topology}"
    head = dict(recipe=recipe, topology=topology, slices=slices, devices=ready.derived.devices, mesh=ready.derived.axes)
    show(head, [recipe_report(title, ready, *found)], as_json)


def _ready(recipe: str, words: list[str], wanted):
    """Prepare the training on `wanted`, a parsed topology, or on the GPUs of this machine."""
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


@app.command("serve", cls=OptionCommand)
@takes_engine_options(
    defaults={"tensor_parallel_size": None, "max_num_batched_tokens": 8192},
    help={
        "tensor_parallel_size": "Number of devices to split the model over. Default: all of the topology.",
        "dtype": "Compute type: bf16, f32 or f16. Default: the type of the weights, or bf16.",
        "max_num_batched_tokens": "Maximum number of tokens per step.",
    },
)
def compile_serve(
    engine: dict[str, Any],
    model: str = typer.Argument(
        help="Folder, .gguf file, hub id (only its config is downloaded), shipped architecture or config.json."
    ),
    topology: str = TOPOLOGY,
    as_json: bool = JSON,
) -> None:
    """Compile the engine's smallest and largest decode and verify steps, its largest prompt step and encoder calls."""
    from dovetail.plan import topology as topologies

    wanted = topologies.parse(topology)
    topologies.without_hardware()

    from rich.console import Console

    from dovetail.engine.build import abstract_engine
    from dovetail.engine.options import EngineOptions
    from dovetail.io.load import outline

    (cfg, dtype), devices = outline(model), topologies.tpu_devices(wanted)
    degree = engine["tensor_parallel_size"] or len(devices)
    given = EngineOptions.of(engine | dict(dtype=engine["dtype"] or dtype, tensor_parallel_size=degree))
    given = given.with_own_draft(model)
    console, reports = Console(highlight=False, stderr=as_json), []
    with console.status(f"compiling the largest step of {model} for {wanted}") as status:
        made, *_ = compiled(lambda _: abstract_engine(cfg, given, devices))
        for shape in made.corners():
            status.update(f"compiling {shape_title(shape)}")
            found = compiled(lambda options, shape=shape: made.compile(shape, options))
            reports.append(serve_report(model, made, shape, *found))
    tokens = made.pages * made.programs.page_size
    console.print(
        f"{model} on {degree} of {wanted}: per device {format_bytes(made.weight_bytes)} of weights and "
        f"{format_bytes(made.pool_bytes)} of KV cache, for {tokens:,} tokens in pages of {made.programs.page_size}"
    )
    head = dict(
        model=model, topology=str(wanted), tensor_parallel_size=degree, weight_bytes=made.weight_bytes,
        pool_bytes=made.pool_bytes, pages=made.pages, page_size=made.programs.page_size,
    )  # fmt: skip
    show(head, reports, as_json)


# --- the report -------------------------------------------------------------------------------------------------------


@dataclass
class CompileReport:
    """Compare a compiled program with its estimate.

    `estimated` maps kinds of memory, "memory in all" and "FLOPs" to numbers; `notes` are further rows.
    """

    title: str
    counted: Any  # plan.compiled.Counted
    predicted: Any  # plan.compiled.RooflineBounds, or None where the chip is not in the table
    estimated: dict[str, float]
    limit: int | None  # bytes of a device's memory
    seconds: float  # to lower and compile
    notes: dict[str, str] = field(default_factory=dict)


def compiled(make) -> tuple[Any, int | None, float]:
    """Call `make` with compiler options and return (its result, the bytes of its buffers, seconds).

    Raises:
        OutOfMemoryError: The compiler found that the program does not fit.
    """
    import tempfile
    import time

    from jax.errors import JaxRuntimeError

    from dovetail.io.compiled import without_cache
    from dovetail.plan.compiled import assigned, written_to

    start = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory() as folder, without_cache():
            return make(written_to(folder)), assigned(folder), time.perf_counter() - start
    except JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = " ".join(str(error).partition("RESOURCE_EXHAUSTED:")[2].split())[:300].rstrip(".")
        raise OutOfMemoryError(
            f"the program does not fit, although the plan expected it to: {reason}. Use more devices; for a recipe set "
            "per_device=1 or remat=full, for an engine lower gpu_memory_utilization"
        ) from error


def recipe_report(title: str, ready, program, assigned: int | None, seconds: float) -> CompileReport:
    """Compare the compiled training step with the plan of its recipe."""
    from dovetail.core.chips import chip_of
    from dovetail.plan.compiled import count, predict
    from dovetail.plan.flops import computed_flops
    from dovetail.plan.train_memory import PLANNED

    mesh, settings, limit = ready.placement.mesh, ready.settings, ready.derived.limit
    devices, chip = list(mesh.devices.flat), chip_of(mesh.devices.flat[0])
    counted = count(program, dict(mesh.shape), devices, assigned=assigned)
    each = computed_flops(ready.cfg, settings.length, settings.remat) * settings.tokens_per_step / len(devices)
    # the state and the saved activations are written and read
    held = 2 * (counted.memory.get("arguments", 0) + counted.memory.get("temporary", 0))
    moved = max(held, counted.bytes or 0)
    predicted = predict(chip, each, (moved, moved), counted.traffic, devices) if chip else None
    estimated = {"memory in all": ready.derived.memory.total, "FLOPs": each}
    return CompileReport(title, counted, predicted, estimated, int(limit / PLANNED) if limit else None, seconds)


def serve_report(model: str, made, shape, program, assigned: int | None, seconds: float) -> CompileReport:
    """Compare a compiled step or encoder call of the engine with what was estimated."""
    from dovetail.core.chips import chip_of
    from dovetail.engine.device.encoder import EncoderShape
    from dovetail.plan.compiled import count, predict

    devices = made.programs.devices
    chip = chip_of(devices[0])
    counted = count(program, {"tensor": len(devices)}, devices, made.layer_shapes, assigned)
    flops = made.flops(shape)
    predicted = predict(chip, flops, made.moved(shape), counted.traffic, devices) if chip else None
    parts, notes = (_encoder_parts if isinstance(shape, EncoderShape) else _step_parts)(made, shape, counted)
    estimated = parts | {"arguments": made.argument_bytes(shape), "FLOPs": flops}
    limit = chip.device_hbm if chip else None
    return CompileReport(f"{model}, {shape_title(shape)}", counted, predicted, estimated, limit, seconds, notes)


def _step_parts(made, shape, counted) -> tuple[dict[str, float], dict[str, str]]:
    """Return the estimated parts of a step's arguments, and further rows."""
    copies = counted.pool_copies
    notes = {
        "pool copied": f"{len(copies)} x: {copies[0]}" if copies else "no",
        "paged attention": "; ".join(made.kernels(shape)),
    }
    return {"weights": made.weight_bytes - made.tower_bytes, "KV pages": made.pool_bytes}, notes


def _encoder_parts(made, shape, counted) -> tuple[dict[str, float], dict[str, str]]:
    """Return the same of an encoder call, which runs between steps while the other weights and the pages stay."""
    from dovetail.core.spec import held_bytes

    parts = {"weights of the tower": made.tower_bytes, "features of images": held_bytes(made.programs.features)}
    beside = made.weight_bytes - made.tower_bytes + made.pool_bytes
    return parts, {"held beside it": format_bytes(beside)}


def shape_title(shape) -> str:
    """Return the title of a program: its kind and its size."""
    from dovetail.engine.device.encoder import EncoderShape

    if isinstance(shape, EncoderShape):
        return f"encoder: {shape.items} x {shape.patches} patches"
    kind = "verify" if shape.drafts else "decode" if shape.is_decode else "prompts"
    return f"{kind}: {shape.tokens} tokens in {shape.rows} rows"


def show(head: dict[str, Any], reports: list[CompileReport], as_json: bool) -> None:
    """Print the reports; `head` is what they have in common, for JSON."""
    import json

    from rich.console import Console

    if as_json:
        print(json.dumps({**head, "programs": [plain(report) for report in reports]}, indent=2))
        return
    console = Console(highlight=False)
    for report in reports:
        console.print(table(report))


def plain(report: CompileReport) -> dict[str, Any]:
    """Return the report as JSON types."""
    from dataclasses import asdict

    predicted = report.predicted and {
        **asdict(report.predicted), "least": report.predicted.least, "most": report.predicted.most,
        "bound_by": report.predicted.bound_by,
    }  # fmt: skip
    return {
        "title": report.title, "compiled": report.counted.plain(), "estimated": report.estimated, "limit": report.limit,
        "predicted_seconds": predicted, "compile_seconds": report.seconds, **report.notes,
    }  # fmt: skip


def table(report: CompileReport):
    """Return a table of what the compiler counted beside the estimate, per device."""
    from dovetail.cli.tables import framed

    out = framed(report.title)
    out.add_column("per device", style="cyan")
    out.add_column("compiled", justify="right")
    out.add_column("estimated", justify="right")
    for row in [*_memory(report), *_work(report), *_sent(report), *_time(report)]:
        out.add_row(*row)
    for name, value in report.notes.items():
        out.add_row(name, value, "")
    out.add_row("time to lower and compile", f"{report.seconds:.1f} s", "")
    return out


def _memory(report: CompileReport) -> list[tuple[str, str, str]]:
    estimated = {name: format_bytes(size) for name, size in report.estimated.items() if name != "FLOPs"}
    counted, total = report.counted.memory, report.counted.total
    rows = [(name, format_bytes(size), estimated.pop(name, "")) for name, size in counted.items()]
    share = f" ({total / report.limit:.0%} of {format_bytes(report.limit)})" if report.limit and counted else ""
    whole = ("memory in all", format_bytes(total) + share if counted else "unknown", estimated.pop("memory in all", ""))
    return [*((name, "", size) for name, size in estimated.items()), *rows, whole]


def _work(report: CompileReport) -> list[tuple[str, str, str]]:
    """Return FLOPs and bytes as XLA counts them: a loop body once, and nothing inside a Pallas kernel."""
    each = _count(report.estimated.get("FLOPs"))
    rows = [("FLOPs, a loop once", _count(report.counted.flops), each)]
    rows += [("bytes accessed, a loop once", _count(report.counted.bytes), "")]
    return rows + [(f"kernel {name}", f"{calls} x", "") for name, calls in report.counted.kernels.items()]


def _sent(report: CompileReport) -> list[tuple[str, str, str]]:
    rows = []
    for one in report.counted.traffic:
        where = f"{one.kind} over {', '.join(one.axes)}" + (", between slices" if one.crosses else "")
        rows.append((where, f"{one.count} x, sends {format_bytes(one.bytes)}", ""))
    return rows or [("collectives", "none", "")]


def _time(report: CompileReport) -> list[tuple[str, str, str]]:
    found = report.predicted
    if found is None:
        return []
    low = f"{format_duration(found.least)} ({found.bound_by})"
    return [("step at peak rates, at least", "", low), ("  nothing overlapping", "", format_duration(found.most))]


def _count(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g}"
