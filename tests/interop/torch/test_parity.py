"""`parity` names the first layer in which a torch module and an implementation of it differ."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from refusals import refuses
from torch import nn

import dovetail as dt
from dovetail.interop.torch import parity

pytestmark = pytest.mark.slow

SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4)
TOKENS = [5, 9, 2, 61, 33, 7]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    torch.manual_seed(0)
    module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=2)).eval()
    folder = tmp_path_factory.mktemp("llama")
    module.save_pretrained(folder)
    return module, dt.load(folder)


def test_a_changed_layer_is_named(llama):
    module, ours = llama
    report = parity(module, ours, TOKENS)
    assert report.first is None and "all layers are equal" in str(report)
    names = ["embedding", "model.layers.0", "model.layers.1", "final norm", "logits"]
    assert [layer.name for layer in report.layers] == names
    weight = module.model.layers[1].mlp.down_proj.weight
    with torch.no_grad():
        weight[3] += 0.1
        first = parity(module, ours, TOKENS).first
        weight[3] -= 0.1
    assert first is not None and first.name == "model.layers.1" and first.difference > 1e-3 and first.at[-1] == 3
    assert first.shapes == ((1, 6, 32), (1, 6, 32)) and first.dtypes == ("float32", "float32")


def test_any_submodules_and_shapes():
    module = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    x = np.ones((3, 4), np.float32)
    weights = [np.asarray(p.detach()) for p in module.parameters()]

    def ours(x):
        hidden = jnp.asarray(x) @ weights[0].T + weights[1]
        return {"0": hidden, "1": jnp.maximum(hidden, 0), "2": (jnp.maximum(hidden, 0) @ weights[2].T)[:, :1]}

    report = parity(module, ours, x)
    assert report.first is not None and report.first.name == "2" and report.first.shapes == ((3, 2), (3, 1))
    assert "differs, (3, 2) and (3, 1) float32, largest difference nan" in str(report)
    with refuses("ours", naming="'nothing'"):
        parity(module, lambda x: {"nothing": x}, x)
