"""`dovetail compile`: compile the step of a recipe or of an engine for hardware that need not be present."""

from typing import Any

import typer
from typer.core import TyperGroup

from dovetail.cli.options import OptionCommand, takes_engine_options
from dovetail.core.units import format_bytes

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

    from dovetail.cli.compile_report import compiled, recipe_report, show

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
    """Compile the engine's smallest and largest decode steps and its largest prompt step for MODEL."""
    from dovetail.plan import topology as topologies

    wanted = topologies.parse(topology)
    topologies.without_hardware()

    from rich.console import Console

    from dovetail.cli.compile_report import compiled, serve_report, show
    from dovetail.engine.abstract_engine import abstract_engine
    from dovetail.engine.options import EngineOptions
    from dovetail.io.outline import outline

    (cfg, dtype), devices = outline(model), topologies.tpu_devices(wanted)
    degree = engine["tensor_parallel_size"] or len(devices)
    given = EngineOptions.of(engine | dict(dtype=engine["dtype"] or dtype, tensor_parallel_size=degree))
    console, reports = Console(highlight=False, stderr=as_json), []
    with console.status(f"compiling the largest step of {model} for {wanted}") as status:
        made, *_ = compiled(lambda _: abstract_engine(cfg, given, devices))
        for shape in made.corners():
            status.update(f"compiling a step of {shape.tokens} tokens in {shape.rows} rows")
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
