"""Test KV pages in fp8 and int8: near the plain ones, and half their bytes; sliding layers stay plain."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refuses

from dovetail.core.compute import compute_of
from dovetail.core.errors import UnsupportedError
from dovetail.core.formats import KV_DTYPES
from dovetail.core.spec import held_bytes, init
from dovetail.core.types import Paged
from dovetail.engine.build import programs_for
from dovetail.engine.llm import LLM
from dovetail.engine.options import EngineOptions
from dovetail.engine.request.params import SamplingParams
from dovetail.models.decoder import abstract_cache, forward, greedy, init_cache, unembed
from dovetail.models.registry import parse_config
from dovetail.models.spec import spec
from dovetail.ops import dispatch
from dovetail.ops.dispatch import choose_paged
from dovetail.ops.paged import round_rows, stored_values
from dovetail.plan.serve_memory import local_rows

pytestmark = pytest.mark.slow

CFG = parse_config(dict(
    model_type="llama", vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, hidden_act="silu",
    num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=64, rms_norm_eps=1e-5,
    eos_token_id=2, tie_word_embeddings=False,
))  # fmt: skip
OPTIONS = EngineOptions(max_num_seqs=2, max_model_len=32, max_num_batched_tokens=16, block_size=4, dtype="f32")
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
BOUND = {"fp8": 0.15, "int8": 0.04}  # of a log-probability


@pytest.mark.parametrize("kv", ["fp8", "int8"])
def test_rounded_rows(kv):
    rows = jax.random.normal(jax.random.key(0), (5, 4, 16)).at[0, 0].set(0).at[1, 1, 1].set(1000)
    dtype = jnp.dtype(KV_DTYPES[kv][0])
    stored = round_rows(rows, dtype)
    assert stored.dtype == dtype and stored.shape == (5, 4, 16 + KV_DTYPES[kv][1])
    back = stored_values(stored, jnp.float32)
    if kv == "fp8":
        assert float(back[1, 1, 1]) == 448  # saturates
        np.testing.assert_allclose(back[2:], rows[2:], rtol=2**-4, atol=2**-9)
    else:
        np.testing.assert_allclose(back, rows, atol=float(jnp.abs(rows).max()) / 254 + 1e-6)
        np.testing.assert_allclose(back[2:], rows[2:], atol=float(jnp.abs(rows[2:]).max()) / 254 + 1e-6)


def test_log_probabilities():
    """A prompt and a further token, on pages of each dtype."""
    params, tokens = init(spec(CFG), jax.random.key(0), "float32", std=0.1), jnp.arange(3, 16)

    @functools.partial(jax.jit, static_argnums=0)
    def scores(kv: str) -> jax.Array:
        cache, found = init_cache(CFG, 4, 4, jnp.float32, kv=kv), []
        for start, end in ((0, 12), (12, 13)):
            ctx = Paged(jnp.arange(4)[None], jnp.array([end]), jnp.array([0, end - start]), jnp.ones(1, jnp.int32))
            hidden, cache = forward(params, CFG, tokens[start:end], jnp.arange(start, end), ctx, cache)
            found.append(jax.nn.log_softmax(unembed(params, CFG, hidden)))
        return jnp.concatenate(found)

    want = np.asarray(scores("auto"))
    for kv, bound in BOUND.items():
        got = np.asarray(scores(kv))
        assert 0 < np.abs(got - want).max() < bound
        assert (got.argmax(-1) == want.argmax(-1)).mean() > 0.8


@pytest.mark.thorough
def test_an_engine_with_rounded_pages():
    params = init(spec(CFG), jax.random.key(0), "float32", std=0.1)
    llm = LLM.from_weights(CFG, params, replace(OPTIONS, kv_cache_dtype="int8"))
    cfg, prompt = replace(CFG, eos_ids=()), [50, 60, 7, 8, 9]
    (out,) = llm.generate([prompt], GREEDY)
    assert out.outputs[0].token_ids[0] == next(greedy(params, cfg, prompt, 1, compute_of("f32")))


def test_bytes_of_pages():
    """Twice the pages in fp8; int8 has 4 bytes more for each head. The plan counts the same."""
    compute = compute_of("bf16")

    def page(kv: str) -> int:
        return held_bytes(programs_for(CFG, replace(OPTIONS, dtype="bf16", kv_cache_dtype=kv), compute, None).pages(1))

    assert page("auto") == 2 * page("fp8") and page("int8") * 64 == page("fp8") * 68
    for kv in ("fp8", "int8"):
        assert sum(local_rows(CFG.layers, None, 1, kv)) * 4 == page(kv)  # 4 tokens


def test_layers_and_kernels(monkeypatch):
    sliding = replace(CFG.layers[0], attn=replace(CFG.layers[0].attn, window=8))
    plain, rounded = abstract_cache((sliding, CFG.layers[1]), 1, 4, jnp.bfloat16, kv="fp8")
    assert (plain.dtype, rounded.dtype) == (jnp.bfloat16, jnp.float8_e4m3fn)
    q = jax.ShapeDtypeStruct((2, 4, 64), jnp.bfloat16)
    monkeypatch.setattr(dispatch, "has_fp8", lambda: False)
    assert [choose_paged("cuda", q, 2, pages=pages) for pages in (plain, rounded)] == ["triton", "reference"]
    monkeypatch.setattr(dispatch, "has_fp8", lambda: True)
    assert [choose_paged(platform, q, 2, pages=rounded) for platform in ("cuda", "tpu")] == ["triton", "reference"]
    ctx = Paged(*([jnp.zeros(1, jnp.int32)] * 4), placement=None)
    assert dispatch.store_kernel(ctx, q, rounded).__module__.endswith("ops.paged")  # on this machine
    windows = replace(CFG, layers=(sliding, sliding))
    with refuses("kv_cache_dtype", UnsupportedError, naming="sliding"):
        programs_for(windows, replace(OPTIONS, kv_cache_dtype="fp8"), compute_of("f32"), None)
