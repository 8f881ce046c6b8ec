"""Every family that sees images against transformers: logits, and folders written back."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from vision_models import VISION, Example, example, patches_of, their_logits, vision_reference

from dovetail.core.types import Embeds, Packed
from dovetail.io.load import convert, load
from dovetail.models.decoder import forward, unembed

PROMPTS = {"one image": [5, 4], "three items": [3, 2, 1, 6], "no image": [9], "image first": [0, 7]}
PAGE = 4


@functools.cache
def loaded(name: str):
    return load(vision_reference(name)[1], dtype="f32")


def prompt_of(name: str, texts: list[int], seed: int = 0) -> Example:
    tower = loaded(name).config.vision.tower
    return example(texts, tower.max_patches // tower.patches_per_feature, seed=seed)


@functools.partial(jax.jit, static_argnames="cfg")
def features_of(params, cfg, patches, positions):
    return cfg.vision.tower(params["vision"], patches, positions)


def embeds_of(model, prompt: Example) -> Embeds | None:
    """The features of a prompt's items, and the row of each image token."""
    if not len(prompt.pixels):
        return None
    size = int((model.config.vision.tower.patch_dim // 3) ** 0.5)
    features = features_of(model.params, model.config, *patches_of(prompt.pixels, size))
    is_image = prompt.image_ids > 0
    index = np.where(is_image, np.cumsum(is_image) - 1, -1)
    return Embeds(features.reshape(-1, features.shape[-1]), jnp.asarray(index, jnp.int32))


@functools.partial(jax.jit, static_argnames="cfg")
def packed_logits(params, cfg, tokens, positions, segments, image_ids, embeds):
    hidden, _ = forward(params, cfg, tokens, positions, Packed(segments, image_ids=image_ids), embeds=embeds)
    return unembed(params, cfg, hidden)


def our_logits(name: str, prompt: Example) -> np.ndarray:
    model, embeds = loaded(name), embeds_of(loaded(name), prompt)
    row = jax.tree.map(lambda x: x[None], (prompt.tokens, np.arange(len(prompt.tokens)), prompt.image_ids))
    tokens, positions, image_ids = row
    embeds = embeds and Embeds(embeds.features, embeds.index[None])
    ones = np.ones_like(tokens)
    return np.asarray(packed_logits(model.params, model.config, tokens, positions, ones, image_ids, embeds))[0]


@pytest.mark.parametrize("kind", PROMPTS)
@pytest.mark.parametrize("name", VISION)
def test_logits_equal_transformers(name, kind):
    prompt = prompt_of(name, PROMPTS[kind])
    theirs = their_logits(name, prompt)
    assert theirs.std() > 0.1, "a test of nothing"
    np.testing.assert_allclose(our_logits(name, prompt), theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", VISION)
def test_a_prompt_without_images_is_the_text_models(name):
    model, prompt = loaded(name), prompt_of(name, [9])
    np.testing.assert_allclose(model.logits(prompt.tokens), our_logits(name, prompt), atol=1e-5)


@pytest.mark.parametrize("name", VISION)
def test_the_folder_is_written_back(name, tmp_path):
    source = vision_reference(name)[1]
    convert(source, tmp_path / "out")
    want, got = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    assert got.keys() == want.keys()
    assert all(np.array_equal(got[key], want[key]) for key in want)
    assert json.loads((tmp_path / "out/config.json").read_text()) == json.loads((source / "config.json").read_text())
