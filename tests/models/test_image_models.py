"""Models of images against transformers: the same numbers, and folders that both read."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from refusals import refuses

from dovetail.core.spec import num_params, sincos2d
from dovetail.io.load import config_of, load, save
from dovetail.models.spec import flops_per_token, spec
from dovetail.models.towers.classifier import to_patches
from dovetail.models.towers.siglip import centred

pytestmark = pytest.mark.slow

TOWER = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
VISION = dict(TOWER, image_size=24, patch_size=8)
TEXT = dict(TOWER, vocab_size=99, max_position_embeddings=7, projection_size=32)


def images(count=3, side=24):
    return np.random.default_rng(0).integers(0, 256, (count, side, side, 3), dtype=np.uint8)


def pixel_values(pixels):
    return torch.tensor(pixels.transpose(0, 3, 1, 2) / 127.5 - 1).float()


def perturbed(model):
    """Make every weight count: biases and norms are 0 and 1 in a new model, the classifier's head 0."""
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return model.eval()


def same_folder(a, b):
    """Compare the tensors of two folders bit by bit."""
    from safetensors.numpy import load_file

    one, other = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[name], other[name]) for name in one)


def test_siglip_embeds_as_transformers_and_exports_bitwise(tmp_path):
    config = transformers.SiglipConfig(vision_config=VISION, text_config=TEXT)
    theirs = perturbed(transformers.SiglipModel(config))
    theirs.save_pretrained(tmp_path / "theirs")
    model = load(tmp_path / "theirs", "f32")
    pair, pixels = model.config.images, images()
    tokens = np.random.default_rng(1).integers(0, 99, (4, 7))
    with torch.no_grad():
        wanted = theirs(input_ids=torch.tensor(tokens), pixel_values=pixel_values(pixels))
    patches = centred(to_patches(jnp.asarray(pixels), 8), jnp.float32)
    seen, read = jax.jit(pair.image_embeds)(model.params, patches), jax.jit(pair.text_embeds)(model.params, tokens)
    np.testing.assert_allclose(seen, wanted.image_embeds, atol=1e-4)
    np.testing.assert_allclose(read, wanted.text_embeds, atol=1e-4)
    logits = seen @ read.T * jnp.exp(model.params["logit_scale"]) + model.params["logit_bias"]
    np.testing.assert_allclose(logits, wanted.logits_per_image, atol=1e-4)
    save(tmp_path / "ours", model.config, model.params, None)
    same_folder(tmp_path / "theirs", tmp_path / "ours")


def test_a_classifier_is_transformers_image_classification(tmp_path):
    config = transformers.SiglipConfig(vision_config=VISION | {"vision_use_head": False}, num_labels=5)
    theirs = perturbed(transformers.SiglipForImageClassification(config))
    theirs.save_pretrained(tmp_path / "theirs")
    model, pixels = load(tmp_path / "theirs", "f32"), images()
    with torch.no_grad():
        wanted = theirs(pixel_values=pixel_values(pixels)).logits
    patches = centred(to_patches(jnp.asarray(pixels), 8), jnp.float32)
    for scan in (False, True):
        np.testing.assert_allclose(model.config.images(model.params, patches, scan=scan), wanted, atol=1e-4)
    save(tmp_path / "ours", model.config, model.params, None)
    same_folder(tmp_path / "theirs", tmp_path / "ours")


@pytest.mark.parametrize(
    "name, parameters, gflops",
    [("vit-s16", 22_197_736, 27.4), ("vit-b16", 87_156_712, 104.8), ("siglip-b16", 203_155_970, 139.3)],
)
def test_parameters_and_flops_are_the_published_ones(name, parameters, gflops):
    cfg = config_of(name)
    assert num_params(spec(cfg)) == parameters
    assert 3e-9 * cfg.images.flops() == pytest.approx(gflops, rel=2e-3)
    # the planner counts by patches, with each weight's share of them
    counted = 3e-9 * flops_per_token(cfg, cfg.max_len) * cfg.max_len
    assert counted == pytest.approx(gflops, rel=2e-3)


def test_sincos2d_is_that_of_big_vision():
    y, x = np.mgrid[:3, :3]
    omega = 1 / 10_000 ** (np.arange(4) / 3)
    y, x = y.reshape(-1, 1) * omega, x.reshape(-1, 1) * omega
    wanted = np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1)
    np.testing.assert_allclose(sincos2d(9, 16), wanted, atol=1e-6)


def test_a_config_with_unknown_fields_is_refused(tmp_path):
    hf = json.loads(transformers.SiglipConfig(vision_config=VISION, text_config=TEXT).to_json_string())
    hf["architectures"] = ["SiglipModel"]
    (tmp_path / "config.json").write_text(json.dumps(hf | {"vision_config": hf["vision_config"] | {"num_channels": 1}}))
    with refuses("num_channels", naming="vision_config"):
        config_of(str(tmp_path / "config.json"))
