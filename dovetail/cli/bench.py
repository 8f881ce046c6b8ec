"""`dovetail bench`: how fast, against whom."""

import typer

app = typer.Typer(help="Measure speed, beside a peer in the same run.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    pass  # a callback keeps `forward` a subcommand while it is the only one


@app.command()
def forward(
    model: str = typer.Option("smollm2-135m", help="A folder, .gguf file, hub id or catalogue name."),
    peer: str = typer.Option("transformers", help="What to compare with: transformers, or none."),
    tokens: int = typer.Option(2048, min=16, help="Tokens in the batch."),
    seed: int = typer.Option(0, help="Seed of the random tokens."),
) -> None:
    """Tokens per second of a packed forward pass."""
    from dovetail.cli.bench_forward import run

    run(model=model, peer=peer, tokens=tokens, seed=seed)
