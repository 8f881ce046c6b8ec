"""Define the interface between an objective and the training step.

An objective is a few plain functions. `measure` receives the weights in the compute dtype and a batch, which may be one
of several parts of the step's batch, and returns that part's share of the loss: sums divided by the weight of the whole
batch. Shares add up, so a batch taken in parts (`accumulate`) has exactly the gradient of the whole batch.

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
from dovetail.models.rounding import round_params
from dovetail.models.spec import spec
from dovetail.ops import loss as losses
from dovetail.ops.moe import RouterStats
from dovetail.train.abstract_batch import abstract_batch
from dovetail.train.images import image_embeds, rope_positions, with_images
from dovetail.train.settings import check_causal

Metrics = dict[str, jax.Array]
Loads = dict[int, jax.Array]  # layer -> [E] tokens per expert


def export(
    folder: Path, cfg: ModelConfig, params: Params, tokenizer: Tokenizer | None, dtype: Any, scheme: str = ""
) -> None:
    """Write the weights as a Hugging Face folder. All processes call it and the first writes.

    A folder of an earlier attempt is replaced. With `scheme`, a name of core.formats.ROUNDED, they are rounded to it.
    """
    host = jax.tree.map(lambda x: np.asarray(whole(x.astype(dtype))), params)
    if jax.process_index() == 0:
        if folder.exists():
            shutil.rmtree(folder)
        save(folder, cfg, round_params(host, cfg, scheme) if scheme else host, tokenizer)


def whole(x: jax.Array) -> Any:
    """Return the whole array in every process."""
    if jax.process_count() == 1:
        return x
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(x, tiled=True)


@dataclass(frozen=True)
class StepContext:
    """Describe how a step runs the model: placement, dtypes and remat policy."""

    placement: Placement
    compute: Compute
    logits: Any  # the dtype of the loss's logits
    platform: str | None = None  # None: jax's default
    documents: int | None = None  # the most documents of a row, if known
    remat: str = "none"
    scan: bool = False
    frozen: Any = None  # weights that are read but not trained: see Frozen
    reference: Params | None = None  # the state's reference, in the compute dtype: see core.training.StepModels
    key: jax.Array | None = None  # for dropout in this part of this step; None: no randomness

    def packed(self, batch: Batch) -> Packed:
        """Return the attention context of a batch."""
        return Packed(batch.segment_ids, self.platform, self.placement, self.documents)


def step_context(
    settings: Training, placement: Placement, platform: str | None = None, documents: int | None = None
) -> StepContext:
    """Return the context of a recipe whose open keys are derived (plan.derive)."""
    precision = settings.precision
    logits = compute_of(precision.logits or precision.compute).dtype
    return StepContext(
        placement, compute_of(precision.compute), logits, platform, documents, settings.remat or "none",
        bool(settings.scan),
    )  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """Hold a part's share of the whole batch's loss and metrics.

    A metric named `loss` is reported in place of the loss. Parts are summed, except that a metric whose name ends in
    `_max` (0 or more) is the maximum over the parts.
    """

    loss: jax.Array  # []
    metrics: Metrics = field(default_factory=dict)
    loads: Loads = field(default_factory=dict)


def targets(batch: Batch) -> jax.Array:
    """Return the summed weight of the batch's targets; 1 if it has none, so that its loss is 0."""
    total = batch.loss_mask.sum()
    return jnp.where(total == 0, 1.0, total)


def hidden_states(
    params: Params, cfg: ModelConfig, batch: Batch, ctx: StepContext
) -> tuple[jax.Array, dict[int, RouterStats]]:
    """Return (hidden states [B, T, D], statistics of each layer with a router); images are encoded here."""
    embeds = image_embeds(params, cfg, batch, ctx.placement, ctx.remat)
    packed, positions = with_images(ctx.packed(batch), cfg, batch), rope_positions(batch)
    return trunk(params, cfg, batch.tokens, positions, packed, remat=ctx.remat, scan=ctx.scan, embeds=embeds)


def cross_entropy(
    params: Params,
    cfg: ModelConfig,
    hidden: jax.Array,
    batch: Batch,
    ctx: StepContext,
    z: float = 0.0,
    trains_head: bool = True,
) -> tuple[jax.Array, Metrics]:
    """Return (loss with its z term, {nll, z}), summed over targets weighted by loss_mask."""
    head = params["embed"] if cfg.tied else params["head"]
    return losses.cross_entropy(
        hidden, head, batch.targets, batch.loss_mask, scale=cfg.logit_scale, softcap=cfg.logit_softcap, z=z,
        dtype=ctx.logits, placement=ctx.placement, trains_head=trains_head,
    )  # fmt: skip


