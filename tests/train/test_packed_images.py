"""Rows of documents with images have the logits of transformers, in every family of masks and positions."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from vision_models import SIZES, VISION, Example, patches_of, sized_example, their_logits, vision_reference

from dovetail.core.compute import compute_of
from dovetail.core.mesh import TRAIN, Placement, make_mesh
from dovetail.core.types import Batch
from dovetail.data.pictures import PictureRows
from dovetail.io.images.item import ImageItem, ProcessedImage
from dovetail.io.load import load
from dovetail.models.decoder import unembed
from dovetail.train.objective import StepContext, hidden_states


def processed(image: np.ndarray, vision: Any) -> ProcessedImage:
    size, merge = math.isqrt(vision.tower.patch_dim // 3), math.isqrt(vision.tower.patches_per_feature)
    (patches,), (positions,) = patches_of([image], size, 2 if vision.mrope else 1)
    grid = (image.shape[0] // size // merge, image.shape[1] // size // merge)
    return ProcessedImage("", (ImageItem(patches, positions, grid, image.tobytes()),))


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in VISION if name not in ("smolvlm", "idefics3")])
def test_a_row_has_the_logits_of_its_documents(name):
    """The first document's images are in the second as well: they are encoded once."""
    model = load(vision_reference(name)[1], dtype="f32")
    vision = model.config.vision
    assert vision is not None
    unit = math.isqrt(vision.tower.patch_dim // 3 * vision.tower.patches_per_feature)
    prompts: list[Example] = [
        sized_example(texts, SIZES.get(name, ((32, 32),)), unit) for texts in ([3, 2, 6], [5, 4, 1, 2], [7])
    ]
    files = {image.tobytes(): processed(image, vision) for prompt in prompts for image in prompt.pixels}
    rows = PictureRows(files.__getitem__, vision, max(len(x.items[0].patches) for x in files.values()))
    tokens = np.concatenate([prompt.tokens for prompt in prompts])[None]
    sizes = [len(prompt.tokens) for prompt in prompts]
    segments = np.repeat([1, 2, 3], sizes)[None].astype(np.int32)
    positions = np.concatenate([np.arange(size) for size in sizes])[None].astype(np.int32)
    given: Any = (tokens, tokens, positions, segments, np.ones(tokens.shape, np.float32), {})
    batch = rows.add(Batch(*given), [[[image.tobytes() for image in prompt.pixels] for prompt in prompts]], len(files))
    ctx = StepContext(Placement(make_mesh(dict(data=1), jax.devices()[:1]), TRAIN), compute_of("f32"), jnp.float32)

    @jax.jit
    def logits(params: Any, batch: Batch) -> jax.Array:
        return unembed(params, model.config, hidden_states(params, model.config, batch, ctx)[0])

    ours = np.split(np.asarray(logits(model.params, jax.tree.map(jnp.asarray, batch)))[0], np.cumsum(sizes)[:-1])
    for own, prompt in zip(ours, prompts, strict=True):
        np.testing.assert_allclose(own, their_logits(name, prompt), atol=2e-4, rtol=0)
