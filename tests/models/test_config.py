"""Test config.json: every field is honoured or refused by name; parameter counts and costs."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference_models import FAMILIES, YARN, reference
from refusals import refuses

from dovetail.core.spec import abstract, init, leaves, num_bytes, num_params
from dovetail.models import registry
from dovetail.models.registry import parse_config
from dovetail.models.spec import flops_per_token, kv_bytes_per_token, spec


@functools.cache
def _text(name: str) -> str:
    return (reference(name)[1] / "config.json").read_text()


def config(name: str, **changes) -> dict:
    return json.loads(_text(name)) | changes


# ------------------------------------------------------------------------------------------- refusals


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_an_unknown_field_is_refused_by_name(name):
    with refuses("my_new_trick"):
        parse_config(config(name, my_new_trick=3))


@pytest.mark.parametrize("name", FAMILIES)
def test_null_and_harmless_fields_are_accepted(name):
    extra = dict(my_new_trick=None, torch_dtype="bfloat16", use_cache=False, temperature=0.6, _name_or_path="x/y")
    assert parse_config(config(name, **extra)).layers == parse_config(config(name)).layers


@pytest.mark.parametrize("name", FAMILIES)
def test_dropout_is_refused(name):
    if name.startswith("granite"):  # whose published configs have it
        assert parse_config(config(name, attention_dropout=0.1)).layers == parse_config(config(name)).layers
        return
    with refuses("attention_dropout"):
        parse_config(config(name, attention_dropout=0.1))


REFUSED = [
    ("llama2", dict(hidden_act="relu")),
    ("llama2", dict(rope_interleaved=True)),
    ("llama2", dict(partial_rotary_factor=0.5)),
    ("llama2", dict(num_hidden_layers=None)),
    ("mixtral", dict(router_jitter_noise=0.1)),
    ("olmo2", dict(clip_qkv=8.0)),
    ("olmo3", dict(clip_qkv=8.0)),
    ("gemma2", dict(use_bidirectional_attention=True)),
    ("gemma3", dict(use_bidirectional_attention=True)),
    ("gemma3", dict(attn_logit_softcapping=50.0)),
    ("gemma4-dense", dict(use_bidirectional_attention="all")),
    ("gemma4-dense", dict(per_layer_config={"1": {"head_dim": 24, "intermediate_size": 7}})),
    ("gemma3", dict(layer_types=["sliding_attention"])),
    ("qwen3", dict(layer_types=["chunked_attention"] * 4)),
    ("qwen3", dict(sliding_window=None)),
    ("deepseek-v2", dict(norm_topk_prob=True)),
    ("deepseek-v2", dict(topk_method="noaux_tc")),
    ("deepseek-v2", dict(moe_layer_freq=2)),
    ("deepseek-v3", dict(scoring_func="softmax")),
    ("gpt-oss", dict(hidden_act="gelu")),
    ("phi3", dict(resid_pdrop=0.1)),
    ("phi3", dict(lm_head_bias=True)),
    ("phi3", dict(rope_parameters=dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 6))),
    ("granite3", dict(position_embedding_type="alibi")),
    ("granite4", dict(layer_types=["attention", "mamba"] * 2)),
    ("granite4", dict(layer_types=None)),
    ("granite4", dict(num_local_experts=4)),
    ("granite4", dict(normalization_function="layernorm")),
    ("glm4", dict(mlp_bias=True)),
    ("llama2", dict(model_type="lama")),
    ("llama2", dict(model_type=None)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes"), REFUSED, ids=[f"{name} {' '.join(fields)}" for name, fields in REFUSED])
def test_fields_that_would_change_the_numbers_are_refused_by_name(name, changes):
    (field,) = changes
    with refuses(field):
        parse_config(config(name, **changes))


def test_a_refusal_names_the_value_and_the_closest_architecture():
    with refuses("model_type", naming="'lama' is not supported. Did you mean 'llama'?"):
        parse_config(config("llama2", model_type="lama"))
    with refuses("per_layer_config", naming="intermediate_size"):
        parse_config(config("gemma4-dense", per_layer_config={"1": {"head_dim": 24, "intermediate_size": 7}}))


ROPES = {
    "dynamic": (dict(rope_type="dynamic", factor=2.0), "rope type 'dynamic'"),
    "longrope": (dict(rope_type="longrope", short_factor=[1.0], long_factor=[2.0]), "rope type 'longrope'"),
    "misspelt": (dict(rope_type="yarn", factor=2.0, beta_quick=8.0), "beta_quick"),
    "key of another kind": (dict(rope_type="linear", factor=2.0, low_freq_factor=1.0), "low_freq_factor"),
    "part of a head": (dict(rope_type="default", partial_rotary_factor=0.5), "partial_rotary_factor=0.5"),
    "no factor": (dict(rope_type="linear"), "'factor'"),
    "no factor, scaled": (dict(rope_type="yarn", mscale_all_dim=1.0), "'factor'"),
    "factor null": (dict(rope_type="yarn", factor=None, original_max_position_embeddings=64), "'factor'"),
}


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("name", ["llama2", "qwen3-moe", "olmo2", "gemma3", "deepseek-v3", "gpt-oss"])
def test_unsupported_ropes_are_refused(name, kind):
    params, naming = ROPES[kind]
    params = params | {"rope_theta": 10_000.0}
    if name == "gemma3":
        params = {"full_attention": params, "sliding_attention": dict(rope_type="default", rope_theta=1000.0)}
    with refuses("rope_parameters", naming=naming):
        parse_config(config(name, rope_parameters=params))


def test_another_multimodal_config_is_read_for_its_text_model():
    outer = {"model_type": "gemma3n", "vision_config": {"hidden_size": 8}, "text_config": config("gemma3")}
    assert parse_config(outer).layers == parse_config(config("gemma3")).layers
    assert parse_config(outer | {"eos_token_id": [1, 106]} | _without_eos(outer)).eos_ids == (1, 106)
    quantised = parse_config(outer | {"quantization_config": {"quant_method": "bitsandbytes"}})
    assert quantised.layers == parse_config(outer).layers and "quantization_config" not in quantised.to_hf()


def _without_eos(outer: dict) -> dict:
    return {"text_config": {k: v for k, v in outer["text_config"].items() if k != "eos_token_id"}}


def test_every_family_has_a_parity_row_and_a_row_in_the_readme():
    decoders = {kind for kind in registry.FAMILIES if kind != "siglip"}  # test_image_models.py has SigLIP's
    assert {parse_config(config(name)).family for name in FAMILIES} == decoders
    table = (Path(__file__).parents[2] / "README.md").read_text()
    assert [kind for kind in registry.FAMILIES if f"`{kind}`" not in table] == []


# -------------------------------------------------------------------------------------- spellings and the way back


@pytest.mark.parametrize("name", FAMILIES)
def test_round_trip(name):
    cfg = parse_config(config(name))
    assert parse_config(cfg.to_hf()) == cfg
    assert hash(parse_config(cfg.to_hf())) == hash(cfg)


OLD = {
    "llama3.1": lambda p: dict(rope_theta=p.pop("rope_theta"), rope_scaling=p),
    "llama-linear": lambda p: dict(rope_theta=p.pop("rope_theta"), rope_scaling=dict(type=p.pop("rope_type"), **p)),
    "qwen3": lambda p: dict(rope_theta=p["rope_theta"], rope_scaling=None),
    "deepseek-v3": lambda p: dict(rope_theta=p.pop("rope_theta"), rope_scaling=dict(type=p.pop("rope_type"), **p)),
    "gpt-oss": lambda p: dict(rope_theta=p.pop("rope_theta"), rope_scaling=p),
    "phi4-mini": lambda p: dict(
        rope_theta=p.pop("rope_theta"), partial_rotary_factor=p.pop("partial_rotary_factor"),
        rope_scaling={k: v for k, v in p.items() if k != "rope_type"} | {"type": "su"},
    ),
    "glm": lambda p: dict(rope_theta=p["rope_theta"], partial_rotary_factor=p["partial_rotary_factor"]),
    "gemma3": lambda p: dict(
        rope_local_base_freq=p["sliding_attention"]["rope_theta"],
        rope_theta=p["full_attention"].pop("rope_theta"),
        rope_scaling=p["full_attention"],
    ),
    "olmo3": lambda p: dict(
        rope_theta=p["full_attention"].pop("rope_theta"), rope_scaling=p["full_attention"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OLD)
def test_older_names_of_rope_fields(name):
    new = config(name)
    old = config(name)
    old |= OLD[name](old.pop("rope_parameters"))
    assert parse_config(old).layers == parse_config(new).layers


def test_longrope_uses_the_factors_of_the_longest_sequence():
    cfg = parse_config(config("phi4-mini", original_max_position_embeddings=64))
    assert cfg.layers[0].attn.rope.is_long and cfg.within(65) is cfg
    short = cfg.within(64)
    assert not short.layers[0].attn.rope.is_long and short.within(512) == cfg
    llama = parse_config(config("llama3.1"))
    assert llama.within(4) is llama


def test_a_granite_without_positions():
    for kind in (None, "nope"):
        cfg = parse_config(config("granite4", position_embedding_type=kind, layer_types=["attention"] * 4))
        assert {layer.attn.rope for layer in cfg.layers} == {None}


# ------------------------------------------------------------------------------------------ what follows from spec


@pytest.mark.parametrize("name", FAMILIES)
def test_the_number_of_parameters_equals_transformers(name):
    model, _ = reference(name)
    kept = [b for key, b in model.named_buffers() if key in model.state_dict()]  # saved, but no torch parameters
    assert num_params(spec(parse_config(config(name)))) == model.num_parameters() + sum(b.numel() for b in kept)


def test_costs_of_a_llama():
    """dim 48, 2 layers, 4 heads of 16 (2 for keys), width 80, vocabulary 160, untied."""
    cfg = parse_config(config("llama3.1"))
    layer = 48 * 64 * 2 + 48 * 32 * 2 + 3 * 48 * 80
    products = 2 * (2 * layer + 48 * 160)
    assert flops_per_token(cfg) == products
    attention = 2 * (2 * 4 * 16 * 2) * 100  # q k and p v over 100 keys
    assert flops_per_token(cfg, context=100) == products + attention
    assert flops_per_token(cfg, context=100, train=True) == 3 * (products + attention)
    assert kv_bytes_per_token(cfg, itemsize=2) == 2 * 2 * 2 * 16 * 2


def test_costs_of_a_deepseek():
    """3 of 8 routed experts and 2 shared ones of width 24; latents of 16 + 8; layer 0 dense."""
    cfg = parse_config(config("deepseek-v3"))
    attn = 48 * 20 + 20 * 4 * 20 + 48 * 24 + 16 * 4 * (12 + 10) + 4 * 10 * 48
    sparse = 48 * 8 + 3 * (3 + 2) * 48 * 24
    products = 2 * (2 * attn + 3 * 48 * 80 + sparse + 48 * 160)
    assert flops_per_token(cfg) == pytest.approx(products)
    assert flops_per_token(cfg, context=10) == pytest.approx(products + 2 * 2 * 4 * (20 + 10) * 10)
    assert kv_bytes_per_token(cfg, itemsize=4) == 2 * (16 + 8) * 4


def test_a_window_bounds_the_cost_and_shared_layers_keep_no_cache():
    cfg = parse_config(config("mistral"))
    assert flops_per_token(cfg, context=6) == flops_per_token(cfg, context=10_000)
    whole, shared = (parse_config(config("gemma4-per-layer", num_kv_shared_layers=n)) for n in (0, 2))
    assert kv_bytes_per_token(whole) - kv_bytes_per_token(shared) == (2 * 2 * 16 + 2 * 2 * 24) * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", pytest.param("deepseek-v3", marks=pytest.mark.thorough)])
def test_random_weights(name):
    tree = spec(parse_config(config(name)))
    make = jax.jit(lambda seed: init(tree, jax.random.key(seed), jnp.bfloat16))
    first, again, other = make(0), make(0), make(1)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), first)
    assert shapes == jax.tree.map(lambda x: (x.shape, x.dtype), abstract(tree, jnp.bfloat16))
    assert num_bytes(tree, jnp.bfloat16) == sum(x.nbytes for x in jax.tree.leaves(first))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    drawn = 0
    for (path, leaf), x, y in zip(leaves(tree), jax.tree.leaves(first), jax.tree.leaves(other), strict=True):
        x = np.asarray(x, np.float32)
        if leaf.init == "normal":
            assert (x != np.asarray(y, np.float32)).any() and abs(x.std() - 0.02) < 0.01, path
            drawn += x.size
        else:
            assert (x == {"zeros": 0, "ones": 1}[leaf.init]).all(), path
    assert drawn > 0.9 * num_params(tree)


def test_a_norm_starts_as_one():
    """Gemma keeps its norms less 1: they start at 0 there, at 1 elsewhere."""
    assert spec(parse_config(config("gemma3")))["norm"].init == "zeros"
    assert spec(parse_config(config("llama2")))["norm"].init == "ones"


def test_deepseek_scales_logits_with_yarn():
    cfg = parse_config(config("deepseek-v3"))
    grown = 0.1 * YARN["mscale_all_dim"] * np.log(YARN["factor"]) + 1
    assert cfg.layers[0].attn.scale == pytest.approx(20**-0.5 * grown**2)
