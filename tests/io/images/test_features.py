"""A photo through our processor and tower, and through transformers' own: the same features."""

from dataclasses import replace

import image_cases
import numpy as np
import pytest
import torch
from image_cases import FAMILIES, noise
from PIL import Image
from vision_models import vision_reference

from dovetail.io.images.processor import read_processor
from dovetail.io.load import load

pytestmark = pytest.mark.slow

HALF = image_cases.HALF
MODELS = {
    "smolvlm": ("smolvlm", {"size": {"longest_edge": 96}, "max_image_size": {"longest_edge": 32}, **HALF}),
    "gemma3": ("gemma3", {"size": {"height": 32, "width": 32}, **HALF}),
    "gemma4": ("gemma4", {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}),
    "qwen3-vl": ("qwen3", {"size": {"shortest_edge": 512, "longest_edge": 2048}, "patch_size": 4, **HALF}),
}


@pytest.mark.parametrize("name", MODELS)
def test_features_of_a_photo_equal_transformers(name, tmp_path):
    key, settings = MODELS[name]
    family, (model, folder) = replace(FAMILIES[key], settings=settings, more={}), vision_reference(name)
    photo, ours, tokenizer = noise(53, 79), load(folder, dtype="f32"), image_cases.tokenizer_of(family)
    image_cases.write_settings(tmp_path, family)
    processor = read_processor(tmp_path, ours.config.vision, tokenizer)
    items = processor(photo).items
    patches, positions = np.stack([item.patches for item in items]), np.stack([item.positions for item in items])
    found = ours.config.vision.tower(ours.params["vision"], patches, positions)
    features = np.asarray(found[:, : items[0].grid[0] * items[0].grid[1], : ours.config.dim])
    inputs = image_cases.image_processor_of(family)(Image.fromarray(photo), return_tensors="pt")
    given = {
        key: value for key, value in inputs.items() if key in ("pixel_values", "image_grid_thw", "image_position_ids")
    }
    with torch.no_grad():
        wanted = model.model.get_image_features(**given).pooler_output
    wanted = torch.cat([part.reshape(-1, part.shape[-1]) for part in wanted]).numpy()
    np.testing.assert_allclose(features.reshape(wanted.shape), wanted, atol=2e-4)
