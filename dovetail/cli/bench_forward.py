"""`dovetail bench forward`: the same documents through the packed forward pass and through transformers."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from dovetail.core.errors import MissingPackageError, UserError

ROUNDS = 5


def run(model: str, peer: str, tokens: int, seed: int) -> None:
    """Print tokens per second on documents of mixed and of equal lengths, ours and the peer's in alternation."""
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
