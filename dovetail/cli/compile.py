"""`dovetail compile`: a recipe's step, or an engine's, compiled for hardware that need not be here."""

from typing import Any

import typer
from typer.core import TyperGroup

from dovetail.cli.serve import ADAPTER, adapters_named, engine_option

TOPOLOGY = typer.Option(..., help="A TPU slice: v5e:16x16, v4:2x2x1, v5p:4x4x4, v6e:8x8, 7x:2x2x1.")
JSON = typer.Option(False, "--json", help="The same as JSON.")


class RecipeUnlessNamed(TyperGroup):
    """`dovetail compile tiny` is `dovetail compile recipe tiny`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = not args or args[0] in self.commands or args[0] in ctx.help_option_names
        return super().parse_args(ctx, args if named else ["recipe", *args])


app = typer.Typer(
    cls=RecipeUnlessNamed,
    help="Compile a recipe's step, or an engine's, for machines that are not here.",
    no_args_is_help=True,
)


@app.command("recipe")
def compile_recipe(
    recipe: str = typer.Argument(help="A recipe's name or file."),
    overrides: list[str] = typer.Argument(None, metavar="[KEY=VALUE]...", help="Such as per_device=2."),
    topology: str = typer.Option(..., help=f"{TOPOLOGY.help} Or gpu: those here."),
    slices: int = typer.Option(0, min=0, help="Slices of that topology, joined by a slower network; 1 if not given."),
    as_json: bool = JSON,
) -> None:
    """The step of RECIPE; `dovetail compile RECIPE` is short for it."""
    from dovetail.plan import topology as topologies

    wanted = None if topology.strip().lower() == "gpu" else topologies.parse(topology)
    if wanted:
        topologies.without_hardware()

    from dovetail.cli.compile_recipe import compile_recipe

    words = [*(overrides or []), *([f"mesh.slices={slices}"] if slices else [])]
    compile_recipe(recipe, words, topology, wanted, as_json)


@app.command("serve")
def compile_serve(
    model: str = typer.Argument(
        help="A folder, .gguf file, hub id (its config alone is fetched), shipped architecture or config.json."
    ),
    topology: str = TOPOLOGY,
    dtype: str = engine_option("dtype", help="bf16, f32 or f16; otherwise the weights' own, or bf16."),
    max_model_len: int = engine_option("max_model_len", min=0),
    max_num_seqs: int = engine_option("max_num_seqs", min=1),
    max_num_batched_tokens: int = engine_option("max_num_batched_tokens", 8192, "Most tokens in one step.", min=1),
    memory_fraction: float = engine_option("memory_fraction", min=0.01, max=1.0),
    tensor_parallel: int = engine_option(
        "tensor_parallel", 0, "Devices to split the model over; all that the topology has if not given.", min=0
    ),
    adapter: list[str] = ADAPTER,
    max_adapters: int = engine_option("max_adapters", min=0),
    max_adapter_rank: int = engine_option("max_adapter_rank", min=1),
    as_json: bool = JSON,
) -> None:
    """The engine's steps for MODEL: decode with the fewest and the most rows, the largest step of prompts."""
    from dovetail.plan import topology as topologies

    wanted = topologies.parse(topology)
    topologies.without_hardware()

    from dovetail.cli.compile_serve import compile_serve

    options = dict(
        dtype=dtype or None, max_model_len=max_model_len or None, max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens, memory_fraction=memory_fraction, tensor_parallel=tensor_parallel,
        adapters=adapters_named(adapter), max_adapters=max_adapters, max_adapter_rank=max_adapter_rank,
    )  # fmt: skip
    compile_serve(model, wanted, options, as_json)
