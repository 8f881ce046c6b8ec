"""SigLIP's loss in chunks and around a mesh equals the loss of the whole matrix, with its gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dovetail.core.mesh import TRAIN, Placement, make_mesh
from dovetail.ops import sigmoid_loss as module
from dovetail.ops.sigmoid_loss import reference_sigmoid_loss, sigmoid_loss

pytestmark = pytest.mark.slow

B, E = 16, 8


def embeddings():
    images, texts = np.random.default_rng(0).normal(size=(2, B, E)).astype(np.float32)
    return [jnp.asarray(x / np.linalg.norm(x, axis=1, keepdims=True)) for x in (images, texts)]


@pytest.mark.parametrize("axes", [None, {"data": 4}, {"data": 2, "fsdp": 2}, {"fsdp": 2, "tensor": 2}])
@pytest.mark.parametrize("chunk", [2048, 3])
def test_chunks_and_devices_change_nothing(axes, chunk, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", chunk)
    placement = Placement(make_mesh(axes, jax.devices()[:4]), TRAIN) if axes else None
    args = (*embeddings(), jnp.float32(10.0), jnp.float32(-10.0))
    if placement:
        rows = NamedSharding(placement.mesh, PartitionSpec(("data", "fsdp")))
        args = (*(jax.device_put(x, rows) for x in args[:2]), *args[2:])

    def total(loss):
        return jax.jit(jax.value_and_grad(lambda *args: loss(*args).sum(), argnums=(0, 1, 2, 3)))(*args)

    value, grads = total(lambda *args: sigmoid_loss(*args, placement=placement))
    wanted, wanted_grads = total(reference_sigmoid_loss)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    for one, other in zip(grads, wanted_grads, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_no_device_holds_the_whole_matrix(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 4)
    placement = Placement(make_mesh({"data": 4}, jax.devices()[:4]), TRAIN)
    args = (*embeddings(), jnp.float32(10.0), jnp.float32(-10.0))
    text = jax.jit(lambda *args: jax.grad(lambda *a: sigmoid_loss(*a, placement=placement).sum())(*args)).lower(*args)
    assert f"{B}x{B}x" not in text.as_text().replace("tensor<", "")


def test_rows_of_padding_do_not_count():
    images, texts = embeddings()
    weights = jnp.asarray([1.0] * 12 + [0.0] * 4)
    found = sigmoid_loss(images, texts, jnp.float32(10.0), jnp.float32(-10.0), weights)
    wanted = reference_sigmoid_loss(images[:12], texts[:12], jnp.float32(10.0), jnp.float32(-10.0))
    np.testing.assert_allclose(found, np.concatenate([wanted, np.zeros(4)]), rtol=1e-5)
