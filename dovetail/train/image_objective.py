"""The objectives of models of images: cross entropy of classes with mixup, and SigLIP's sigmoid loss.

B images, P patches of an image, C numbers of a patch.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.core.mesh import Placement, constrain
from dovetail.core.training import TorchModel
from dovetail.core.types import Column, ImageBatch, Params
from dovetail.io.tokenizer import Tokenizer
from dovetail.models.config import ModelConfig
from dovetail.models.decoder import remember
from dovetail.models.towers.classifier import ImageClassifier, to_patches
from dovetail.models.towers.encoder import encoder_block
from dovetail.models.towers.image_text import ImageText
from dovetail.models.towers.siglip import centred
from dovetail.ops.sigmoid_loss import sigmoid_loss
from dovetail.train.external import model_config
from dovetail.train.image_settings import ImagePretrain, check_images
from dovetail.train.objective import Measured, Metrics, Objective, StepContext, export

MIXUP = 2  # folded into the key of a step


def image_objective(settings: ImagePretrain) -> Objective:
    """Return the objective of an image recipe."""
    check = functools.partial(check_images, objective=settings.objective)
    common: dict[str, Any] = dict(abstract_batch=_abstract_images, check=check, export=export_images)
    if settings.objective == "classification":
        measure: Any = functools.partial(_measure_classes, mixup=settings.mixup)
        return Objective(measure, held_out=_top1, **common)  # type: ignore[arg-type]
    text = {"text": Column("int32", per_token=False, width=_images(settings.model).length)}
    return Objective(_measure_pairs, columns=text, held_out=_pair_loss, **common)  # type: ignore[arg-type]


def _images(model: str | TorchModel) -> ImageText:
    cfg = model_config(model)
    check_images(cfg, "siglip")
    assert isinstance(cfg.images, ImageText)
    return cfg.images


def _abstract_images(
    settings: ImagePretrain, columns: Mapping[str, Column], placement: Placement, entries: tuple[int, ...] = ()
) -> ImageBatch:
    """Return a step's batch as shapes with shardings."""
    images = model_config(settings.model).images
    assert images is not None
    size = images.tower.image_size

    def one(dtype: Any, *shape: int) -> Any:
        at = placement.sharding(("batch", *(None,) * len(shape)), (settings.batch, *shape))
        return jax.ShapeDtypeStruct((settings.batch, *shape), dtype, sharding=at)

    further = {name: one(jnp.dtype(column.dtype), column.width) for name, column in columns.items()}
    return ImageBatch(one(jnp.uint8, size, size, 3), one(jnp.int32), one(jnp.float32), further)


def how(ctx: StepContext) -> dict[str, Any]:
    """Return how a tower runs in this context."""
    run: Callable = remember(encoder_block, ctx.remat, in_loop=ctx.scan)
    return dict(placement=ctx.placement, run=run, scan=ctx.scan)


# --- classes ----------------------------------------------------------------------------------------------------------


def _measure_classes(
    params: Params, cfg: ModelConfig, batch: ImageBatch, weight: Any, ctx: StepContext, *, mixup: float
) -> Measured:
    """Return the cross entropy of a part."""
    model = cfg.images
    assert isinstance(model, ImageClassifier)
    pixels, targets = batch.images, jax.nn.one_hot(batch.labels, model.classes)
    if mixup and ctx.key is not None:
        pixels, targets = mixed(pixels, targets, mixup, jax.random.fold_in(ctx.key, MIXUP))
    patches = centred(to_patches(pixels, model.tower.patch_size), ctx.compute.dtype)
    logits = model(params, constrain(patches, ctx.placement, "batch", None, None), **how(ctx))
    loss = -jnp.sum(targets * jax.nn.log_softmax(logits), axis=-1) * batch.loss_mask
    hit = (jnp.argmax(logits, axis=-1) == jnp.argmax(targets, axis=-1)) * batch.loss_mask
    return Measured(loss.sum() / weight, {"top1": jax.lax.stop_gradient(hit.sum() / weight)})


def mixed(images: jax.Array, targets: jax.Array, parameter: float, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return images and targets mixed with those of the row before: the larger share is the row's own (mixup)."""
    share = jax.random.beta(key, parameter, parameter)
    share = jnp.maximum(share, 1 - share)

    def mix(x: jax.Array) -> jax.Array:
        x = x.astype(jnp.float32)
        return share * x + (1 - share) * jnp.roll(x, 1, axis=0)

    return mix(images), mix(targets)


def _top1(params: Params, cfg: ModelConfig, batch: ImageBatch, ctx: StepContext) -> tuple[Metrics, jax.Array]:
    """Return the summed loss and hits of held-out images, and their number."""
    found = _measure_classes(params, cfg, batch, 1.0, ctx, mixup=0.0)
    return {"loss": found.loss, **found.metrics}, batch.loss_mask.sum()


# --- pairs ------------------------------------------------------------------------------------------------------------


def _measure_pairs(params: Params, cfg: ModelConfig, batch: ImageBatch, weight: Any, ctx: StepContext) -> Measured:
    """Return the sigmoid loss of a batch."""
    model = cfg.images
    assert isinstance(model, ImageText)
    patches = centred(to_patches(batch.images, model.tower.patch_size), ctx.compute.dtype)
    images = model.image_embeds(params, constrain(patches, ctx.placement, "batch", None, None), **how(ctx))
    texts = model.text_embeds(params, batch.columns["text"], **how(ctx))
    scale, bias = jnp.exp(params["logit_scale"][0]), params["logit_bias"][0]
    loss = sigmoid_loss(images, texts, scale, bias, batch.loss_mask, ctx.placement)
    numbers = {"logit_scale": scale, "logit_bias": bias}
    return Measured(loss.sum() / weight, {name: jax.lax.stop_gradient(value) for name, value in numbers.items()})


def _pair_loss(params: Params, cfg: ModelConfig, batch: ImageBatch, ctx: StepContext) -> tuple[Metrics, jax.Array]:
    """Return the summed loss of held-out pairs, and their number."""
    return {"loss": _measure_pairs(params, cfg, batch, 1.0, ctx).loss}, batch.loss_mask.sum()


# --- export -----------------------------------------------------------------------------------------------------------


def export_images(folder: Path, cfg: ModelConfig, params: Params, tokenizer: Tokenizer | None, dtype: Any) -> None:
    """Write a Hugging Face folder with the processor that prepares images as evaluation does."""
    export(folder, cfg, params, tokenizer, dtype)
    assert cfg.images is not None
    if jax.process_index() == 0:
        size, half = cfg.images.tower.image_size, [0.5] * 3
        processor = {
            "image_processor_type": "SiglipImageProcessor", "do_resize": True, "size": {"height": size, "width": size},
            "resample": 2, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": half,
            "image_std": half, "do_convert_rgb": True,
        }  # fmt: skip
        (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=2) + "\n")
