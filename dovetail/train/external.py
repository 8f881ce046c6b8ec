"""Train a model of another framework (models.external): `model: {torch: "package.module:function"}`.

The objective is next-token cross entropy on the logits of the whole batch; pretraining and supervised fine-tuning
differ only in their rows.
"""

from __future__ import annotations

import dataclasses
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.core.mesh import Placement
from dovetail.core.spec import abstract
from dovetail.core.training import TorchModel, Training
from dovetail.core.types import Batch, Params
from dovetail.io.load import config_of
from dovetail.io.tokenizer import Tokenizer
from dovetail.models.config import ModelConfig
from dovetail.models.external import ExternalModel, gathered
from dovetail.train.objective import Frozen, Measured, Metrics, Objective, StepContext, whole


def model_config(model: str | TorchModel) -> ModelConfig:
    """Return the config of a recipe's model."""
    if isinstance(model, str):
        return config_of(model)
    from dovetail.interop.torch.recipe import torch_config

    return torch_config(model)


def external_objective(settings: Training) -> Objective:
    """Return the objective of a recipe whose model is a torch module."""
    frozen = external_frozen(model_config(settings.model), weights=False)
    packed = getattr(settings, "packing", True)  # pretraining always packs
    return Objective(
        partial(_measure, packed=packed), held_out=partial(_held_out, packed=packed), frozen=frozen, initial=_initial,
        export=_export, check=lambda cfg: None,
    )  # fmt: skip


def _external(cfg: ModelConfig) -> ExternalModel:
    assert cfg.external is not None
    return cfg.external


def external_logits(params: Params, cfg: ModelConfig, batch: Batch, ctx: StepContext, packed: bool = True) -> jax.Array:
    """Return the logits [B, T, V] of an external model, whose constants are `ctx.frozen`."""
    model = _external(cfg)
    return model.logits(gathered(params, model.weights, ctx.placement), ctx.frozen, batch, ctx.key, packed)


def _sums(
    params: Params, cfg: ModelConfig, batch: Batch, ctx: StepContext, packed: bool
) -> tuple[jax.Array, jax.Array]:
    """Return (cross entropy, tokens that are the likeliest), summed over targets weighted by loss_mask."""
    logits = external_logits(params, cfg, batch, ctx, packed).astype(jnp.float32)
    picked = jnp.take_along_axis(logits, batch.targets[..., None], axis=-1)[..., 0]
    nll = jnp.sum((jax.nn.logsumexp(logits, axis=-1) - picked) * batch.loss_mask)
    correct = jnp.sum((jnp.argmax(logits, axis=-1) == batch.targets) * batch.loss_mask)
    return nll, jax.lax.stop_gradient(correct)


def _measure(
    params: Params, cfg: ModelConfig, batch: Batch, weight: Any, ctx: StepContext, *, packed: bool
) -> Measured:
    nll, correct = _sums(params, cfg, batch, ctx, packed)
    return Measured(nll / weight, {"token_accuracy": correct / weight})


def _held_out(
    params: Params, cfg: ModelConfig, batch: Batch, ctx: StepContext, *, packed: bool
) -> tuple[Metrics, jax.Array]:
    nll, correct = _sums(params, cfg, batch, ctx, packed)
    return {"loss": nll, "token_accuracy": correct}, batch.loss_mask.sum()


def external_frozen(cfg: ModelConfig, dtype: Any = jnp.float32, weights: bool = True) -> Frozen:
    """Return an external model as frozen arrays: its constants in their own types, and its weights in `dtype`."""
    model = _external(cfg)
    specs = {**model.constants, **(model.weights if weights else {})}

    def shapes(_: ModelConfig, placement: Placement) -> Any:
        places, kept = placement.shardings(specs), abstract(specs, dtype)
        return {name: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=places[name]) for name, one in kept.items()}

    def load(own: ModelConfig, placement: Placement) -> Any:
        values = model.load()
        return {name: _put(values[name], one) for name, one in shapes(own, placement).items()}

    return Frozen(shapes, load)


def frozen_logits(frozen: Params, cfg: ModelConfig, batch: Batch, ctx: StepContext) -> jax.Array:
    """Return the logits [B, T, V] in f32 of an external model that is not trained, as `external_frozen` loads it."""
    weights = {name: frozen[name] for name in _external(cfg).weights}
    plain = dataclasses.replace(ctx, frozen={name: frozen[name] for name in _external(cfg).constants}, key=None)
    return jax.lax.stop_gradient(external_logits(weights, cfg, batch, plain)).astype(jnp.float32)


def _put(x: np.ndarray, leaf: Any) -> jax.Array:
    host = np.asarray(x).astype(leaf.dtype)
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: host[index])


def _initial(ready: Any) -> Params:
    """Return the weights that the module was built with."""
    values = _external(ready.cfg).load()
    return {name: _put(values[name], leaf) for name, leaf in ready.abstract_state.params.items()}


def _export(folder: Path, cfg: ModelConfig, params: Params, tokenizer: Tokenizer | None, dtype: Any) -> None:
    """Write the weights as the other framework reads them, beside the tokenizer."""
    host = {name: np.asarray(whole(x.astype(dtype))) for name, x in params.items()}
    if jax.process_index() == 0:
        if folder.exists():
            shutil.rmtree(folder)
        _external(cfg).save(folder, host)
        if tokenizer:
            tokenizer.save(folder)
