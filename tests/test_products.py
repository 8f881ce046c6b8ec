"""Products of f32 numbers use full precision on accelerators, in XLA and in kernels; those of tf32 and bf16 do not.

The precision is read from programs traced for platforms that this machine does not have.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from described import a_device
from engine_steps import trace_step
from jax.extend.core import ClosedJaxpr, Jaxpr
from refusals import refuses
from test_lowering import MODELS, PAGE, PAGES, B, S, T, ints
from train_cases import CONFIGS, alone, recipe

from dovetail.core.compute import COMPUTES, Compute, compute_of
from dovetail.core.spec import abstract
from dovetail.core.training import Precision
from dovetail.core.types import Batch
from dovetail.engine.device.batch import Shape
from dovetail.engine.device.runner import Runner
from dovetail.engine.device.step import score
from dovetail.engine.embed import _embed
from dovetail.io.load import _logits
from dovetail.models import decoder
from dovetail.models.decoder import init_cache
from dovetail.models.registry import parse_config
from dovetail.models.spec import spec
from dovetail.train.next_token import next_token
from dovetail.train.objective import step_context
from dovetail.train.step import gradients, make_eval

pytestmark = pytest.mark.slow

HIGHEST = (jax.lax.Precision.HIGHEST,) * 2
PLATFORMS = ("tpu", "cuda")
# who asks for TF32 where there is none gets f32
EXACT = [("f32", "tpu", True), ("f32", "cuda", True), ("tf32", "cuda", False), ("tf32", "tpu", True)]
FAST = ("latent",)
NAMES = [pytest.param(name, marks=() if name in FAST else pytest.mark.thorough) for name in MODELS]


def equations(jaxpr: Jaxpr) -> Iterator:
    """Of all that is inside, kernels too."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: isinstance(x, ClosedJaxpr | Jaxpr)):
            if isinstance(inner, ClosedJaxpr | Jaxpr):
                yield from equations(inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner)


def products(jaxpr: Jaxpr) -> list:
    """How exact each product of f32 numbers is asked to be."""
    named = ("dot_general", "ragged_dot_general", "ragged_dot")
    found = [eqn for eqn in equations(jaxpr) if eqn.primitive.name in named]
    return [eqn.params["precision"] for eqn in found if jnp.float32 in (v.aval.dtype for v in eqn.invars[:2])]


def kernels(jaxpr: Jaxpr) -> int:
    """Kernels with products in them."""
    return sum(bool(products(e.params["jaxpr"])) for e in equations(jaxpr) if e.primitive.name == "pallas_call")


def model(name: str, compute: Compute):
    cfg = parse_config(dict(MODELS[name]))
    cache = jax.eval_shape(lambda: init_cache(cfg, S * PAGES, PAGE, compute.dtype))
    return cfg, abstract(spec(cfg), compute.dtype), cache


def engine_step(name: str, compute: Compute, platform: str, tokens: int) -> jax.stages.Traced:
    cfg, params, cache = model(name, compute)
    return trace_step(params, cache, cfg, Shape(tokens, S, PAGES), compute, platform)


@pytest.mark.parametrize("dtype, platform, exact", EXACT, ids=lambda x: str(x))
@pytest.mark.parametrize("tokens", [S, pytest.param(64, marks=pytest.mark.thorough)], ids=["decode", "prefill"])
@pytest.mark.parametrize("name", NAMES)
def test_engine_steps(name, tokens, dtype, platform, exact):
    with a_device(platform):
        traced = engine_step(name, compute_of(dtype), platform, tokens)
        assert traced.lower(lowering_platforms=(platform,)).as_text()
    found = products(traced.jaxpr.jaxpr)
    assert len(found) > 10
    assert [precision == HIGHEST for precision in found] == [exact] * len(found)
    assert kernels(traced.jaxpr.jaxpr) > 0 or platform == "tpu"


