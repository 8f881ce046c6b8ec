"""Measure SigLIP's accuracy without training on classes: an image's class is that whose caption is nearest."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.core.types import Params
from dovetail.models.towers.classifier import to_patches
from dovetail.models.towers.image_text import ImageText
from dovetail.models.towers.siglip import centred
from dovetail.train.rows import Sampled
from dovetail.train.step import compute_copy

if TYPE_CHECKING:
    from dovetail.data.image_loader import ImageLoader
    from dovetail.train.prepare import Ready


class ZeroShot:
    """Classify held-out images by the captions of all classes, every `every` steps (train.rows.SampleFn)."""

    def __init__(
        self,
        ready: Ready,
        rows: ImageLoader,
        encode: Callable[[str], np.ndarray],
        every: int,
        batches: int,
    ):
        self._ready, self._rows, self._batches, self.every = ready, rows, batches, every
        self._prompts = np.stack([encode(rows.data.prompt.format(name)) for name in rows.classes])

    def __call__(self, params: Params, step: int) -> Sampled:
        """Return the accuracy of these weights."""
        hits = count = 0.0
        for i in range(self._batches):
            batch = self._ready.put(cast(Any, self._rows.batch(i)))
            found, many = self._classify(params, batch, self._prompts)
            hits, count = hits + float(found), count + float(many)
        return Sampled([], {"held_out_zero_shot_top1": hits / (count or 1.0)})

    @cached_property
    def _classify(self) -> Callable:
        """Return (params, batch, prompts) -> (hits, images)."""
        ready, model = self._ready, self._ready.cfg.images
        assert isinstance(model, ImageText)
        compute = ready.compute

        def run(params: Params, batch: Any, prompts: jax.Array) -> tuple[jax.Array, jax.Array]:
            params = compute_copy(params, ready.specs, compute)
            with compute.products(ready.platform):
                patches = centred(to_patches(batch.images, model.tower.patch_size), compute.dtype)
                images = model.image_embeds(params, patches, placement=ready.placement)
                nearest = jnp.argmax(images @ model.text_embeds(params, prompts).T, axis=-1)
            return ((nearest == batch.labels) * batch.loss_mask).sum(), batch.loss_mask.sum()

        return jax.jit(run)
