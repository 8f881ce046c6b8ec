"""Products of bf16 matrices with up to 8 tokens on Hopper: the warps on NumPy, beside products in f32, and lowered."""

from __future__ import annotations

from types import SimpleNamespace

import decode_warps
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dovetail.core.types import Paged
from dovetail.ops import dispatch_products
from dovetail.ops.few_tokens import Normed, Product, add_rms_norm, few_product
from dovetail.ops.glu import Glu
from dovetail.ops.kernels.gpu import dense_few
from dovetail.ops.kernels.gpu.dense_warp import STEP, DensePlan
from dovetail.ops.linear import matmul, matmul_to_add
from dovetail.ops.norm import rms_norm

pytestmark = pytest.mark.slow


class Ops(decode_warps.Warps):
    """Run the operations of dense_ops on arrays."""

    def pointer(self, ref, row, width: int, offset):
        return ref, self.full(row).astype(np.int64) * width + offset

    def copy_words(self, target, index, pointer, first: int, is_shared: bool, when) -> None:
        ref, place = pointer
        outer, self.active = self.active, self.active & (True if when is None else when)
        words = ref.reshape(-1).view(np.int32)[np.where(self.active, place + first, 0)[..., None] // 4 + np.arange(4)]
        self.begin_copy(target, index, words)
        self.active = outer

    def words_now(self, pointer):
        ref, place = pointer
        return [ref.reshape(-1).view(np.int32)[np.where(self.active, place, 0) // 4]]

    def copied(self, ref, index, count: int):
        found = super().copied(ref, index, count)
        ref.reader[:] = -1  # a thread copies again to where it alone has read
        return found

    def store_all(self, ref, index, values, where=None):
        where = (
            self.active & self.full(True if where is None else where) if isinstance(ref, decode_warps.Output) else None
        )
        super().store_all(ref, index, values, where)

    def barrier(self):
        self.shared[1].owner[:] = -1  # of the sums; a thread copies to its own places of the other part

    def minimum(self, x, y):
        return np.fmin(x, y)

    def inverse_root(self, x):
        return (1 / np.sqrt(x)).astype(np.float32)

    def numbers(self, pair):
        both = self.halves(pair, "bf16")
        return [both[..., 0], both[..., 1]]


@pytest.fixture
def on_numpy(monkeypatch):
    """Let the kernel compute on NumPy."""

    def launch(_name, program, given, out, programs, shared, on):
        memory = [decode_warps.Shared(programs, size) for size in shared]
        result = decode_warps.Output(out[0])
        number = np.arange(programs, dtype=np.int32)[:, None]
        program(Ops(programs, memory), number, *map(np.asarray, given), result, *memory)
        assert (result.times == 1).all(), "each element is written once"
        return [jnp.asarray(result.values.reshape(out[0].shape))]

    monkeypatch.setattr(dense_few, "launch", launch)
    return dense_few.few_product.__wrapped__  # pyright: ignore[reportAttributeAccessIssue]


def normal(seed: int, *shape: int, scale: float = 1.0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * scale, jnp.bfloat16)


def as_f32(*arrays):
    return [np.asarray(x, np.float32) for x in arrays]


def check(got, want):
    assert got.dtype == ml_dtypes.bfloat16
    np.testing.assert_allclose(np.asarray(got, np.float32), want, atol=2e-2, rtol=2e-2)


def a_plan(T: int, out: int, size: int, **changes) -> DensePlan:
    return DensePlan(T, size, out, 2, -(-size * 2 // STEP), out // 16)._replace(**changes)


# shape of the weight, tokens, changes of the plan: one block, rows that end in the midst of a step, few steps in memory
CASES = {
    "two steps": ((32, 256), 1, dict()),
    "one block": ((32, 1024), 3, dict(blocks=1, programs=4)),
    "a part of a step": ((48, 712), 8, dict(slots=3)),
    "one block, a part of a step": ((48, 2888), 5, dict(blocks=1, programs=6, slots=7)),
    "in turns": ((80, 1024), 8, dict(programs=2, slots=4)),
    "one block in turns, a part of a step": ((80, 712), 2, dict(blocks=1, programs=3, slots=2)),
    "in turns, all steps in memory": ((80, 712), 4, dict(programs=2)),
}


@pytest.mark.parametrize("name", CASES)
def test_warps_multiply_tokens(monkeypatch, on_numpy, name):
    (out, size), T, changes = CASES[name]
    monkeypatch.setattr(dense_few, "plan", lambda *_: a_plan(T, out, size, **changes))
    x, w = normal(0, T, size), normal(1, out, size, scale=size**-0.5)
    x32, w32, bias32, residual32 = as_f32(x, w, bias := normal(2, out), residual := normal(3, T, out))
    check(on_numpy(x, w), x32 @ w32.T)
    check(on_numpy(x, w, bias, residual=residual), x32 @ w32.T + bias32 + residual32)


@pytest.mark.parametrize("glu", [Glu(), Glu("gelu_tanh"), Glu(limit=1.0)])
@pytest.mark.parametrize("programs", [6, 4])
def test_warps_apply_a_gated_unit(monkeypatch, on_numpy, glu, programs):
    out, size, T = 48, 712, 3
    monkeypatch.setattr(dense_few, "plan", lambda *_: a_plan(T, out, size, glu=glu, programs=programs, slots=3))
    x, w, bias = normal(0, T, size), normal(1, 2 * out, size, scale=size**-0.5), normal(2, 2 * out)
    x32, w32, bias32 = as_f32(x, w, bias)
    check(on_numpy(x, w, glu=glu), glu(*np.split(x32 @ w32.T, 2, axis=1)))
    check(on_numpy(x, w, bias, glu=glu), glu(*np.split(x32 @ w32.T + bias32, 2, axis=1)))


@pytest.mark.parametrize("glu", [None, Glu()])
@pytest.mark.parametrize("programs", [6, 4])
def test_warps_normalise_tokens(monkeypatch, on_numpy, glu, programs):
    out, size, T, eps = 48, 712, 5, 1e-6
    plan = a_plan(T, out, size, glu=glu, eps=eps, offset=1.0, slots=3, programs=programs if glu else programs // 2)
    monkeypatch.setattr(dense_few, "plan", lambda *_: plan)
    x, w, norm = (
        normal(0, T, size, scale=30),
        normal(1, out * (2 if glu else 1), size, scale=size**-0.5),
        normal(2, size),
    )
    x32, w32, norm32 = map(jnp.asarray, as_f32(x, w, norm))
    y = rms_norm(x32, norm32, eps, 1.0) @ w32.T
    got = on_numpy(x, w, norm=norm, eps=eps, offset=1.0, glu=glu)
    check(got, np.asarray(glu(*jnp.split(y, 2, axis=1)) if glu else y))


# --- where it is chosen -----------------------------------------------------------------------------------------------


@pytest.fixture
def hopper(monkeypatch):
    """Choose kernels as on one Hopper GPU."""
    monkeypatch.setattr(dispatch_products, "is_hopper", lambda: True)
    monkeypatch.setattr(jax, "devices", lambda *_: [None])


def test_few_tokens_on_one_hopper_gpu_have_the_kernel(monkeypatch, hopper):
    def is_chosen(x, w, **options):
        return (
            dispatch_products.few_kernel(jnp.zeros(x, jnp.bfloat16), jnp.zeros(w, jnp.bfloat16), **options) is not None
        )

    assert is_chosen((1, 1024), (4096, 1024)) and is_chosen((8, 2880), (5120, 2880), glu=Glu())
    assert not is_chosen((9, 1024), (4096, 1024)) and not is_chosen((1, 1, 1024), (4096, 1024))  # prompts, training
    assert not is_chosen((1, 1024), (4096, 1024), out_dtype=jnp.float32)  # a head, whose logits are f32
    assert not is_chosen((1, 1024), (128, 1024)) and not is_chosen((1, 1028), (4096, 1028))
    assert not is_chosen((1, 1024), (4096, 1024), glu=Glu("gelu"))
    assert is_chosen((4, 4096), (28672, 4096)) and not is_chosen((5, 4096), (28672, 4096))
    monkeypatch.setattr(jax, "devices", lambda *_: [None] * 2)
    assert not is_chosen((1, 1024), (4096, 1024))


@pytest.mark.parametrize("shape", [(4096, 1024), (1024, 2048), (1024, 3072), (6144, 4096), (4096, 14336), (2880, 4096)])
@pytest.mark.parametrize("eps", [None, 1e-6])
def test_a_plan_fits_a_multiprocessor(shape, eps):
    for glu in (None, Glu()):
        p = dense_few.plan(8, shape, glu, eps)
        at_once = -(-p.programs // dense_few.SMS)
        assert at_once * (4 * sum(p.memory) / 1024 + 1) <= 228
        assert p.turns * p.programs >= p.units and p.ahead >= min(p.steps, 4)
        assert p.turns == 1 or p.steps % p.slots == 0


@pytest.mark.parametrize("options", [dict(), dict(bias=True, residual=True), dict(norm=True, glu=Glu())])
@pytest.mark.parametrize("shape", [(1024, 3072), (28672, 1032)])
def test_the_kernel_lowers_for_a_gpu(shape, options):
    def abstract(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    (out, size), glu = shape, options.get("glu")
    shapes = {"bias": (out,), "residual": (3, out), "norm": (size,)}
    given = {name: abstract(*shapes[name]) for name in options if name != "glu"}
    static = dict(eps=1e-6) if "norm" in options else {}
    traced = dense_few.few_product.trace(abstract(3, size), abstract(out, size), glu=glu, **static, **given)
    assert "dense_few" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_gradients_and_other_platforms_have_the_reference(hopper):
    x, w, bias = normal(0, 3, 1024), normal(1, 2048, 1024, scale=1 / 32), normal(2, 2048)
    assert few_product(x, w, bias) is not None

    def run(multiply):
        return jax.value_and_grad(lambda *given: jnp.sum(multiply(*given).astype(jnp.float32) ** 2), (0, 1, 2))(
            x, w, bias
        )

    for got, want in zip(*(jax.tree.leaves(run(f)) for f in (matmul, lambda x, w, b: x @ w.T + b)), strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


def test_sums_and_norms_are_left_to_products(hopper):
    ctx = Paged(jnp.zeros((1, 1), int), jnp.ones(1, int), jnp.asarray([0, 1]), jnp.ones(1, int))
    residual, heads, norm = normal(0, 2, 1024), normal(1, 2, 16, 128), normal(2, 1024)
    o, q = normal(3, 1024, 16, 128, scale=1 / 45), normal(4, 1, 32, 128, 1024, scale=1 / 32)
    delta = matmul_to_add(heads, o, dims=2)
    assert isinstance(delta, Product)
    x, h = add_rms_norm(ctx, residual, delta, norm, 1e-6, readers={"q": q, "norm": norm})
    assert isinstance(h, Normed)
    want = residual + jnp.einsum("tnh,dnh->td", heads, o)
    check(x, *as_f32(want))
    y = jnp.einsum("td,pnhd->tpnh", rms_norm(x, norm, 1e-6), q)
    check(matmul(h, q), *as_f32(y))
    unknown = SimpleNamespace(shape=(4096, 1024))  # such as a quantised weight
    assert not isinstance(add_rms_norm(ctx, x, None, norm, 1e-6, readers={"q": q, "k": unknown})[1], Normed)
