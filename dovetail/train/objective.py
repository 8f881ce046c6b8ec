"""What a training step lessens: the contract between an objective and the step that is made from it.

An objective is a few plain functions. `measure` is given the weights in the compute dtype and a batch, which may be one
of several parts of the step's batch, and answers with that part's share of the loss: sums divided by what the whole
batch weighs. Shares add up, so a batch taken in parts (`accumulate`) has the very gradient of the whole one.

    def weighted(params, cfg, batch, weight, ctx):
        hidden, _ = hidden_states(params, cfg, batch, ctx)
        mask = batch.loss_mask * batch.columns["advantages"]
        loss, _ = cross_entropy(params, cfg, hidden, replace(batch, loss_mask=mask), ctx)
        return Measured(loss / weight)

    Objective(weighted, columns={"advantages": Column()})
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.core.compute import Compute, compute_of
from dovetail.core.mesh import Placement
from dovetail.core.training import Training
from dovetail.core.types import Batch, Column, Packed, Params
from dovetail.io.load import save
from dovetail.io.tokenizer import Tokenizer
from dovetail.models.config import ModelConfig
from dovetail.models.decoder import trunk
from dovetail.models.spec import spec
from dovetail.ops import loss as losses
from dovetail.ops.moe import RouterStats

Metrics = dict[str, jax.Array]
Loads = dict[int, jax.Array]  # [E] tokens that each expert got, by layer


def export(folder: Path, cfg: ModelConfig, params: Params, tokenizer: Tokenizer | None, dtype: Any) -> None:
    """All processes call it; the first writes. A folder of an earlier attempt is replaced."""
    host = jax.tree.map(lambda x: np.asarray(whole(x.astype(dtype))), params)
    if jax.process_index() == 0:
        if folder.exists():
            shutil.rmtree(folder)
        save(folder, cfg, host, tokenizer)


def whole(x: jax.Array) -> Any:
    if jax.process_count() == 1:
        return x
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(x, tiled=True)


@dataclass(frozen=True)
class StepContext:
    """How a step runs the model: where, in which numbers, and what it keeps for the backward pass."""

    placement: Placement
    compute: Compute
    logits: Any  # the dtype that the loss's logits are held in
    platform: str | None = None  # None: where jax runs by default
    documents: int | None = None  # the most that a row of its batches holds, where that is known
    remat: str = "none"
    scan: bool = False
    frozen: Any = None  # weights that the step reads and does not train: see Frozen
    reference: Params | None = None  # the state's, in the compute dtype: see Training.kept_reference
    key: jax.Array | None = None  # of what is random in this part of this step (dropout); None: nothing is

    def packed(self, batch: Batch) -> Packed:
        return Packed(batch.segment_ids, self.platform, self.placement, self.documents)


def step_context(
    settings: Training, placement: Placement, platform: str | None = None, documents: int | None = None
) -> StepContext:
    """Of a recipe whose open settings are derived (plan.derive)."""
    precision = settings.precision
    logits = compute_of(precision.logits or precision.compute).dtype
    return StepContext(
        placement, compute_of(precision.compute), logits, platform, documents, settings.remat or "none",
        bool(settings.scan),
    )  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """A part's share of the whole batch's loss and metrics; a metric named `loss` is reported in place of the loss. Of
    one whose name ends in `_max` (0 or more) the greatest part counts, not the sum."""

    loss: jax.Array  # []
    metrics: Metrics = field(default_factory=dict)
    loads: Loads = field(default_factory=dict)


def targets(batch: Batch) -> jax.Array:
    """What the batch's targets weigh together; 1 where it has none, so that its loss is 0."""
    total = batch.loss_mask.sum()
    return jnp.where(total == 0, 1.0, total)


def hidden_states(
    params: Params, cfg: ModelConfig, batch: Batch, ctx: StepContext
) -> tuple[jax.Array, dict[int, RouterStats]]:
    """([B, T, D], the statistics of each layer that has a router)."""
    return trunk(params, cfg, batch.tokens, batch.positions, ctx.packed(batch), remat=ctx.remat, scan=ctx.scan)