def test_the_paged_kernel_of_a_tpu():
    """Upstream's, which is lowered for a chip that this machine must be told of."""
    device = jax.sharding.AbstractDevice("TPU v5", num_cores=1, platform="tpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        traced = engine_step("wide heads", COMPUTES["f32"], "tpu", S)
        assert traced.lower(lowering_platforms=("tpu",)).as_text()
    assert kernels(traced.jaxpr.jaxpr) > 0 and set(products(traced.jaxpr.jaxpr)) == {HIGHEST}


def batch() -> Batch:
    return Batch(*[ints(B, T)] * 4, jax.ShapeDtypeStruct((B, T), jnp.float32))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype, platform, exact", EXACT, ids=lambda x: str(x))
@pytest.mark.slow
@pytest.mark.parametrize("name", ["moe", pytest.param("latent", marks=pytest.mark.thorough)])
def test_train_steps(name, dtype, platform, exact):
    """Forward and backward, and the held-out loss. A TPU's kernels refuse a setting between all and one bf16."""
    cfg = parse_config(CONFIGS[name] | dict(max_position_embeddings=T))
    settings = recipe(precision=Precision(dtype), length=T, batch=B, accumulate=2, remat="dots")
    params, objective = abstract(spec(cfg), jnp.float32), next_token(settings)
    ctx = step_context(settings, alone(), platform)

    def step(params, batch):
        return gradients(params, cfg, objective, batch, ctx, settings.accumulate)[0]

    for run in (step, make_eval(cfg, objective, ctx)):
        with a_device(platform):
            traced = jax.jit(run).trace(params, batch())
            assert traced.lower(lowering_platforms=(platform,)).as_text()
        found = products(traced.jaxpr.jaxpr)
        assert len(found) > 10
        assert [precision == HIGHEST for precision in found] == [exact] * len(found)
        assert kernels(traced.jaxpr.jaxpr) > 0 or (name == "latent" and platform == "tpu")


@pytest.mark.parametrize("dtype, exact", [("f32", True), ("tf32", False)])
def test_the_programs_besides_the_steps(dtype, exact, monkeypatch):
    """Scores of a prompt, embeddings, dt.load's logits and generate, where jax finds a GPU."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    compute = compute_of(dtype)
    cfg, params, cache = model("dense", compute)
    hidden, row, one = jax.ShapeDtypeStruct((8, cfg.dim), jnp.float32), ints(1, 32), ints()
    runner = SimpleNamespace(cfg=cfg, compute=compute, platform=None, placement=None)
    embed = functools.partial(_embed, hidden_states=functools.partial(Runner.hidden_states, runner), wanted="mean")
    traced = [
        score.trace(params, hidden, ints(8), cfg=cfg, compute=compute, platform=None),
        jax.jit(embed).trace(params, row, one, one),
        _logits.trace(params, cfg, row, one, compute),
        decoder.greedy_step.trace(params, cfg, ints(1), one, one, cache, compute),
    ]
    for each in traced:
        found = products(each.jaxpr.jaxpr)
        assert found and [precision == HIGHEST for precision in found] == [exact] * len(found)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_bf16_is_as_jax_has_it(platform):
    """A router's products are of f32, and of bf16's values: exact as they are, and to ask for more would cost time."""
    found = products(engine_step("experts", COMPUTES["bf16"], platform, S).jaxpr.jaxpr)
    assert found and set(found) == {None}


def test_a_caller_who_asks_jax_for_less_gets_what_the_name_says():
    with jax.default_matmul_precision("bfloat16"):
        found = products(engine_step("dense", COMPUTES["f32"], "cuda", S).jaxpr.jaxpr)
    assert set(found) == {HIGHEST}


def test_names():
    assert compute_of("float32") is compute_of(jnp.float32) is compute_of("f32") is COMPUTES["f32"]
    assert compute_of("tf32").dtype == jnp.float32 and compute_of("bfloat16").name == "bf16"
    for bad in ("fp8", "", "float64", jnp.int8, object()):
        with refuses("dtype"):
            compute_of(bad)


def test_compute_descriptions():
    assert COMPUTES["f32"].describe("cuda") == "products of f32"
    assert COMPUTES["tf32"].describe("cuda") == "products of TF32, summed in f32"
    assert COMPUTES["tf32"].describe("tpu") == "products of f32, because this chip has no TF32"
    assert COMPUTES["bf16"].describe("cuda") == "products of bf16, summed in f32"
