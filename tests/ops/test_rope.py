"""Each way to stretch rotary positions, against transformers' own table of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from later import later

from dovetail.models.family import Fields, read_rope, rope_dict
from dovetail.ops.rope import Rope, rotate

transformers = later("transformers")
rope_utils = later("transformers.modeling_rope_utils")
llama = later("transformers.models.llama.modeling_llama")

LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
YARN = dict(factor=40.0, original_max_position_embeddings=4096)
LONGROPE = dict(
    short_factor=[1 + i / 9 for i in range(64)], long_factor=[1.5 + i for i in range(64)],
    original_max_position_embeddings=4096,
)  # fmt: skip
KINDS = {
    "default": dict(rope_type="default", rope_theta=10_000.0),
    "large base": dict(rope_type="default", rope_theta=5_000_000.0),
    "linear": dict(rope_type="linear", rope_theta=10_000.0, factor=8.0),
    "llama3": dict(rope_type="llama3", rope_theta=500_000.0, **LLAMA3),
    "proportional": dict(rope_type="proportional", rope_theta=1_000_000.0, partial_rotary_factor=0.25),
    "proportional, slowed": dict(rope_type="proportional", rope_theta=1e6, partial_rotary_factor=0.5, factor=4.0),
    "yarn": dict(rope_type="yarn", rope_theta=10_000.0, **YARN),
    "yarn as DeepSeek": dict(rope_type="yarn", rope_theta=10_000.0, **YARN, mscale=0.707, mscale_all_dim=1.0),
    "yarn as GPT-OSS": dict(
        rope_type="yarn", rope_theta=150_000.0, factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
        original_max_position_embeddings=4096,
    ),
    "longrope": dict(rope_type="longrope", rope_theta=10_000.0, **LONGROPE),
    "longrope, factor given": dict(rope_type="longrope", rope_theta=10_000.0, **LONGROPE, attention_factor=1.25),
    "yarn, factor given": dict(rope_type="yarn", rope_theta=10_000.0, **YARN, attention_factor=1.25),
}  # fmt: skip


def both(params: dict, head_dim: int = 64, length: int | None = 131_072):
    """(our Rope, transformers' inverse frequencies, its factor on cos and sin), for sequences of that length."""
    params = {key: value[: head_dim // 2] if isinstance(value, list) else value for key, value in params.items()}
    config = transformers.LlamaConfig(
        hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim, max_position_embeddings=131_072,
        rope_parameters=dict(params),
    )  # fmt: skip
    kind = params["rope_type"]
    compute = rope_utils.ROPE_INIT_FUNCTIONS.get(kind, llama.LlamaRotaryEmbedding.compute_default_rope_parameters)
    theirs, factor = compute(config, device="cpu", seq_len=length)
    f = Fields(config.to_dict(), "config.json")
    return read_rope(f, head_dim, rope_dict(f, 1.0)), theirs.numpy(), factor


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_frequencies(kind, head_dim):
    rope, theirs, factor = both(KINDS[kind], head_dim)
    np.testing.assert_allclose(rope.inv_freq(), theirs, rtol=1e-6)
    assert rope.magnitude == pytest.approx(factor)


@pytest.mark.parametrize("kind", ["llama3", "yarn as DeepSeek"])
def test_rotated_heads(kind):
    import torch

    rope, theirs, factor = both(KINDS[kind])
    positions = np.array([0, 1, 7, 500, 4095])
    x = np.random.default_rng(0).normal(size=(5, 3, 64)).astype(np.float32)
    angles = torch.tensor(positions)[:, None].float() * torch.tensor(theirs)
    cos, sin = (torch.cat([t, t], dim=-1)[None] * factor for t in (angles.cos(), angles.sin()))
    expected, _ = llama.apply_rotary_pos_emb(
        torch.tensor(x).transpose(0, 1)[None], torch.tensor(x).transpose(0, 1)[None], cos, sin
    )
    ours = rotate(jnp.asarray(x), rope, rope.tables(jnp.asarray(positions)))
    np.testing.assert_allclose(ours, expected[0].transpose(0, 1).numpy(), atol=5e-4)  # f32 angles up to 4095


@pytest.mark.parametrize("length", [1, 4096, 4097, 131_072])
def test_the_sequence_length_selects_the_longrope_factors(length):
    rope, theirs, factor = both(KINDS["longrope"], 64, length)
    assert rope.is_long, "without a limit the long factors, for the model has 131,072 positions"
    rope = rope.within(length)
    assert rope.is_long == (length > 4096) and rope.magnitude == pytest.approx(factor)
    np.testing.assert_allclose(rope.inv_freq(), theirs, rtol=1e-6)
    plain = Rope(10_000.0, 8)
    assert plain.within(length) == plain


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_partial_rotation_leaves_the_rest_unchanged(interleaved):
    rope = Rope(10_000.0, 8, interleaved=interleaved)
    x, tables = jax.random.normal(jax.random.key(0), (5, 3, 20)), rope.tables(jnp.arange(5))
    turned = rotate(x, rope, tables)
    np.testing.assert_array_equal(turned[..., 8:], x[..., 8:])
    np.testing.assert_array_equal(turned[..., :8], rotate(x[..., :8], rope, tables))


def test_interleaved_pairs_rotate_as_complex_numbers():
    rope = Rope(10_000.0, 8, interleaved=True)
    positions = jnp.arange(5)
    q, k = (jax.random.normal(jax.random.key(i), (5, 1, 8)) for i in range(2))

    def as_complex(x):
        angles = np.asarray(positions)[:, None, None] * rope.inv_freq()
        return (np.asarray(x[..., 0::2]) + 1j * np.asarray(x[..., 1::2])) * np.exp(1j * angles)

    tables = rope.tables(positions)
    ours = jnp.einsum("tnh,snh->ts", rotate(q, rope, tables), rotate(k, rope, tables))
    expected = np.einsum("tnh,snh->ts", as_complex(q), as_complex(k).conj()).real
    np.testing.assert_allclose(ours, expected, atol=1e-5)


def test_the_input_keeps_its_dtype():
    rope = Rope(10_000.0, 8)
    assert rotate(jnp.ones((2, 1, 8), jnp.bfloat16), rope, rope.tables(jnp.arange(2))).dtype == jnp.bfloat16
