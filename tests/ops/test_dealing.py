"""The kernel that deals rows to experts: its program on arrays of all threads against a gather, lowered, and chosen."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.ops import dispatch_products, moe
from dovetail.ops.glu import Glu
from dovetail.ops.kernels.gpu.mosaic import dealing
from dovetail.ops.kernels.gpu.mosaic.threads import THREADS


class Simulated:
    """Run the threads of all programs: a number is an array [programs, THREADS], a line one more dim of its bytes."""

    thread = np.arange(THREADS)[None]

    def at_most(self, x, most):
        return np.minimum(x, most)

    def load(self, ref, index):
        return ref[index]

    def load_line(self, ref, index):
        return ref.view(np.uint8).reshape(-1, dealing.LINE)[index]

    def store_line(self, ref, index, line, where=None):
        index, where = np.broadcast_to(index, line.shape[:2]), True if where is None else where
        where = np.broadcast_to(where, index.shape)
        values, times = ref
        np.add.at(times, index[where], 1)
        values[index[where]] = line[where]


@pytest.mark.parametrize(("T", "D", "k"), [(5, 2048, 8), (7, 2880, 4), (6, 8, 1), (9, 1024, 3)])
def test_each_row_is_written_to_its_places_once(T, D, k):
    rng = np.random.default_rng(T)
    x = np.asarray(jnp.asarray(rng.normal(size=(T, D)), jnp.bfloat16))
    back = rng.permutation(T * k).astype(np.int32)
    lines = D * 2 // dealing.LINE
    assert dealing.why_not_deal(jnp.asarray(x), k) is None
    values, times = np.zeros((T * k * lines, dealing.LINE), np.uint8), np.zeros(T * k * lines, int)
    token = np.broadcast_to(np.arange(T)[:, None], (T, THREADS))
    dealing.deal(Simulated(), token, x, back, (values, times), k=k, lines=lines)
    assert (times == 1).all()
    want = x[np.argsort(back) // k]
    np.testing.assert_array_equal(values.reshape(T * k, -1), want.view(np.uint8).reshape(T * k, -1))


def test_it_is_chosen_and_lowers(monkeypatch):
    x = jax.ShapeDtypeStruct((64, 256), jnp.bfloat16)
    monkeypatch.setattr(dispatch_products, "is_hopper", lambda: True)
    monkeypatch.setattr(dispatch_products, "sort_kernel", lambda *_: None)
    assert dispatch_products.deal_kernel(x, 2, "cuda") is dealing.deal_rows
    assert dispatch_products.deal_kernel(x, 2, "cpu") is None
    narrow = jax.ShapeDtypeStruct((64, 1), jnp.float32)
    assert dispatch_products.deal_kernel(narrow, 2, "cuda") is None

    def loss(x, weights, chosen, params):
        return jnp.sum(moe._grouped(x, weights, chosen, params, Glu(), "cuda").astype(jnp.float32) ** 2)

    w = jax.ShapeDtypeStruct((4, 128, 256), jnp.bfloat16)
    params = {"gate": w, "up": w, "down": jax.ShapeDtypeStruct((4, 256, 128), jnp.bfloat16)}
    weights, chosen = (jax.ShapeDtypeStruct((64, 2), dtype) for dtype in (jnp.float32, jnp.int32))
    traced = jax.jit(jax.grad(loss, (0, 1, 3))).trace(x, weights, chosen, params)
    text = traced.lower(lowering_platforms=("cuda",)).as_text(debug_info=True)
    assert text.count("call @deal_rows") == 2
