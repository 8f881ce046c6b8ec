"""SigLIP's tower: equal to transformers', and written back bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from dovetail.io.hf import match_specs, read_specs, write_specs
from dovetail.io.safetensor_folder import SafetensorFolder
from dovetail.models.towers.encoder import Encoder
from dovetail.models.towers.siglip import Siglip, centred, siglip_names

pytestmark = pytest.mark.slow

SIZES = dict(hidden_size=32, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4, image_size=24)


def patches_of(images: np.ndarray, size: int) -> np.ndarray:
    """Return images [N, H, W, 3] as patches [N, P, size * size * 3], row by row."""
    N, H, W, _ = images.shape
    grid = images.reshape(N, H // size, size, W // size, size, 3).transpose(0, 1, 3, 2, 4, 5)
    return grid.reshape(N, -1, size * size * 3)


@pytest.fixture(scope="module")
def siglip(tmp_path_factory):
    from transformers import SiglipVisionConfig, SiglipVisionModel

    torch.manual_seed(0)
    config = SiglipVisionConfig(**SIZES, patch_size=8, vision_use_head=False, attn_implementation="eager")
    model = SiglipVisionModel(config).eval()
    for weight in model.parameters():  # norms and biases too, so that none is at its initial value
        torch.nn.init.normal_(weight, std=0.2)
    folder = tmp_path_factory.mktemp("siglip")
    model.save_pretrained(folder)
    return model, folder


def test_tower_equals_transformers_and_is_written_back(siglip):
    theirs, folder = siglip
    tower = Siglip(Encoder(3, 32, 4, 80), image_size=24, patch_size=8)
    specs, source = tower.spec(siglip_names("vision_model.")), SafetensorFolder(folder)
    names = match_specs(
        source, specs, "does not fit", plain=lambda name: "vision_model." + name.removeprefix("vision_model.")
    )
    params = read_specs(source, specs, names, jnp.float32)
    images = np.random.default_rng(0).integers(0, 256, (5, 24, 24, 3), dtype=np.uint8)
    pixels = torch.tensor(images).permute(0, 3, 1, 2).float() / 127.5 - 1
    with torch.no_grad():
        want = theirs(pixels).last_hidden_state.numpy()
    patches = centred(jnp.asarray(patches_of(images, 8)), jnp.float32)
    got = jax.jit(tower)(params, patches)
    np.testing.assert_allclose(got, want, atol=1e-4)
    stored = load_file(folder / "model.safetensors")
    written = {names[name]: array for name, _, array in write_specs(specs, params, {})}
    assert written.keys() == stored.keys()
    assert all(np.array_equal(written[name], stored[name]) for name in stored)


def test_padding_of_an_item_is_not_seen():
    encoder = Encoder(2, 32, 4, 80)
    specs = encoder.spec({key: key for key in siglip_names("")})
    params = jax.tree.map(
        lambda s: jax.random.normal(jax.random.key(s.size), s.shape) * 0.2, specs, is_leaf=lambda x: hasattr(x, "axes")
    )
    x = jax.random.normal(jax.random.key(0), (2, 12, 32))
    whole = encoder(params, x[:1, :7])
    padded = encoder(params, x, jnp.asarray([7, 12]))
    np.testing.assert_allclose(padded[:1, :7], whole, atol=1e-5)
