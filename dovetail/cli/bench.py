"""`dovetail bench`: measure the speed of forward passes, the engine, a server and training."""

from typing import Any

import typer

from dovetail.cli.options import OptionCommand, takes_engine_options
from dovetail.core.errors import UserError

app = typer.Typer(
    help="Measure speed; forward and throughput can compare with transformers in the same run.", no_args_is_help=True
)


@app.command()
def forward(
    model: str = typer.Option("smollm2-135m", help="Folder, .gguf file, hub id or catalogue name."),
    peer: str = typer.Option("transformers", help="Peer to compare with: transformers or none."),
    tokens: int = typer.Option(2048, min=16, help="Tokens per batch."),
    seed: int = typer.Option(0, help="Seed of the random tokens."),
) -> None:
    """Measure tokens per second of a packed forward pass."""
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
    model: str = typer.Option("smollm2-135m", help="Folder, .gguf file, hub id or catalogue name."),
    config: str = typer.Option("", help="Folder with a config.json, in place of --model, for --load-format dummy."),
    streams: str = typer.Option("1,8,16,64", help="Numbers of concurrent requests; one row of the table each."),
    prompt: int = typer.Option(128, "--input", min=1, help="Tokens per prompt."),
    output: int = typer.Option(64, min=1, help="Tokens per completion."),
    peer: str = typer.Option("none", help="Peer to compare with: transformers or none."),
    arrivals: float = typer.Option(0.0, min=0.0, help="Seconds over which requests arrive at random; 0: all at once."),
) -> None:
    """Measure output tokens per second of the engine in this process."""
    from dovetail.cli.bench_throughput import run

    numbers = streams.split(",")
    if not all(each.strip().isdigit() and int(each) for each in numbers):
        raise UserError(f"--streams must be numbers with commas between, such as 1,8,64, got {streams!r}")
    run(config or model, engine, [int(each) for each in numbers], prompt, output, peer, arrivals)


@app.command()
def serve(
    url: str = typer.Option("http://127.0.0.1:8000", help="Address of a running server."),
    rate: float = typer.Option(0.0, min=0.0, help="Requests per second at random times (open loop); inf: all at once."),
    concurrency: int = typer.Option(
        0, min=0, help="Concurrent requests (closed loop), in place of --rate. Default: 8."
    ),
    requests: int = typer.Option(64, min=1, help="Number of requests."),
    prompt: int = typer.Option(128, "--input", min=1, help="Tokens per prompt."),
    output: int = typer.Option(64, min=1, help="Tokens per completion."),
    model: str = typer.Option("", help="Name of the model on the server. Default: the first one."),
    vocab: int = typer.Option(
        0, min=0, show_default=False, help="Vocabulary of the random prompts. Default: the server's, or 1,000."
    ),
    api_key: str = typer.Option("", envvar="DOVETAIL_API_KEY", show_envvar=True, help="API key of the server."),
    seed: int = typer.Option(0, help="Seed of the prompts and arrival times."),
    warm_up: int = typer.Option(
        None,
        min=0,
        help="Number of warm-up requests. Default: rounds of the load's concurrency until the server stops compiling.",
    ),
    timeout: float = typer.Option(600.0, min=0.1, help="Seconds without data after which a request fails."),
    plot: str = typer.Option("", help="Plot TTFT, E2E and tok/s over time to this .svg file."),
    json: str = typer.Option("", help="Write all measurements, also of each request, to this file."),
) -> None:
    """Measure latency and throughput of a running server under load."""
    from dovetail.cli.bench_load import Load
    from dovetail.cli.bench_serve import run

    load = Load(
        requests=requests, rate=rate, concurrency=concurrency or (0 if rate else 8), input=prompt, output=output,
        seed=seed,
    )  # fmt: skip
    run(url, api_key, model, load, vocab, warm_up, timeout, plot, json)


@app.command()
def train(
    model: str = typer.Option("tiny", help="Name of a shipped model, or folder with a config.json."),
    batch: int = typer.Option(8, min=1, help="Rows per step."),
    length: int = typer.Option(256, min=2, help="Tokens per row."),
    steps: int = typer.Option(10, min=1, help="Number of timed steps."),
    documents: int = typer.Option(4, min=1, help="Documents packed into a row."),
    trace: str = typer.Option("", help="Write a profiler trace of the timed steps to this folder."),
    overrides: list[str] = typer.Argument(None, help="Overrides, such as remat=dots optimizer.name=muon."),
) -> None:
    """Measure tokens per second of the training step and its MFU."""
    from dovetail.cli.bench_train import run

    run(model, batch, length, steps, documents, overrides or [], trace)
