"""A Flax NNX view of a model: the same logits, one train step, and back."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tune.small_models import model_folder

from dovetail.interop.nnx import from_nnx, to_nnx
from dovetail.io.load import load

pytestmark = pytest.mark.slow

nnx = pytest.importorskip("flax.nnx")
TOKENS = np.random.default_rng(0).integers(0, 90, (2, 16)).astype(np.int32)


def loss_of(logits):
    logprobs = jax.nn.log_softmax(logits[:, :-1])
    return -jnp.mean(jnp.take_along_axis(logprobs, TOKENS[:, 1:, None], -1))


def test_a_model_there_and_back(tmp_path):
    model = load(model_folder(tmp_path), dtype="f32")
    module = to_nnx(model)
    assert len(jax.tree.leaves(nnx.state(module, nnx.Param))) == len(jax.tree.leaves(model.params))
    packed = jax.jit(lambda tokens, segments: module(tokens, segments))
    np.testing.assert_allclose(packed(TOKENS, np.ones_like(TOKENS))[0], model.logits(TOKENS[0]), atol=1e-5)
    apart = packed(TOKENS, np.arange(16)[None] // 8 + np.ones_like(TOKENS))
    np.testing.assert_allclose(apart[0, 8:], model.logits(TOKENS[0, 8:]), atol=1e-5)

    optimizer = nnx.Optimizer(module, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(module, optimizer):
        loss, grads = nnx.value_and_grad(lambda module: loss_of(module(TOKENS)))(module)
        optimizer.update(module, grads)
        return loss

    first, second = float(step(module, optimizer)), float(step(module, optimizer))
    assert second < first
    after = from_nnx(module)
    assert jax.tree.structure(after.params) == jax.tree.structure(model.params)
    after.save(tmp_path / "saved")
    logits = jnp.stack([jnp.asarray(load(tmp_path / "saved").logits(row)) for row in TOKENS])
    assert float(loss_of(logits)) < second
