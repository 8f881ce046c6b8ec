"""The routing kernels for Hopper: their programs on arrays of all threads against the references, and lowered."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import params
from jax.experimental.pallas import mosaic_gpu as plgpu

from dovetail.ops import dispatch_products, moe
from dovetail.ops.glu import Glu
from dovetail.ops.kernels.gpu import experts, grouped_parts
from dovetail.ops.kernels.gpu.mosaic import routing, sorting
from dovetail.ops.kernels.gpu.mosaic.threads import THREADS, WARP, WARPS
from dovetail.ops.router import top_k_by_rank

pytestmark = pytest.mark.slow


class Memory:
    """Hold an output of all programs, each of whose elements is written once."""

    def __init__(self, size: int, dtype) -> None:
        self.values, self.times = np.zeros(size, dtype), np.zeros(size, int)

    def store(self, index, value, where) -> None:
        places = np.broadcast_to(index, where.shape)[where]
        np.add.at(self.times, places, 1)  # an index past the end raises
        self.values[places] = np.broadcast_to(value, where.shape)[where]


class Shared:
    """Hold the programs' shared memory; what is written is read only after a barrier, and the other way round."""

    def __init__(self, programs: int, size: int) -> None:
        self.values = np.random.default_rng(0).integers(-(2**31), 2**31, (programs, size)).astype(np.int32)
        self.barrier()

    def barrier(self) -> None:
        self.writer, self.is_read, self.is_counted = (np.zeros(self.values.shape, int) for _ in range(3))

    def at(self, index):
        rows = np.arange(len(self.values))[:, None]
        return np.broadcast_arrays(rows, np.broadcast_to(index, (len(self.values), THREADS)))

    def load(self, index):
        place = tuple(self.at(index))
        assert not self.writer[place].any() and not self.is_counted[place].any()
        self.is_read[place] = 1
        return self.values[place]

    def store(self, index, value) -> None:
        place, warp = tuple(self.at(index)), np.arange(THREADS) // WARP + 1
        assert not self.is_read[place].any() and not self.is_counted[place].any()
        assert not self.writer[place].any()
        self.writer[place], self.values[place] = warp, value
        assert (self.writer[place] == warp).all() and (self.values[place] == value).all()  # of several threads: alike

    def increment(self, index) -> None:
        place = tuple(self.at(index))
        assert not self.writer[place].any() and not self.is_read[place].any()
        self.is_counted[place] = 1
        np.add.at(self.values, place, 1)


class Simulated:
    """Run the threads of all programs: a number is an array [programs, THREADS]."""

    thread = np.arange(THREADS, dtype=np.int32)[None]

    def __init__(self, programs: int, shared: list[Shared]) -> None:
        self.programs, self.shared = programs, shared

    def load(self, ref, index):
        return ref.load(index) if isinstance(ref, Shared) else ref[index]

    def store(self, ref, index, value, where=None) -> None:
        if isinstance(ref, Shared):
            assert where is None
            ref.store(index, value)
        else:
            where = np.broadcast_to(True if where is None else where, (self.programs, THREADS))
            ref.store(index, value, where)

    def increment(self, ref, index) -> None:
        ref.increment(index)

    def barrier(self) -> None:
        for each in self.shared:
            each.barrier()

    def by_warp(self, reduce, x):
        warps = np.broadcast_to(x, (self.programs, THREADS)).reshape(-1, WARPS, WARP)
        return np.repeat(reduce(warps, axis=-1), WARP, axis=-1).astype(np.int32)

    def ballot(self, truth):
        bits = np.where(truth, np.uint32(1) << (self.thread % WARP).astype(np.uint32), np.uint32(0))
        return self.by_warp(lambda x, axis: x.sum(axis=axis, dtype=np.uint32), bits)

    def total(self, x):
        return self.by_warp(np.sum, x)

    def below(self, x):
        warps = np.broadcast_to(x, (self.programs, THREADS)).reshape(-1, WARPS, WARP)
        return (warps.cumsum(axis=-1) - warps).reshape(-1, THREADS).astype(np.int32)

    def greatest(self, x):
        return self.by_warp(np.max, x)

    def least(self, x):
        return self.by_warp(np.min, x)

    def ones(self, x):
        return sum((x >> i) & 1 for i in range(32))

    def lanes_below(self, lane):
        return ((np.int64(1) << lane) - 1).astype(np.int32)

    def select(self, truth, x, y):
        return np.where(truth, x, y).astype(np.result_type(*(a for a in (x, y) if isinstance(a, np.ndarray))))

    def at_most(self, x, most):
        return np.minimum(x.astype(np.uint32), np.uint32(most)).astype(np.int32)

    def exp(self, x):
        return np.exp(x)

    def as_integer(self, x):
        return x.view(np.int32)

    def as_float(self, x):
        return x.view(np.float32)


