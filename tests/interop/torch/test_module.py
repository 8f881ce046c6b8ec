"""A torch module as a function of jax: values, gradients, buffers, dropout, Hugging Face outputs and caches, errors."""

import copy

import jax
import numpy as np
import pytest
import torch
import transformers
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from refusals import refuses
from torch import nn

from dovetail.core.errors import UnsupportedError
from dovetail.interop.torch import from_module, implement

pytestmark = pytest.mark.slow

X = np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4)).eval()


def test_a_module_is_a_pure_function_of_its_parameters():
    module = mlp()
    params, apply = from_module(module)
    assert list(params) == [name for name, _ in module.named_parameters()]
    assert list(apply.buffers) == [name for name, _ in module.named_buffers()]
    want = module(torch.tensor(X))
    np.testing.assert_allclose(jax.jit(apply)(params, X), want.detach(), atol=1e-6)
    np.testing.assert_allclose(jax.vmap(apply, (None, 0))(params, X[:, None])[:, 0], want.detach(), atol=1e-6)

    grads = jax.jit(jax.grad(lambda params: (apply(params, X) ** 2).sum()))(params)
    (want**2).sum().backward()
    for name, parameter in module.named_parameters():
        np.testing.assert_allclose(grads[name], parameter.grad, atol=1e-5, err_msg=name)
    assert isinstance(module[0].weight, nn.Parameter) and not module.training


def test_it_is_rematerialised_and_split_over_devices():
    """Run a module under jax.checkpoint, and with weights and rows on a mesh of four devices."""
    params, apply = from_module(mlp())
    mesh = jax.make_mesh((2, 2), ("data", "fsdp"))
    places = {name: P("fsdp") if name.endswith("weight") else P() for name in params}
    split = {name: jax.device_put(x, NamedSharding(mesh, places[name])) for name, x in params.items()}
    rows = jax.device_put(X[:4], NamedSharding(mesh, P("data")))

    def loss(params, x):
        return (jax.checkpoint(apply)(params, x) ** 2).mean()

    grads = jax.jit(jax.grad(loss))(split, rows)
    plain = jax.jit(jax.grad(lambda params: (apply(params, X[:4]) ** 2).mean()))(params)
    for name, grad in plain.items():
        np.testing.assert_allclose(grads[name], grad, atol=1e-5, err_msg=name)
    assert len(grads["0.weight"].sharding.device_set) == 4


def test_a_key_puts_the_module_in_train_mode_and_buffers_come_back():
    module = mlp()
    params, apply = from_module(module)
    step = jax.jit(lambda key: apply.with_buffers(params, apply.buffers, X, rng=key))
    (first, buffers), (again, _), (other, _) = step(jax.random.key(1)), step(jax.random.key(1)), step(jax.random.key(2))
    assert (first == again).all() and not (first == other).all()
    trained = copy.deepcopy(module).train()
    trained(torch.tensor(X))
    for name, want in trained.named_buffers():
        np.testing.assert_allclose(buffers[name], want, atol=1e-6, err_msg=name)


def test_frozen_tied_and_unregistered_tensors():
    module = nn.Module()
    module.inner, module.head = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
    module.head.weight, module.scale = module.inner.weight, torch.full((8,), 2.0)
    module.head.bias.requires_grad = False
    module.forward = lambda x: module.head(module.inner(x) * module.scale)
    params, apply = from_module(module)
    assert list(params) == ["inner.weight"] and set(apply.buffers) == {"head.bias", "scale"}
    np.testing.assert_allclose(apply(params, X), module(torch.tensor(X)).detach(), atol=1e-5)
    twice = {"inner.weight": params["inner.weight"] * 2}
    assert float(abs(apply(twice, X) - apply(params, X)).max()) > 0.1


def test_hugging_face_outputs_and_caches_are_pytrees():
    """A model's output keeps its class under jit, and its cache can be given back to it."""
    sizes = dict(vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    params, apply = from_module(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)))
    run, tokens = jax.jit(apply), np.arange(10, dtype=np.int32)[None]
    whole = run(params, input_ids=tokens)
    start = run(params, input_ids=tokens[:, :7])
    rest = run(params, input_ids=tokens[:, 7:], past_key_values=start.past_key_values)
    assert type(whole).__name__ == "CausalLMOutputWithCrossAttentions"
    np.testing.assert_allclose(rest.logits, whole.logits[:, 7:], atol=1e-5)
    assert rest.past_key_values.layers[0].keys.shape == (1, 2, 10, 8)


class Airy(nn.Module):
    def forward(self, x):
        return torch.special.airy_ai(x)


class Reads(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


def test_what_cannot_run_is_named_with_the_module_that_called_it():
    params, apply = from_module(nn.Sequential(nn.Linear(8, 8), nn.Sequential(Airy())))
    with refuses("aten::special_airy_ai", UnsupportedError, code="unsupported_operator", naming="`1.0` (Airy)"):
        jax.jit(apply)(params, X)
    implement(torch.ops.aten.special_airy_ai.default, lambda x: x * 2)
    assert jax.jit(apply)(params, X).shape == X.shape
    params, apply = from_module(nn.Sequential(nn.Linear(8, 8), Reads()))
    with refuses(None, UnsupportedError, code="data_dependent", naming="`1` (Reads)"):
        jax.jit(apply)(params, X)
    assert apply(params, X).shape == X.shape  # without jit the value is there


def test_versions_that_do_not_work_together_are_named(monkeypatch):
    import torchax

    from dovetail.interop.torch import environment

    def broken():
        raise AttributeError("'aten.prod' has no overload name 'dim_Dimname'")

    monkeypatch.setattr(torchax, "default_env", broken)
    with pytest.raises(UnsupportedError, match=r"torchax .*, torch .*, jax .* do not work together: 'aten.prod'"):
        environment.environment.__wrapped__()