def cross_entropy(
    params: Params,
    cfg: ModelConfig,
    hidden: jax.Array,
    batch: Batch,
    ctx: StepContext,
    z: float = 0.0,
    trains_head: bool = True,
) -> tuple[jax.Array, Metrics]:
    """(the loss with its z term, {nll, z}): sums over targets, each times its loss_mask."""
    head = params["embed"] if cfg.tied else params["head"]
    return losses.cross_entropy(
        hidden, head, batch.targets, batch.loss_mask, scale=cfg.logit_scale, softcap=cfg.logit_softcap, z=z,
        dtype=ctx.logits, placement=ctx.placement, trains_head=trains_head,
    )  # fmt: skip


def held_out_loss(params: Params, cfg: ModelConfig, batch: Batch, ctx: StepContext) -> tuple[Metrics, jax.Array]:
    """The cross entropy alone, whatever is trained on besides."""
    hidden, _ = hidden_states(params, cfg, batch, ctx)
    _, parts = cross_entropy(params, cfg, hidden, batch, ctx)
    return {"loss": parts["nll"]}, batch.loss_mask.sum()


@dataclass(frozen=True)
class Frozen:
    """Weights that a step reads and does not train: an adapter's base, a reference, a teacher. They are in no
    checkpoint, and a step gets them as an argument (`StepContext.frozen`)."""

    form: Callable[[ModelConfig, Placement], Any]  # their shapes and places
    load: Callable[[ModelConfig, Placement], Any]  # the arrays


def _as_they_are(params: Params, loads: Loads) -> Params:
    return params


@dataclass(frozen=True)
class Objective:
    # (weights in the compute dtype, model, a part of the batch, what the whole batch weighs, context)
    measure: Callable[[Params, ModelConfig, Batch, Any, StepContext], Measured]
    # of a whole batch: what sums are divided by, one number or several
    weight: Callable[[Batch], Any] = targets
    # what its batches hold besides the five usual columns
    columns: Mapping[str, Column] = field(default_factory=dict)
    # the weights that are trained, as models.spec declares them
    specs: Callable[[ModelConfig], Any] = spec
    # on held-out rows: (sums, what they are divided by), each added up over batches
    held_out: Callable[[Params, ModelConfig, Batch, StepContext], tuple[Metrics, jax.Array]] = held_out_loss
    # the weights after an update, given the routers' loads of the whole batch
    after_update: Callable[[Params, Loads], Params] = _as_they_are
    # what it reads besides and does not train
    frozen: Frozen | None = None
    # (train.prepare.Ready) -> the weights to begin with; None: those of the recipe's folder, or random ones
    initial: Callable[[Any], Params] | None = None
    # (folder, model, weights, tokenizer, dtype): how a run's weights are handed out
    export: Callable[[Path, ModelConfig, Params, Tokenizer | None, Any], None] = export


def loads_of(stats: Mapping[int, RouterStats]) -> dict[int, jax.Array]:
    """Layer -> [E] tokens of all rows."""
    return {i: jax.lax.stop_gradient(dealt.load.sum(axis=0)) for i, dealt in stats.items()}


def router_metrics(loads: Mapping[int, jax.Array]) -> dict[str, jax.Array]:
    """The busiest expert's load as a multiple of the mean, and the share of experts that no token reached."""
    if not loads:
        return {}
    busiest = [load.max() / jnp.maximum(load.mean(), 1e-9) for load in loads.values()]
    idle = [(load == 0).mean() for load in loads.values()]
    return {"router_busiest": jnp.stack(busiest).max(), "router_idle": jnp.stack(idle).mean()}


def balanced(params: Params, loads: Mapping[int, jax.Array], rate: float) -> Params:
    """Balance without a loss (DeepSeek-V3): the bias on an expert's choice rises where its load is below the mean.
    Layers of multi-token prediction are numbered after the last."""
    if not rate:
        return params
    blocks = [*params["layers"], *(depth["block"] for depth in params.get("mtp", ()))]
    for i, load in loads.items():
        moe = blocks[i]["moe"]
        if "choice_bias" in moe:
            bias = moe["choice_bias"] + (rate * jnp.sign(load.mean() - load)).astype(moe["choice_bias"].dtype)
            blocks[i] = {**blocks[i], "moe": {**moe, "choice_bias": bias}}
    depth = len(params["layers"])
    new = {**params, "layers": tuple(blocks[:depth])}
    if "mtp" in params:
        new["mtp"] = tuple({**p, "block": b} for p, b in zip(params["mtp"], blocks[depth:], strict=True))
    return new