def simulate(name, program, given, out, programs, shared=()):
    """Do what threads.launch does."""
    memory = [Shared(programs, size) for size in shared]
    outputs = [Memory(int(np.prod(a.shape)), a.dtype) for a in out]
    number = np.broadcast_to(np.arange(programs, dtype=np.int32)[:, None], (programs, THREADS))
    with np.errstate(invalid="ignore", over="ignore"):
        program(Simulated(programs, memory), number, *(np.asarray(a).reshape(-1) for a in given), *outputs, *memory)
    assert all((a.times == 1).all() for a in outputs)
    return [a.values.reshape(like.shape) for a, like in zip(outputs, out, strict=True)]


@pytest.fixture
def simulated(monkeypatch):
    for module in (routing, sorting):
        monkeypatch.setattr(module, "launch", simulate)


KINDS = {
    "random": lambda rng, T, E, k: rng.random((T, E)).argsort(axis=1)[:, :k],
    "all equal": lambda rng, T, E, k: np.full((T, k), E - 1),
    "skewed": lambda rng, T, E, k: (E * rng.random((T, k)) ** 6).astype(int),
    "ends idle": lambda rng, T, E, k: rng.integers(E // 4, E // 2, (T, k)),
}
POSITIONS = jax.jit(moe._positions, static_argnums=1)
TILES = jax.jit(grouped_parts.tiles_of, static_argnums=1)
SHAPES = [(9, 8, 2), (16, 128, 8), (33, 32, 4), (77, 40, 1), (200, 256, 8), (256, 128, 8), (130, 512, 8), (700, 16, 6)]


@pytest.mark.parametrize(("T", "E", "k"), SHAPES)
def test_the_arrangement_is_the_references(simulated, T, E, k):
    rng = np.random.default_rng(T)
    N = experts.tokens_of_tile(T * k, E, experts.MAX_TOKENS, experts.SLACK)
    for tile, kinds in ((N, KINDS), (experts.CHUNK, ("skewed",))):
        sizes = routing.Sizes(T, k, E, tile, experts.CHUNK)
        reference = jax.jit(functools.partial(experts.places, sizes=sizes))
        for kind in kinds:
            chosen = KINDS[kind](rng, T, E, k).astype(np.int32)
            got = routing.arrange.__wrapped__(chosen, sizes)
            jax.tree.map(np.testing.assert_array_equal, got, reference(chosen))


@pytest.mark.parametrize(("T", "E", "k"), [(9, 8, 2), (513, 128, 8), (700, 40, 6), (4100, 16, 2), (600, 512, 1)])
def test_pairs_are_sorted_and_divided_into_tiles_as_by_the_references(simulated, T, E, k):
    rng = np.random.default_rng(T)
    for kind in KINDS.values():
        group = kind(rng, T, E, k).astype(np.int32).reshape(-1)
        place, pair, sizes = sorting.sort_pairs.__wrapped__(group, E)
        jax.tree.map(np.testing.assert_array_equal, (place, sizes), POSITIONS(jnp.asarray(group), E))
        np.testing.assert_array_equal(pair[place], np.arange(T * k))
        few = np.where(np.arange(E) % 3 == 0, 0, sizes).astype(np.int32)
        for own in (sizes, few, 0 * sizes):  # rows in no group
            tiles = grouped_parts.sizes_of_tiles(T * k, E)
            got = sorting.tiles_of_groups.__wrapped__(own, T * k, tiles)
            jax.tree.map(np.testing.assert_array_equal, tuple(got), TILES(jnp.asarray(own), T * k))


@pytest.mark.parametrize(("T", "E", "k"), [(9, 32, 4), (33, 128, 8), (64, 64, 6), (18, 512, 1), (16, 128, 16)])
def test_the_choice_is_the_references(simulated, T, E, k):
    rng = np.random.default_rng(T)
    for kind in ("random", "ties", "infinite"):
        logits = 3 * rng.normal(size=(T, E)).astype(np.float32)
        if kind == "ties":
            logits = np.where(rng.random((T, E)) < 0.5, -0.0, np.round(logits / 2)).astype(np.float32)
        if kind == "infinite":
            logits[rng.random((T, E)) < 0.9] = -np.inf
            logits[:, :k] = 1e-40  # subnormal
        for router in (moe.Router(E, k, "chosen"), moe.Router(E, k, normalize=True, scale=2.5)):
            assert routing.why_not_top_k(router, logits, None) is None
            weights, chosen = routing.route_top_k.__wrapped__(router, logits)
            _, want = top_k_by_rank(jnp.asarray(logits), k)
            np.testing.assert_array_equal(chosen, want)
            if kind == "random":
                np.testing.assert_allclose(weights, moe.route(router, jnp.asarray(logits))[0], rtol=2e-6)


def test_nan_logits_choose_experts_that_exist(simulated):
    logits = np.random.default_rng(0).normal(size=(9, 64)).astype(np.float32)
    logits[0], logits[1, ::2] = np.nan, np.nan
    logits[2] = np.full(64, 0xFFFFFFFF, np.uint32).view(np.float32)  # the NaN whose key is the least
    weights, chosen = routing.route_top_k.__wrapped__(moe.Router(64, 6, "chosen"), logits)
    assert (chosen >= 0).all() and (chosen < 64).all()
    assert np.isnan(weights[:3]).all() and np.isfinite(weights[3:]).all()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, None),
        (dict(score="chosen", normalize=False), None),
        (dict(normalize=False), "softmax"),
        (dict(score="sigmoid"), "softmax"),
        (dict(groups=4, top_groups=2), "alone"),
        (dict(bias=jnp.zeros(64)), "alone"),
        (dict(top_k=routing.MOST_CHOSEN + 1), "per token"),
        (dict(experts=48), "multiple"),
        (dict(shape=(2, 8, 64)), "matrix"),
        (dict(dtype=jnp.bfloat16), "f32"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_the_choice_by_a_kernel_is_where_it_runs(monkeypatch, change, why):
    usual = dict(experts=64, top_k=6, normalize=True)
    router = moe.Router(**usual | {name: change[name] for name in change if name in moe.Router.__dataclass_fields__})
    logits = jax.ShapeDtypeStruct(change.get("shape", (16, 64)), change.get("dtype", jnp.float32))
    choose = lambda: dispatch_products.router_kernel(router, logits, change.get("bias"), None, None)  # noqa: E731
    assert choose() is None  # on a CPU
    monkeypatch.setattr(dispatch_products, "is_one_gpu", lambda *_: True)
    monkeypatch.setattr(dispatch_products, "is_hopper", lambda: True)
    assert choose() is (None if why else routing.route_top_k)
    assert (why or "") in (routing.why_not_top_k(router, logits, change.get("bias")) or "")


def test_the_kernels_lower_for_a_gpu(monkeypatch):
    monkeypatch.setattr(dispatch_products, "is_one_gpu", lambda *_: True)
    monkeypatch.setattr(dispatch_products, "is_hopper", lambda: True)

    def step(x, logits):
        weights, chosen = moe.route_step(moe.Router(32, 4, "chosen"), logits)
        return weights, experts.sorted_tokens(x, chosen, 32)[:3]

    given = jnp.zeros((16, 64)), jnp.zeros((16, 32))
    text = jax.jit(step).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 2
    monkeypatch.undo()
    text = jax.jit(lambda *given: step(*given)).lower(*given).as_text()
    assert "mosaic_gpu" not in text  # elsewhere the references run


def test_interpreted_products_have_the_reference_beside_them(monkeypatch):
    monkeypatch.setattr(plgpu, "force_gpu_interpret_mode", params.force_gpu_interpret_mode, raising=False)
    chosen = np.random.default_rng(0).integers(0, 8, (16, 2))
    with params.force_gpu_interpret_mode(params.InterpretGPUParams()):
        tiles = jax.jit(lambda x, chosen: experts.sorted_tokens(x, chosen, 8)[1:3])(jnp.zeros((16, 64)), chosen)
    sizes = routing.Sizes(16, 2, 8, experts.tokens_of_tile(32, 8, 128, experts.SLACK), experts.CHUNK)
    jax.tree.map(np.testing.assert_array_equal, tiles, experts.places(chosen, sizes)[:2])


def test_too_many_pairs_are_left_to_xla():
    sizes = routing.Sizes(1024, 16, 64, 64, 8)
    assert routing.arrangement(sizes, experts.places) is experts.places


def test_many_tokens_are_sorted_by_kernels(monkeypatch):
    monkeypatch.setattr(dispatch_products, "is_one_gpu", lambda *_: True)
    monkeypatch.setattr(dispatch_products, "is_hopper", lambda: True)
    x, logits = jnp.zeros((1, 1024, 64)), jnp.zeros((1024, 32))
    params = {"gate": jnp.zeros((32, 64, 64)), "up": jnp.zeros((32, 64, 64)), "down": jnp.zeros((32, 64, 64))}

    def kernels() -> list[str]:
        def step(x, logits):
            return moe.experts(x, *moe.route_step(moe.Router(32, 4, "chosen"), logits), params, Glu())

        text = jax.jit(step).trace(x, logits).lower(lowering_platforms=("cuda",)).as_text()
        return [name for name in ("route_top_k", "count_pairs", "place_pairs") if name in text]

    assert kernels() == ["route_top_k", "count_pairs", "place_pairs"]
    too_many = jax.ShapeDtypeStruct((1 << 19,), jnp.int32)
    assert dispatch_products.sort_kernel(too_many, 512, None) is None
