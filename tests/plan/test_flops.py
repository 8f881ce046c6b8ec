"""A token's training FLOPs and MFU, by hand and against a peer's published figure."""

import pytest
from refusals import refuses

from dovetail.models.registry import parse_config
from dovetail.plan.flops import mfu, train_flops_per_token

LLAMA_1B = dict(
    model_type="llama", hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
    num_key_value_heads=8, head_dim=64, vocab_size=128256, max_position_embeddings=131072, rms_norm_eps=1e-5,
    rope_theta=500000.0, hidden_act="silu", tie_word_embeddings=True,
)  # fmt: skip
SMALL = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, vocab_size=100, max_position_embeddings=256, rms_norm_eps=1e-5, rope_theta=10000.0, hidden_act="silu",
)  # fmt: skip
PROJECTIONS = 32 * 8 * (4 + 2 + 2 + 4)  # q, k, v, o of SMALL
MLP, HEAD = 3 * 32 * 48, 100 * 32


def config(family: str = "llama", **changes):
    return parse_config({"model_type": family, **SMALL, **changes}, "test")


def test_llama_1b_at_a_published_rate_has_the_published_mfu():
    cfg = parse_config(LLAMA_1B, "test")
    assert mfu(48_434, cfg, 4096, 989e12) == pytest.approx(0.403, abs=0.002)
    assert mfu(48_434, cfg, 4096, 989e12, causal=False) == pytest.approx(0.443, abs=0.002)
    assert mfu(8 * 48_434, cfg, 4096, 989e12, chips=8) == pytest.approx(mfu(48_434, cfg, 4096, 989e12))


@pytest.mark.parametrize("tied", [False, True])
def test_the_unembedding_counts_once_and_the_lookup_not(tied):
    weights = 2 * (PROJECTIONS + MLP) + HEAD
    full, causal = (train_flops_per_token(config(tie_word_embeddings=tied), 64, c) for c in (False, True))
    assert full == 6 * weights + 12 * 2 * (4 * 8) * 64
    assert causal == 6 * weights + 12 * 2 * (4 * 8) * 64 / 2


def test_a_window_limits_the_keys():
    windowed = config("mistral", sliding_window=16, tie_word_embeddings=True)
    weights = 6 * (2 * (PROJECTIONS + MLP) + HEAD)
    seen = [min(t + 0.5, 16) for t in range(64)]  # token t sees t whole keys and half of itself, up to the window
    per_key = 12 * 2 * (4 * 8)
    assert train_flops_per_token(windowed, 64, causal=False) == weights + per_key * 16
    assert train_flops_per_token(windowed, 64, causal=True) == pytest.approx(weights + per_key * sum(seen) / 64)
    short = train_flops_per_token(windowed, 8, causal=True)
    assert short == weights + per_key * 4  # a row below the window is as any other


def test_experts_count_by_the_share_of_a_token():
    moe = config("mixtral", num_local_experts=8, num_experts_per_tok=2, sliding_window=None, tie_word_embeddings=True)
    weights = 2 * (PROJECTIONS + 2 * MLP + 8 * 32) + HEAD  # two experts and the router
    assert train_flops_per_token(moe, 64, causal=True) == 6 * weights + 12 * 2 * (4 * 8) * 32


def test_latent_attention_has_keys_and_values_of_their_own_width():
    latent = config(
        "deepseek_v3", num_key_value_heads=4, q_lora_rank=20, kv_lora_rank=16, qk_nope_head_dim=12, qk_rope_head_dim=8,
        v_head_dim=10, moe_intermediate_size=24, n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=1,
        first_k_dense_replace=2, n_group=4, topk_group=2, routed_scaling_factor=1.0, norm_topk_prob=True,
        tie_word_embeddings=True,
    )  # fmt: skip
    down = 32 * 20 + 32 * (16 + 8)
    up = 4 * 20 * 20 + 4 * 12 * 16 + 4 * 10 * 16 + 4 * 10 * 32
    weights = 2 * (down + up + MLP) + HEAD
    assert train_flops_per_token(latent, 64, causal=False) == 6 * weights + 2 * 6 * 4 * (12 + 8 + 10) * 64


@pytest.mark.parametrize("peak, chips", [(0.0, 1), (1e12, 0)])
def test_bad_peaks_chips_and_lengths_are_refused(peak, chips):
    with refuses(naming="`peak` (FLOP/s) and `chips`"):
        mfu(1.0, config(), 64, peak, chips=chips)
    with refuses("length"):
        train_flops_per_token(config(), 0, causal=True)
