"""Compute columns of all examples with a frozen model, once, and keep them in the run's folder.

They are a reference's log-probabilities, a teacher's likeliest tokens, or a target's hidden states. With them on disk,
no second model is in memory during the training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.core.errors import UnsupportedError
from dovetail.core.files import open_atomic
from dovetail.core.fingerprint import fingerprint
from dovetail.core.recipe import dump
from dovetail.core.training import TorchModel
from dovetail.core.types import Batch, Params
from dovetail.data.example_rows import ExampleLoader
from dovetail.data.pictures import COLUMNS
from dovetail.models.config import ModelConfig
from dovetail.models.decoder import tapped
from dovetail.train.external import model_config
from dovetail.train.objective import StepContext, step_context
from dovetail.train.prepare import Ready
from dovetail.train.step import compute_copy
from dovetail.tune.distill import likeliest
from dovetail.tune.policy import frozen_model, policy_of
from dovetail.tune.preference import target_logprobs
from dovetail.tune.settings import Distill, Dpo, Draft, Tuning, rows_key

Values = dict[str, np.ndarray]  # by column: [tokens, ...] for the tokens of all examples, end to end


@dataclass(frozen=True)
class Computed:
    """A column to compute."""

    name: str  # of its file
    key: str  # the setting that asks for it, for an error
    weights: str | TorchModel  # the frozen model: a folder, a name, or a torch module
    cfg: ModelConfig  # its config
    score: Callable[[Params, Batch, StepContext], dict[str, jax.Array]]
    on_adapter: bool = False  # whether the frozen model has the adapters that the run starts from
    layers: tuple[int, ...] = ()  # whose outputs are kept


def computed_for(settings: Tuning, ready: Ready) -> Computed | None:
    """Return the columns that the rows need; None: none."""
    if isinstance(settings, Dpo) and settings.preference.source == "disk":
        on_adapter = bool(settings.from_adapter) and settings.reference.model == "policy"
        of = settings.reference.model
        weights, cfg = (of, model_config(of)) if isinstance(of, TorchModel) else (settings.weights, ready.cfg)
        return Computed(
            "reference.npz", "preference.reference", weights, cfg,
            lambda params, batch, ctx: {"reference": target_logprobs(params, cfg, batch, ctx)}, on_adapter,
        )  # fmt: skip
    if isinstance(settings, Distill) and settings.distillation.teacher == "disk":
        cfg, k = settings.teacher_cfg, settings.distillation.top_k
        assert cfg is not None, "tune.policy.with_teacher_cfg fills it in"

        def top_tokens(params: Params, batch: Batch, ctx: StepContext) -> dict[str, jax.Array]:
            return dict(zip(("teacher_tokens", "teacher_logprobs"), likeliest(params, cfg, batch, ctx, k), strict=True))

        return Computed("teacher.npz", "distillation.teacher", settings.teacher, cfg, top_tokens)
    if isinstance(settings, Draft) and settings.drafter.hidden_states == "disk":
        taps = settings.model_to_train.model.taps

        def states(params: Params, batch: Batch, ctx: StepContext) -> dict[str, jax.Array]:
            final, _, seen = tapped(params, ready.cfg, batch.tokens, batch.positions, ctx.packed(batch), taps=taps)
            assert seen is not None
            return {"taps": seen.astype(jnp.float32), "final": final.astype(jnp.float32)}

        key = "drafter.hidden_states"
        return Computed("hidden_states.npz", key, settings.weights, ready.cfg, states, layers=taps)
    return None


def with_columns(
    wanted: Computed, rows: ExampleLoader, held_out: ExampleLoader | None, settings: Tuning, ready: Ready, folder: Path
) -> tuple[ExampleLoader, ExampleLoader | None]:
    """Return the rows with the computed columns, from the run's folder or computed now."""
    if jax.process_count() > 1:
        raise UnsupportedError(
            f"{wanted.key}=disk works in one process only, got {jax.process_count()}: set {wanted.key}=live",
            param=wanted.key,
        )
    adapters = _adapters(wanted, settings, ready)
    content: list[Any] = [np.asarray(leaf) for leaf in jax.tree.leaves(adapters)]
    content += [wanted.layers] if wanted.layers else []
    key = fingerprint(rows_key(settings), rows.fingerprints, _name(wanted.weights), settings.held, *content)
    values = _kept(folder / wanted.name, key)
    if values is None:
        values = _compute(wanted, adapters, rows.every_document(), settings, ready)
        _keep(folder / wanted.name, key, values)
    for name, flat in values.items():
        rows, held_out = rows.with_column(name, flat), held_out and held_out.with_column(name, flat)
    return rows, held_out


def _name(weights: str | TorchModel) -> Any:
    return weights if isinstance(weights, str) else dump(weights)


def _adapters(wanted: Computed, settings: Tuning, ready: Ready) -> Params | None:
    """Return the adapters that the run starts with, if the frozen model has them."""
    if not wanted.on_adapter:
        return None
    initial = policy_of(settings).initial
    assert initial is not None, "from_adapter is set"
    return initial(ready)


def _compute(wanted: Computed, adapters: Params | None, rows: ExampleLoader, settings: Tuning, ready: Ready) -> Values:
    """Score all documents; `rows` have the column `document`."""
    same = wanted.weights == settings.weights
    cfg = ready.cfg if same else wanted.cfg
    frozen = ready.frozen if same and settings.lora else None
    if frozen is None:
        frozen = frozen_model(wanted.weights, settings.held, settings.precision.compute).load(cfg, ready.placement)
    ctx, offsets = step_context(ready.settings, ready.placement, ready.platform), rows.examples.offsets

    def scored(frozen: Params, adapters: Params | None, batch: Batch) -> dict[str, jax.Array]:
        if adapters is None:
            return wanted.score(frozen, batch, ctx)
        own = compute_copy(adapters, ready.specs, ctx.compute)
        return wanted.score(policy_of(settings).params(own, replace(ctx, frozen=frozen)), batch, ctx)

    score, values = jax.jit(scored), {}
    for step in range(rows.steps_per_epoch):
        batch: Any = rows.batch(step)
        there = batch.segment_ids > 0
        place = offsets[batch.columns["document"][there] - 1] + batch.positions[there]
        with ctx.compute.products(ctx.platform):
            found = jax.device_get(score(frozen, adapters, _put(batch, ready)))
        for name, x in found.items():
            values.setdefault(name, np.zeros((int(offsets[-1]), *x.shape[2:]), x.dtype))[place] = x[there]
    return values


def _put(batch: Batch, ready: Ready) -> Batch:
    abstract = ready.abstract_batch
    usual = {name: getattr(batch, name) for name in ("tokens", "targets", "positions", "segment_ids", "loss_mask")}
    put = {n: jax.device_put(np.asarray(x, (f := getattr(abstract, n)).dtype), f.sharding) for n, x in usual.items()}
    images = {name: x for name, x in batch.columns.items() if name in COLUMNS}
    return replace(Batch(**put), columns=ready.place(replace(batch, columns=images)).columns if images else {})


def _keep(path: Path, key: str, values: Values) -> None:
    with open_atomic(path) as file:
        np.savez(file, key=np.asarray(key), **values)  # pyright: ignore[reportArgumentType]


def _kept(path: Path, key: str) -> Values | None:
    """Return what an earlier start computed for the same rows; None where there is nothing."""
    if not path.exists():
        return None
    found = dict(np.load(path))
    return found if str(found.pop("key")) == key else None
