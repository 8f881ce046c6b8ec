"""`dovetail bench`: measure the speed of forward passes, the engine, a server and training."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from dovetail.cli.options import OptionCommand, takes_engine_options
from dovetail.core.errors import MissingPackageError, UserError

ROUNDS = 5  # of `forward`: each computes every workload once, ours and the peer's in alternation

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
    from rich.console import Console
    from rich.table import Table

    import dovetail as dt
    from dovetail.core.reporter import bar

    if peer not in ("transformers", "none"):
        raise UserError(f"--peer must be transformers or none, got {peer!r}", param="--peer")
    with bar() as progress:
        ours = dt.load(model, dtype="f32", progress=progress)
    theirs = _transformers(ours) if peer == "transformers" else None
    table = Table("documents", "tokens", "dovetail tok/s", *(["transformers tok/s", "ratio"] if theirs else []))
    for name, lengths in _workloads(tokens, seed).items():
        docs = _documents(ours.config.vocab, lengths, seed)
        calls = {"ours": _packed_call(ours, docs)} | ({"theirs": _padded_call(theirs, docs)} if theirs else {})
        rates = {key: sum(lengths) / seconds for key, seconds in _time_by_turns(calls).items()}
        row = [name, f"{sum(lengths):,}", *(f"{rate:,.0f}" for rate in rates.values())]
        table.add_row(*row, *([f"{rates['ours'] / rates['theirs']:.2f}x"] if theirs else []))
    Console().print(table)


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
    images: int = typer.Option(
        0, "--random-mm-base-items-per-request", min=0, help="Random images per request; --input counts words then."
    ),
    buckets: str = typer.Option(
        "{(256, 256, 1): 0.5, (720, 1280, 1): 0.5}",
        "--random-mm-bucket-config",
        help="Height, width and frames (1) of the images, with their probabilities.",
    ),
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
    from dovetail.cli.bench_images import RandomImages
    from dovetail.cli.bench_load import Load
    from dovetail.cli.bench_serve import run

    load = Load(
        requests=requests, rate=rate, concurrency=concurrency or (0 if rate else 8), input=prompt, output=output,
        seed=seed, images=RandomImages.parse(images, buckets) if images else None,
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


# --- forward: the same documents through the packed forward pass and through transformers -----------------------------


def _workloads(tokens: int, seed: int) -> dict[str, list[int]]:
    """Return document lengths: mixed as in a corpus, and equal ones, for which the peer needs no padding."""
    import numpy as np

    rng, ragged = np.random.default_rng(seed), []
    while sum(ragged) < tokens:
        ragged.append(min(int(rng.integers(16, 257)), tokens - sum(ragged)))
    length = min(128, tokens)
    return {"mixed lengths": ragged, f"all of {length}": [length] * (tokens // length)}


def _documents(vocab: int, lengths: list[int], seed: int) -> list[list[int]]:
    import numpy as np

    rng = np.random.default_rng(seed + 1)
    return [rng.integers(0, vocab, n).tolist() for n in lengths]


def _packed_call(model, docs: list[list[int]]) -> Callable[[], None]:
    import jax

    from dovetail.core.types import Packed
    from dovetail.models.decoder import forward, unembed

    tokens, positions, segments = _pack(docs, max(map(len, docs)))
    cfg = model.config

    @jax.jit
    def logits(params, tokens, positions, segments):
        with model.compute.products():
            hidden, _ = forward(params, cfg, tokens, positions, Packed(segments))
            return unembed(params, cfg, hidden)

    return lambda: jax.block_until_ready(logits(model.params, tokens, positions, segments))


def _pack(docs: list[list[int]], width: int):
    """Pack first-fit into rows of `width` and return tokens, positions and segment ids [rows, width]."""
    import numpy as np

    rows: list[list[list[int]]] = []
    for doc in sorted(docs, key=len, reverse=True):
        row = next((r for r in rows if sum(map(len, r)) + len(doc) <= width), None)
        if row is None:
            rows.append(row := [])
        row.append(doc)
    shape = len(rows), width
    tokens, positions, segments = (np.zeros(shape, np.int32) for _ in range(3))
    for i, row in enumerate(rows):
        end = 0
        for number, doc in enumerate(row, 1):
            place = i, slice(end, end := end + len(doc))
            tokens[place], positions[place], segments[place] = doc, np.arange(len(doc)), number
    return tokens, positions, segments


def _transformers(model):
    """Return the same weights in transformers, through an exported folder."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise MissingPackageError(
            "--peer transformers needs torch and transformers: pip install 'dovetail[dev]'"
        ) from error
    from dovetail.io.load import save

    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder) / "model", model.config, model.params, None)
        peer = transformers.AutoModelForCausalLM.from_pretrained(Path(folder) / "model", dtype=torch.float32)
    return peer.eval()


def _padded_call(peer, docs: list[list[int]]) -> Callable[[], None]:
    import torch

    width = max(map(len, docs))
    ids = torch.tensor([doc + [0] * (width - len(doc)) for doc in docs])
    mask = torch.tensor([[1] * len(doc) + [0] * (width - len(doc)) for doc in docs])

    def call() -> None:
        with torch.inference_mode():
            peer(input_ids=ids, attention_mask=mask, use_cache=False)

    return call


def _time_by_turns(calls: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Return the median seconds of each call, measured in alternation so that other load affects both."""
    from dovetail.core.reporter import bar

    for call in calls.values():
        call()
    seconds: dict[str, list[float]] = {key: [] for key in calls}
    with bar() as progress:
        for i in range(ROUNDS):
            for key, call in calls.items():
                start = time.perf_counter()
                call()
                seconds[key].append(time.perf_counter() - start)
            progress("measuring", i + 1, ROUNDS)
    return {key: statistics.median(values) for key, values in seconds.items()}
