"""`dovetail bench`: speed, beside a peer's."""

from typing import Any

import typer

from dovetail.cli.options import OptionCommand, takes_engine_options

app = typer.Typer(help="Measure speed, beside a peer in the same run.", no_args_is_help=True)


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


@app.command(cls=OptionCommand)
@takes_engine_options(
    defaults={"max_model_len": None, "max_num_seqs": None},
    help={
        "max_model_len": "Maximum length of prompt and output together. Default: --input plus --output.",
        "max_num_seqs": "Maximum number of sequences per step. Default: the largest of --streams.",
    },
)
def throughput(
    engine: dict[str, Any],
    model: str = typer.Option("smollm2-135m", help="A folder, .gguf file, hub id or catalogue name."),
    config: str = typer.Option("", help="A folder with a config.json, in place of --model, for --load-format dummy."),
    streams: str = typer.Option("1,8,16,64", help="How many requests at once; one row of the table per number."),
    prompt: int = typer.Option(128, "--input", min=1, help="Tokens of each prompt."),
    output: int = typer.Option(64, min=1, help="Tokens of each answer."),
    peer: str = typer.Option("none", help="What to compare with: transformers, or none."),
    arrivals: float = typer.Option(0.0, min=0.0, help="Seconds over which the streams come, at random; 0: at once."),
) -> None:
    """Output tokens per second of the engine."""
    from dovetail.cli.bench_throughput import run

    run(config or model, engine, [int(n) for n in streams.split(",")], prompt, output, peer, arrivals)


@app.command()
def serve(
    url: str = typer.Option("http://127.0.0.1:8000", help="The server, which must be running."),
    rate: float = typer.Option(
        0.0, min=0.0, help="Requests per second, at random moments, however slow the server is; inf: at once."
    ),
    concurrency: int = typer.Option(0, min=0, help="In place of --rate: so many at a time (8, if neither is given)."),
    requests: int = typer.Option(64, min=1, help="How many in all."),
    prompt: int = typer.Option(128, "--input", min=1, help="Tokens of each prompt."),
    output: int = typer.Option(64, min=1, help="Tokens of each answer."),
    model: str = typer.Option("", help="What the server calls the model; otherwise its first."),
    vocab: int = typer.Option(0, min=0, help="Prompts are of ids below it; 0: what the server says, or 1,000."),
    api_key: str = typer.Option("", envvar="DOVETAIL_API_KEY", show_envvar=True, help="The server's key."),
    seed: int = typer.Option(0, help="Of the prompts and the moments at which they are sent."),
    warm_up: int = typer.Option(
        None,
        min=0,
        help="Requests before the clock starts: one, then the others at once; otherwise one, then as many "
        "at a time as the load has, until the server compiles no more.",
    ),
    timeout: float = typer.Option(600.0, min=0.1, help="Seconds of silence after which a request has failed."),
    plot: str = typer.Option("", help="Draw TTFT, E2E and tok/s over time into this .svg file."),
    json: str = typer.Option("", help="Write all figures, and each request's, into this file."),
) -> None:
    """Latency and throughput of a running server under load."""
    from dovetail.cli.bench_load import Load
    from dovetail.cli.bench_serve import run

    load = Load(
        requests=requests, rate=rate, concurrency=concurrency or (0 if rate else 8), input=prompt, output=output,
        seed=seed,
    )  # fmt: skip
    run(url, api_key, model, load, vocab, warm_up, timeout, plot, json)


@app.command()
def train(
    model: str = typer.Option("tiny", help="A shipped model's name, or a folder with a config.json."),
    batch: int = typer.Option(8, min=1, help="Rows of a step."),
    length: int = typer.Option(256, min=2, help="Tokens of a row."),
    steps: int = typer.Option(10, min=1, help="Steps that are timed."),
    documents: int = typer.Option(4, min=1, help="Documents packed into each row."),
    trace: str = typer.Option("", help="Write a profiler trace of the timed steps into this folder."),
    overrides: list[str] = typer.Argument(None, help="Recipe keys, such as remat=dots optimizer.name=muon."),
) -> None:
    """Tokens per second of the training step, and its share of the chip's peak."""
    from dovetail.cli.bench_train import run

    run(model, batch, length, steps, documents, overrides or [], trace)
