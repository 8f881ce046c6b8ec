"""Every jitted entry point lowers for a TPU and for CUDA from a machine that has neither, kernels included."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from corners import corners
from described import a_device
from engine_steps import asked, trace_step

from dovetail.core.compute import COMPUTES
from dovetail.core.mesh import SERVE, TRAIN, Placement, make_mesh
from dovetail.core.spec import abstract
from dovetail.core.types import Packed, Paged
from dovetail.engine.device.batch import NUMBERS, Shape
from dovetail.engine.device.step import Unsampled, run_sampler
from dovetail.io.load import _logits
from dovetail.models import decoder
from dovetail.models.decoder import abstract_cache, forward, init_cache, unembed
from dovetail.models.registry import parse_config
from dovetail.models.spec import spec
from dovetail.ops import dispatch
from dovetail.ops.capabilities import has_tokamax

pytestmark = pytest.mark.slow

BASE = dict(
    vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=1024,
)  # fmt: skip
MODELS = {
    "dense": BASE | dict(model_type="llama", head_dim=64),
    "wide heads": BASE | dict(model_type="llama", head_dim=128),
    "windowed, soft cap": BASE | dict(num_hidden_layers=2, model_type="gemma2", head_dim=64, sliding_window=100),
    "experts": BASE | dict(model_type="qwen3_moe", head_dim=64, num_experts=8, moe_intermediate_size=64),
    "experts, sinks": BASE | dict(
        num_hidden_layers=2, model_type="gpt_oss", head_dim=64, num_local_experts=8, sliding_window=100
    ),
    "a part of a head turns": BASE | dict(model_type="glm4", head_dim=64),
    "latent": BASE | dict(
        num_hidden_layers=2,
        model_type="deepseek_v3", q_lora_rank=48, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=32,
        v_head_dim=32, moe_intermediate_size=64, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1,
        first_k_dense_replace=1, n_group=4, topk_group=2,
    ),
}  # fmt: skip
INSIDE = ("wide heads", "a part of a head turns")
NAMES = [pytest.param(name, marks=pytest.mark.thorough if name in INSIDE else ()) for name in MODELS]
PLATFORMS = ("tpu", "cuda")
B, T, S, PAGE, PAGES = 4, 256, 4, 16, 8


def ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


@functools.cache
def model(name: str, platform: str | None = None, placement: Placement | None = None):
    cfg = parse_config(dict(MODELS[name]))
    cache = jax.eval_shape(lambda: init_cache(cfg, S * PAGES, PAGE, jnp.bfloat16, placement, platform))
    return cfg, abstract(spec(cfg), jnp.bfloat16), cache


def lower(function, platform: str, *args) -> str:
    """The module as text; `function` is jitted unless it already is."""
    jitted = function if hasattr(function, "trace") else jax.jit(function)
    with a_device(platform):
        return jitted.trace(*args).lower(lowering_platforms=(platform,)).as_text()


def scores(cfg, params, tokens, ctx):
    return unembed(params, cfg, forward(params, cfg, tokens, tokens, ctx)[0])


@pytest.mark.parametrize(
    "axes",
    [None, pytest.param(dict(fsdp=2, tensor=2, expert=2), marks=pytest.mark.thorough)],
    ids=["one device", "mesh"],
)
@pytest.mark.parametrize("gradient", corners([False, True], [True]), ids=["forward", "gradient"])
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("name", NAMES)
def test_packed(name, platform, gradient, axes):
    cfg, params, _ = model(name)
    placement = Placement(make_mesh(axes), TRAIN) if axes else None
    run = functools.partial(scores, cfg)
    if gradient:
        run = jax.grad(lambda params, tokens, ctx: jnp.mean(scores(cfg, params, tokens, ctx)))
    text = lower(run, platform, params, ints(B, T), Packed(ints(B, T), platform, placement))
    takes_splash = platform == "tpu" and (name != "experts, sinks" or has_tokamax())
    assert ("tpu_custom_call" in text) == takes_splash


@pytest.mark.parametrize(
    "axes", [None, pytest.param(dict(tensor=2, expert=4), marks=pytest.mark.thorough)], ids=["one device", "mesh"]
)
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("tokens", corners([64, S], [64]), ids=["prefill", "decode"])
@pytest.mark.parametrize("name", NAMES)
def test_paged(name, tokens, platform, axes):
    placement = Placement(make_mesh(axes), SERVE) if axes else None
    cfg, params, cache = model(name, platform, placement)
    ctx = Paged(ints(S, PAGES), ints(S), ints(S + 1), ints(1), platform=platform, placement=placement)

    def run(params, tokens, ctx, cache):
        hidden, cache = forward(params, cfg, tokens, tokens, ctx, cache)
        return unembed(params, cfg, hidden), cache

    text = lower(run, platform, params, ints(tokens), ctx, cache)
    takes_ours = platform == "cuda" and name != "latent"
    assert ("paged_attention_" in text and "triton" in text) == takes_ours


KERNELS = {"wide heads": "ragged_paged_attention"} | dict.fromkeys(
    ("dense", "windowed, soft cap", "experts, sinks", "latent"), "flat_paged_attention"
)


@pytest.mark.parametrize("kind", corners(["TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x"], ["TPU v5 lite"]))
@pytest.mark.parametrize("tokens", corners([64, S], [64]), ids=["prefill", "decode"])
@pytest.mark.parametrize("name", KERNELS)
def test_paged_for_a_kind_of_tpu(name, tokens, kind):
    """A kernel is lowered for one kind of chip, which must be named on a machine without it."""
    cfg, params, cache = model(name, "tpu")
    ctx = Paged(ints(S, PAGES), ints(S), ints(S + 1), ints(1), platform="tpu")
    device = jax.sharding.AbstractDevice(kind, num_cores=1, platform="tpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        text = lower(lambda p, t, c, cache: forward(p, cfg, t, t, c, cache), "tpu", params, ints(tokens), ctx, cache)
    assert KERNELS[name] in text and "tpu_custom_call" in text


@pytest.mark.parametrize("name", KERNELS)
def test_paged_on_a_mesh_of_tpus(name):
    here = make_mesh(dict(tensor=2), jax.devices()[:2])
    device = jax.sharding.AbstractDevice("TPU v5 lite", num_cores=1, platform="tpu")
    mesh = jax.sharding.AbstractMesh(
        tuple(here.shape.values()), tuple(here.shape), axis_types=here.axis_types, abstract_device=device
    )
    placement = Placement(mesh, SERVE)
    cfg = parse_config(dict(MODELS[name]))
    cache = abstract_cache(cfg.layers, S * PAGES, PAGE, jnp.bfloat16, placement, "tpu")
    ctx = Paged(ints(S, PAGES), ints(S), ints(S + 1), ints(1), platform="tpu", placement=placement)
    params = abstract(spec(cfg), jnp.bfloat16)
    with jax.sharding.use_abstract_mesh(mesh):
        text = lower(lambda p, t, c, cache: forward(p, cfg, t, t, c, cache), "tpu", params, ints(64), ctx, cache)
    assert KERNELS[name] in text and "tpu_custom_call" in text


@pytest.mark.parametrize(
    "kind, platform, kernel",
    [
        ("paged", "cuda", "paged_attention_mixed"),
        ("paged", "tpu", "flat_paged_attention"),  # without images it is upstream's
        ("packed", "tpu", "splash"),
    ],
)
def test_image_tokens_that_see_each_other(kind, platform, kernel):
    cfg = model("wide heads")[0]
    cfg = replace(cfg, layers=tuple(replace(one, attn=replace(one.attn, block_mask=True)) for one in cfg.layers))
    device = jax.sharding.AbstractDevice("TPU v5 lite", num_cores=1, platform="tpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        cache = abstract_cache(cfg.layers, S * PAGES, PAGE, jnp.bfloat16, None, platform) if kind == "paged" else None
        ctx, tokens = Packed(ints(B, T), platform, image_ids=ints(B, T)), ints(B, T)
        if kind == "paged":
            ctx, tokens = Paged(ints(S, PAGES), ints(S), ints(S + 1), ints(1), platform, last_seen=ints(64)), ints(64)
        params = abstract(spec(cfg), jnp.bfloat16)
        text = lower(lambda p, t, c, cache: forward(p, cfg, t, t, c, cache), platform, params, tokens, ctx, cache)
    assert kernel in text


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("tokens", corners([decoder.CHUNK, 1], [1]), ids=["prompt", "token"])
@pytest.mark.parametrize("name", corners(MODELS, ["dense", "latent"]))
def test_greedy_step(name, tokens, platform):
    cfg, params, cache = model(name)
    assert lower(decoder.greedy_step, platform, params, cfg, ints(tokens), ints(), ints(), cache, COMPUTES["bf16"])


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("name", corners(MODELS, ["dense", "latent"]))
def test_logits(name, platform):
    cfg, params, _ = model(name)
    assert lower(_logits, platform, params, cfg, ints(1, 32), ints(), COMPUTES["bf16"])


@pytest.mark.parametrize(
    "shape",
    [pytest.param((S, 1), marks=pytest.mark.thorough), (S, 4), (64, 1)],
    ids=["decode", "four steps", "prompts"],
)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_engine_step(platform, shape):
    cfg, params, cache = model("dense", platform)
    tokens, steps = shape
    with a_device(platform):
        traced = trace_step(params, cache, cfg, Shape(tokens, S, PAGES, steps), COMPUTES["bf16"], platform)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert ("paged_attention" in text) == (platform == "cuda")


@pytest.mark.parametrize("platform", PLATFORMS)
def test_sampler_after_a_step_of_prompts(platform):
    left = Unsampled(jax.ShapeDtypeStruct((S, 512), jnp.float32), ints(S), ints(len(NUMBERS), S))
    with a_device(platform):
        traced = run_sampler.trace(ints(S + 1), ints(S, 512), left, asked(512, S), platform=platform)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert ("draw_tokens" in text) == (platform == "cuda")


def test_a_step_on_hopper_takes_kernels_in_mosaic(monkeypatch):
    monkeypatch.setattr(dispatch, "is_hopper", lambda: True)
    heads = dict(num_attention_heads=8, num_key_value_heads=4, head_dim=128, num_hidden_layers=2)
    cfg = parse_config(BASE | dict(model_type="qwen3") | heads)
    cache = jax.eval_shape(lambda: init_cache(cfg, S * PAGES, PAGE, jnp.bfloat16, None, "cuda"))
    ctx = Paged(ints(S, PAGES), ints(S), ints(S + 1), ints(1), platform="cuda")
    run = functools.partial(forward, cfg=cfg)
    text = lower(
        lambda params, tokens, ctx, cache: run(params, tokens=tokens, positions=tokens, ctx=ctx, cache=cache),
        "cuda", abstract(spec(cfg), jnp.bfloat16), ints(64), ctx, cache,
    )  # fmt: skip
    assert text.count("mosaic_gpu_v2") >= 3  # norms and store, lowered once for both layers
