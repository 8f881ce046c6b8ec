"""Our models as torch modules: logits and gradients are ours, tensors have Hugging Face's names, torch trains them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from train_cases import CONFIGS
from tune.small_models import model_folder

from dovetail.core.compute import compute_of
from dovetail.core.spec import init
from dovetail.core.types import Packed
from dovetail.interop.torch import as_module
from dovetail.interop.torch.state import from_tensor, to_tensor
from dovetail.io.hf import write_tensors
from dovetail.io.load import Model, load
from dovetail.models.decoder import trunk, unembed
from dovetail.models.registry import parse_config
from dovetail.models.spec import spec

pytestmark = pytest.mark.slow

TOKENS = np.random.default_rng(0).integers(0, 90, (2, 9))


def ours(params, cfg):
    tokens = jnp.asarray(TOKENS, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(9), tokens.shape)
    hidden, _ = trunk(params, cfg, tokens, positions, Packed(jnp.ones_like(tokens)))
    logits = jax.nn.log_softmax(unembed(params, cfg, hidden))[:, :-1]
    return -jnp.mean(jnp.take_along_axis(logits, tokens[:, 1:, None], -1))


@pytest.mark.parametrize("name", ["dense", pytest.param("moe", marks=pytest.mark.thorough)])
def test_gradients_are_ours(name):
    cfg = parse_config(CONFIGS[name])
    params = init(spec(cfg), jax.random.key(0), jnp.float32, 0.1)
    loss, grads = jax.jit(jax.value_and_grad(ours), static_argnums=1)(params, cfg)
    module = as_module(Model(cfg, params, None, "here", compute_of("f32")))
    tokens = torch.tensor(TOKENS)
    found = module(tokens, labels=tokens)
    found.loss.backward()
    assert found.loss.item() == pytest.approx(float(loss), abs=1e-5)
    own = dict(module.named_parameters())
    expected = {name: grad for name, _, grad in write_tensors(cfg, grads)}
    assert own.keys() == expected.keys() == module.state_dict().keys()
    for key, grad in expected.items():
        np.testing.assert_allclose(own[key].grad, grad, atol=2e-5, err_msg=key)


def test_a_torch_script_trains_it(tmp_path):
    """Compare a step with one on the model of transformers with the same weights; padding changes nothing."""
    folder = model_folder(tmp_path)
    module, theirs = as_module(load(folder)), transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert module.state_dict().keys() == theirs.state_dict().keys()
    tokens, mask = torch.tensor(TOKENS), torch.tensor([[1] * 9, [1] * 6 + [0] * 3])
    labels = torch.where(mask > 0, tokens, -100)
    losses = {}
    for name, one in (("ours", module), ("theirs", theirs)):
        optimizer = torch.optim.AdamW(one.parameters(), 1e-2)
        losses[name] = []
        for _ in range(4):
            loss = one(input_ids=tokens, attention_mask=mask, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[name].append(loss.item())
    np.testing.assert_allclose(losses["ours"], losses["theirs"], atol=1e-4)
    module.save_pretrained(tmp_path / "saved")
    with torch.no_grad():
        logits = module(tokens[:1]).logits[0]
    np.testing.assert_allclose(load(tmp_path / "saved").logits(TOKENS[0]), logits, atol=1e-5)
    loss = module(tokens, labels=tokens).loss
    with torch.no_grad():
        module.model.norm.weight += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_tensors_are_exchanged_without_a_copy():
    x = jax.block_until_ready(jnp.arange(64.0).reshape(8, 8))
    tensor = to_tensor(x)
    assert tensor.data_ptr() == x.unsafe_buffer_pointer() == from_tensor(tensor).unsafe_buffer_pointer()
    assert from_tensor(torch.zeros(3, dtype=torch.int64)).dtype == jnp.int32
    half = jnp.ones(4, jnp.bfloat16)
    assert to_tensor(half).dtype == torch.bfloat16 and to_tensor(np.asarray(half)).dtype == torch.bfloat16