def held_out_loss(params: Params, cfg: ModelConfig, batch: Batch, ctx: StepContext) -> tuple[Metrics, jax.Array]:
    """Return ({loss: summed cross entropy}, summed weight), without the objective's other terms."""
    hidden, _ = hidden_states(params, cfg, batch, ctx)
    _, parts = cross_entropy(params, cfg, hidden, batch, ctx)
    return {"loss": parts["nll"]}, batch.loss_mask.sum()


@dataclass(frozen=True)
class Frozen:
    """Hold weights that a step reads but does not train: an adapter's base, a reference, a teacher.

    They are not part of checkpoints; a step receives them as an argument (`StepContext.frozen`).
    """

    abstract: Callable[[ModelConfig, Placement], Any]  # shapes with shardings
    load: Callable[[ModelConfig, Placement], Any]  # arrays


@dataclass(frozen=True)
class Companion:
    """Hold state that checkpoints keep beside the trained weights, such as RL's drafter.

    No step reads or changes it: the source of the batches does, between two steps (`TrainState.companion`).
    """

    abstract: Callable[[ModelConfig, Placement], Any]  # shapes with shardings
    init: Callable[[Any, Params], Any]  # (train.prepare.Ready, the initial weights) -> arrays
    # (folder of an export, train.prepare.Ready, the exported weights, the companion's arrays, dtype): adds it there
    export: Callable[[Path, Any, Params, Any, Any], None]


def _unchanged(params: Params, loads: Loads) -> Params:
    return params


def _nothing(cfg: ModelConfig, hbm: int | None) -> dict[str, int]:
    return {}


@dataclass(frozen=True)
class Objective:
    """Define what a training step minimises, as functions."""

    # (weights in the compute dtype, model, a part of the batch, the weight of the whole batch, context)
    measure: Callable[[Params, ModelConfig, Batch, Any, StepContext], Measured]
    # the weight of a whole batch: the divisor of sums, one number or several
    weight: Callable[[Batch], Any] = targets
    # columns of its batches besides the usual ones
    columns: Mapping[str, Column] = field(default_factory=dict)
    # (recipe, columns, placement, entries of each table column) -> a batch as shapes with shardings
    abstract_batch: Callable[[Any, Mapping[str, Column], Placement, tuple[int, ...]], Any] = abstract_batch
    # specs of the trained weights, as models.spec declares them
    specs: Callable[[ModelConfig], Any] = spec
    # on held-out rows: (sums, their divisor), each added up over batches
    held_out: Callable[[Params, ModelConfig, Batch, StepContext], tuple[Metrics, jax.Array]] = held_out_loss
    # changes the weights after an update, given the router loads of the whole batch
    after_update: Callable[[Params, Loads], Params] = _unchanged
    # weights that it reads but does not train
    frozen: Frozen | None = None
    # further state of the run's checkpoints
    companion: Companion | None = None
    # (train.prepare.Ready) -> initial weights; None: those of the recipe's folder, or random ones
    initial: Callable[[Any], Params] | None = None
    # (folder, model, weights, tokenizer, dtype): exports a run's weights
    export: Callable[[Path, ModelConfig, Params, Tokenizer | None, Any], None] = export
    # refuses a model that it cannot train
    check: Callable[[ModelConfig], None] = check_causal
    # (model, bytes of a device) -> bytes per device that something else than the step needs, by name (an engine)
    beside: Callable[[ModelConfig, int | None], Mapping[str, int]] = _nothing
    # how many of the last devices it leaves to an engine
    spare_devices: int = 0


def loads_of(stats: Mapping[int, RouterStats]) -> dict[int, jax.Array]:
    """Return layer -> [E] tokens per expert, summed over rows."""
    return {i: jax.lax.stop_gradient(dealt.load.sum(axis=0)) for i, dealt in stats.items()}


def router_metrics(loads: Mapping[int, jax.Array]) -> dict[str, jax.Array]:
    """Return the busiest expert's load as a multiple of the mean, and the share of experts without tokens."""
    if not loads:
        return {}
    busiest = [load.max() / jnp.maximum(load.mean(), 1e-9) for load in loads.values()]
    idle = [(load == 0).mean() for load in loads.values()]
    return {"router_busiest": jnp.stack(busiest).max(), "router_idle": jnp.stack(idle).mean()}


def balanced(params: Params, loads: Mapping[int, jax.Array], rate: float) -> Params:
    """Balance experts without a loss (DeepSeek-V3): raise an expert's choice bias if its load is below the mean.

    Layers of multi-token prediction are numbered after the last layer.
    """
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
