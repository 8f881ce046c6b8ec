"""A reference's log-probabilities of all examples, computed once and kept in the run's folder: with them on disk, no
second model is in memory while the first is trained."""

from __future__ import annotations

import hashlib
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dovetail.core.types import Batch
from dovetail.data.example_rows import ExampleRows
from dovetail.train.objective import step_context
from dovetail.train.prepare import Ready
from dovetail.tune.policy import frozen_model
from dovetail.tune.preference import target_logprobs
from dovetail.tune.settings import Dpo

FILE = "reference.npz"


def with_reference(
    rows: ExampleRows, held_out: ExampleRows | None, settings: Dpo, ready: Ready, folder: Path
) -> tuple[ExampleRows, ExampleRows | None]:
    """The rows with the column `reference`."""
    if jax.process_count() > 1:
        raise ValueError("preference.reference=disk is for one process: set it to live where several train together")
    values = _kept(folder / FILE, rows, settings)
    if values is None:
        values = _computed(rows.every_document(), settings, ready)
        _keep(folder / FILE, values, settings)
    offsets = rows.examples.offsets
    by_document = [values[start:stop] for start, stop in pairwise(offsets)]
    return rows.with_column("reference", by_document), held_out and held_out.with_column("reference", by_document)


def _computed(rows: ExampleRows, settings: Dpo, ready: Ready) -> np.ndarray:
    """A number for each token of the examples, one after another; `rows` have the column `document`."""
    weights, offsets = ready.frozen, rows.examples.offsets
    if weights is None:
        base = frozen_model(settings.weights, settings.held, settings.precision.compute)
        weights = base.load(ready.cfg, ready.placement)
    ctx = step_context(ready.settings, ready.placement, ready.platform)
    score = jax.jit(lambda weights, batch: target_logprobs(weights, ready.cfg, batch, ctx))
    values = np.zeros(int(offsets[-1]), np.float32)
    for step in range(rows.steps_per_epoch):
        batch: Any = rows.batch(step)
        there = batch.segment_ids > 0
        place = offsets[batch.columns["document"][there] - 1] + batch.positions[there]
        with ctx.compute.products(ctx.platform):
            values[place] = np.asarray(score(weights, _put(batch, ready)))[there]
    return values


def _put(batch: Batch, ready: Ready) -> Batch:
    form = ready.batch_form
    usual = {name: getattr(batch, name) for name in ("tokens", "targets", "positions", "segment_ids", "loss_mask")}
    put = {n: jax.device_put(np.asarray(x, (f := getattr(form, n)).dtype), f.sharding) for n, x in usual.items()}
    return Batch(**put)


def _key(settings: Dpo) -> str:
    return hashlib.sha256(json.dumps([settings.rows_key, settings.weights, settings.held]).encode()).hexdigest()


def _keep(path: Path, values: np.ndarray, settings: Dpo) -> None:
    beside = path.with_name(f".{path.name}")
    with beside.open("wb") as file:
        np.savez(file, values=values, key=np.asarray(_key(settings)))
    beside.rename(path)


def _kept(path: Path, rows: ExampleRows, settings: Dpo) -> np.ndarray | None:
    """What an earlier start computed; None: nothing, or for other rows."""
    if not path.exists():
        return None
    found: Any = np.load(path)
    fits = str(found["key"]) == _key(settings) and len(found["values"]) == rows.examples.offsets[-1]
    return found["values"] if fits else None
