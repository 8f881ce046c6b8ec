"""Share helpers for whole runs: a model of one layer and a few thousand weights, and deterministic rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

from dovetail.core.recipe import read
from dovetail.core.reporter import Reporter
from dovetail.core.types import Batch
from dovetail.train import run as runs
from dovetail.train.next_token import next_token
from dovetail.train.prepare import prepare
from dovetail.train.rows import Opened
from dovetail.train.run import RunResult
from dovetail.train.settings import Pretrain

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 257,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "eos_token_id": 256, "hidden_act": "silu",
}  # fmt: skip
RECIPE = {
    "batch": 8, "length": 32, "steps": 12, "optimizer": {"lr": 1e-2}, "precision": {"compute": "f32"},
    "checkpoint": {"every": 4}, "data": {"sources": [{"path": "made here"}]},
}  # fmt: skip


def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def settings_for(tmp_path: Path, **changes) -> Pretrain:
    return read(Pretrain, {**RECIPE, "model": str(model_folder(tmp_path)), **changes})


class Numbers:
    """Rows that count upwards from a start drawn by the row's number: easy to learn. `spoil` changes a batch."""

    def __init__(self, settings: Pretrain, spoil=lambda index, batch: batch):
        self.settings, self.spoil, self.read = settings, spoil, []

    def batch(self, step: int) -> Batch:
        rows, length = self.settings.batch, self.settings.length
        start = np.random.default_rng(step).integers(0, 200, (rows, 1))
        numbers = (start + np.arange(length + 1)) % 200
        tokens, targets = numbers[:, :-1].astype(np.int32), numbers[:, 1:].astype(np.int32)
        positions = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
        mask = np.ones(tokens.shape, np.float32)
        return self.spoil(step, Batch(tokens, targets, positions, np.ones_like(tokens), mask))

    def iterate(self, start_step: int = 0) -> Iterator[Batch]:
        while True:
            self.read.append(start_step)
            yield self.batch(start_step)
            start_step += 1

    def documents(self, step: int) -> int:
        return 1

    def notes(self, step: int) -> dict[str, float]:
        return {}


def not_a_number(*indices: int):
    """Batches whose loss is nan."""

    def spoil(index: int, batch: Batch) -> Batch:
        return replace(batch, loss_mask=np.full_like(batch.loss_mask, np.nan)) if index in indices else batch

    return spoil


def run(
    settings: Pretrain, folder: Path, spoil=lambda index, batch: batch, devices: int = 1, lines: list | None = None
) -> tuple[int, RunResult]:
    """Run on the first devices; return (exit code, the run), and put the reported lines into `lines`."""
    ready = prepare(settings, next_token(settings), jax.devices()[:devices])
    reporter = Reporter(show=False)
    one = runs.run(ready, folder, Opened(Numbers(settings, spoil), Numbers(settings)), reporter=reporter)
    if lines is not None:
        lines += reporter.lines
    return one.code, one


def metrics(folder: Path) -> list[dict]:
    """What each step said, without what the clock says."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: line[k] for k in ("step", "loss", "grad_norm", "lr") if k in line} for line in lines]


def weights(one: RunResult) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(one.at.state.params)]
