"""Test chunked cross entropy against the plain formula and torch, on a mesh, and its memory."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refuses

from dovetail.core.mesh import TRAIN, Placement, make_mesh
from dovetail.ops.loss import cross_entropy

pytestmark = pytest.mark.slow

B, T, D, V = 4, 11, 16, 40
CASES = {
    "plain": dict(),
    "one chunk, longer than the batch": dict(z=1e-2, chunk=1000),
    "chunks of one token": dict(softcap=3.0, chunk=1),
    "chunks that fill up": dict(softcap=3.0, z=1e-2, chunk=9),
    "chunks that divide": dict(softcap=3.0, z=1e-2, chunk=11),
    "scaled": dict(scale=0.3, softcap=3.0, z=1e-2, chunk=9),
}


def batch(dtype=np.float32, rows=B, length=T):
    """Hidden states that point to their target somewhat; the third row counts for nothing, its targets are no words."""
    rng = np.random.default_rng(0)
    head = rng.normal(size=(V, D))
    targets = rng.integers(0, V, (rows, length)).astype(np.int32)
    hidden = rng.normal(size=(rows, length, D)) + 0.5 * head[targets]
    mask = (rng.random((rows, length)) < 0.7).astype(np.float32)
    mask[2], targets[2] = 0.0, -100
    return jnp.asarray(hidden, dtype), jnp.asarray(head, dtype), jnp.asarray(targets), jnp.asarray(mask)


def plain_logits(hidden, head, softcap, scale=1.0):
    logits = jnp.einsum("btd,vd->btv", hidden, head, preferred_element_type=jnp.float32) * scale
    return softcap * jnp.tanh(logits / softcap) if softcap else logits


def plain(hidden, head, targets, mask, softcap=None, z=0.0, scale=1.0):
    logits = plain_logits(hidden, head, softcap, scale)
    lse = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
    nll = jnp.sum(mask * (lse - jnp.where(targets >= 0, chosen, 0)))
    square = jnp.sum(mask * z * lse**2)
    correct = jnp.sum(mask * (jnp.argmax(logits, -1) == targets))
    return nll + square, dict(nll=nll, z=square, correct=correct)


def value_and_grads(f, hidden, head, targets, mask, **more):
    """((loss, metrics), gradients by hidden, head and mask)."""
    step = jax.jit(jax.value_and_grad(lambda h, w, m, t: f(h, w, t, m, **more), (0, 1, 2), has_aux=True))
    return step(hidden, head, mask, targets)


def assert_same(got, want, tol=1e-5):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        b = np.asarray(b, np.float32)
        np.testing.assert_allclose(np.asarray(a, np.float32), b, rtol=tol, atol=tol * max(1.0, np.abs(b).max()))


def test_logits_held_in_bf16_change_little():
    args = batch()
    (loss, metrics), grads = value_and_grads(cross_entropy, *args, z=1e-2, softcap=3.0)
    (rounded, _), rounded_grads = value_and_grads(cross_entropy, *args, z=1e-2, softcap=3.0, dtype=jnp.bfloat16)
    assert loss != rounded and metrics["nll"].dtype == jnp.float32
    np.testing.assert_allclose(rounded, loss, rtol=2e-3)
    for ours, theirs in zip(rounded_grads, grads, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-2 * np.abs(theirs).max())


@pytest.mark.parametrize("case", CASES)
def test_value_and_gradients_equal_the_plain_formula(case):
    args, more = batch(), CASES[case]
    got = value_and_grads(cross_entropy, *args, **more)
    want = value_and_grads(plain, *args, **{key: more[key] for key in more if key != "chunk"})
    assert 0 < want[0][1]["correct"] < B * T
    assert_same(got, want)
    # without a gradient another, cheaper loop runs
    assert_same(jax.jit(lambda *a: cross_entropy(*a, **more))(*args), want[0])


def test_equals_torch():
    torch = pytest.importorskip("torch")
    hidden, head, targets, mask = batch()
    h, w = (torch.tensor(np.asarray(x), requires_grad=True) for x in (hidden, head))
    seen = torch.tensor(np.where(np.asarray(mask) > 0, np.asarray(targets), -100).astype(np.int64))
    loss = torch.nn.functional.cross_entropy((h @ w.T).reshape(-1, V), seen.reshape(-1), reduction="sum")
    loss.backward()
    (value, _), grads = value_and_grads(cross_entropy, hidden, head, targets, mask, chunk=4)
    assert h.grad is not None and w.grad is not None
    assert_same((value, *grads[:2]), [jnp.asarray(x.detach().numpy()) for x in (loss, h.grad, w.grad)])


def test_the_gradient_scales_with_the_callers_factor():
    args = batch()

    def mean(f):
        def scaled(h, w, t, m):
            loss, metrics = f(h, w, t, m)
            return 3.0 * loss / jnp.sum(m), metrics

        return value_and_grads(scaled, *args)

    assert_same(mean(cross_entropy), mean(plain))


def test_microbatches_add_up_to_the_large_batch():
    args = batch()
    parts = [value_and_grads(cross_entropy, a[:2], args[1], t[:2], m[:2], chunk=T)[1][1]
             for a, t, m in ((args[0], *args[2:]), (args[0][2:], args[2][2:], args[3][2:]))]  # fmt: skip
    assert_same(parts[0] + parts[1], value_and_grads(cross_entropy, *args, chunk=T)[1][1], tol=1e-6)


def test_a_batch_without_targets_has_loss_0():
    hidden, head, targets, mask = batch()
    (loss, _), grads = value_and_grads(cross_entropy, hidden, head, targets, 0 * mask, z=1.0, chunk=4)
    assert loss == 0 and not np.any(grads[0]) and not np.any(grads[1])


def test_metrics_carry_no_gradient():
    hidden, head, targets, mask = batch()
    grad = jax.grad(lambda h: sum(cross_entropy(h, head, targets, mask, z=0.1)[1].values(), jnp.zeros(())))(hidden)
    assert not np.any(grad)


def test_bf16_hidden_with_an_f32_head_gives_the_head_an_f32_gradient():
    hidden, head, targets, mask = batch(jnp.bfloat16)
    args = (hidden, head.astype(jnp.float32), targets, mask)
    got = value_and_grads(cross_entropy, *args, chunk=4)
    assert got[1][0].dtype == jnp.bfloat16 and got[1][1].dtype == jnp.float32
    want = value_and_grads(lambda h, w, t, m: plain(h, w.astype(jnp.bfloat16), t, m), *args)
    assert_same(got, want, tol=1e-2)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_the_logits_are_never_all_in_memory():
    rows, length, words = 4, 512, 2048
    h = jax.ShapeDtypeStruct((rows, length, D), jnp.float32)
    w = jax.ShapeDtypeStruct((words, D), jnp.float32)
    t, m = (jax.ShapeDtypeStruct((rows, length), d) for d in (jnp.int32, jnp.float32))

    def temp(f):
        step = jax.jit(jax.value_and_grad(lambda h, w, t, m: f(h, w, t, m)[0], (0, 1)))
        analysis = step.lower(h, w, t, m).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    logits = 4 * rows * length * words
    chunked = temp(lambda *a: cross_entropy(*a, chunk=128))
    assert chunked < logits / 4 < logits < temp(plain)


# --- a mesh -----------------------------------------------------------------------------------------------------------

MESHES = {
    "fsdp 4 x tensor 2": dict(fsdp=4, tensor=2),
    "data 2 x fsdp 4": dict(data=2, fsdp=4),
    "fsdp 2 x context 2 x tensor 2": dict(fsdp=2, context=2, tensor=2),
}


def on_mesh(axes, hidden, head, targets, mask):
    placement = Placement(make_mesh(axes), TRAIN)

    def put(x, *names):
        return jax.device_put(x, placement.sharding(names, x.shape))

    args = (put(hidden, "batch", "length", None), put(head, "vocab", "embed"))
    return placement, (*args, put(targets, "batch", "length"), put(mask, "batch", "length"))


@pytest.mark.parametrize("rows", [8, 3], ids=["", "rows that the mesh does not divide"])
@pytest.mark.parametrize("axes", MESHES)
def test_a_mesh_gives_what_one_device_gives(axes, rows):
    one = batch(rows=rows, length=12)
    placement, split = on_mesh(MESHES[axes], *one)
    got = value_and_grads(cross_entropy, *split, z=1e-2, chunk=4, placement=placement)
    assert_same(got, value_and_grads(cross_entropy, *one, z=1e-2, chunk=4))
    assert got[1][1].sharding.is_equivalent_to(split[1].sharding, 2)  # the head's gradient lies as the head does


def moves(axes):
    """The collectives of a step on a mesh: (outside the loop, inside)."""
    placement, split = on_mesh(axes, *batch(rows=8, length=12))
    step = jax.jit(jax.grad(lambda h, w, t, m: cross_entropy(h, w, t, m, chunk=4, placement=placement)[0], (0, 1)))
    text = step.lower(*split).compile().as_text() or ""
    found = [line for line in text.splitlines() if re.search(r"= .*(all-|reduce-scatter|permute)[\w-]*\(", line)]
    inside = [line for line in found if "while/body" in line]
    return [line for line in found if line not in inside], inside


def test_the_loop_sends_only_what_a_split_vocabulary_needs():
    outside, inside = moves(dict(data=2, fsdp=4))
    assert outside and not inside
    assert not moves(dict(fsdp=2, context=4))[1]
    _, inside = moves(dict(fsdp=4, tensor=2))
    assert inside and not [line for line in inside if f"{V // 2},{D}" in line]  # never the head or its gradient


def test_bad_shapes_and_arguments_are_refused():
    hidden, head, targets, mask = batch()
    with refuses(naming="(16, 40)"):
        cross_entropy(hidden, head.T, targets, mask)
    with refuses(naming="(4, 10)"):
        cross_entropy(hidden, head, targets[:, 1:], mask)
    with refuses("chunk"):
        cross_entropy(hidden, head, targets, mask, chunk=0)
