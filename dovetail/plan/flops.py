"""FLOPs of a training token, and the share of the chips' peak that a token rate amounts to (MFU).

Two conventions are in use for attention, and an MFU is meaningless without its convention: *full* counts every pair of
tokens of a row (12 * heads * head_dim * length per layer and token), *causal* counts only the pairs that a decoder
computes, half as many. Recomputation is never counted in an MFU.
"""

from __future__ import annotations

import functools

from dovetail.core.errors import UserError
from dovetail.models.config import Attention, Latent, ModelConfig
from dovetail.models.spec import flops_per_token

FORWARD_AND_BACKWARD = 3  # the backward pass of a product is two products
FROZEN = 2  # the backward pass of a product with a weight that is not trained is one product
# Norms, rotation and SiLU x up are not products; recomputing them takes about 6% of the time of the products, measured
# on an H200.
ELEMENTWISE = 0.06


def train_flops_per_token(cfg: ModelConfig, length: int, causal: bool, frozen: bool = False) -> float:
    """Return the FLOPs of one token in a row of `length` tokens, forward and backward.

    Experts count by the share that a token visits, the unembedding counts once (tied or not), and embedding lookups do
    not count. With `frozen` weights, on which adapters are trained, the weights' own gradients are not computed: 4N
    instead of 6N FLOPs. The adapters' own products are too few to count.
    """
    if length < 1:
        raise UserError(f"`length` must be at least 1 token, got {length}", param="length")
    attention = sum(layer.attn.flops_per_key * _keys(layer.attn, length, causal and cfg.causal) for layer in cfg.layers)
    products = flops_per_token(cfg) * (FROZEN if frozen else FORWARD_AND_BACKWARD)
    return products + FORWARD_AND_BACKWARD * attention


def mfu(
    tokens_per_second: float, cfg: ModelConfig, length: int, peak: float, *, chips: int = 1, causal: bool = True
) -> float:
    """Return the model FLOPs utilisation as a fraction: 0.4 is 40%.

    Args:
        tokens_per_second: The rate of all chips together.
        cfg: The model.
        length: Tokens per row.
        peak: FLOP/s of one chip.
        chips: The number of chips.
        causal: Which convention to count attention by.
    """
    if peak <= 0 or chips < 1:
        raise UserError(f"`peak` (FLOP/s) and `chips` must be positive, got {peak} and {chips}")
    return tokens_per_second * train_flops_per_token(cfg, length, causal) / (peak * chips)


def _keys(attn: Attention | Latent, length: int, causal: bool) -> float:
    """Return how many keys a query sees on average. In a causal row the first `window` queries see fewer."""
    most = attn.keys_seen(length)
    return most - most**2 / (2 * length) if causal else float(most)


def mean_keys(cfg: ModelConfig, length: int) -> int:
    """Return how many keys a query of a row sees on average, without windows."""
    return length // 2 if cfg.causal else length


@functools.lru_cache(maxsize=256)
def forward_flops(cfg: ModelConfig, context: int = 0) -> float:
    """Return the FLOPs of one token's forward pass. Cached: a search calls it thousands of times."""
    return flops_per_token(cfg, context)


def computed_flops(cfg: ModelConfig, length: int, remat: str) -> float:
    """Return the FLOPs per token that a training step computes, recomputation included."""
    return 3 * forward_flops(cfg, mean_keys(cfg, length)) + recomputed(cfg, length, remat)


def recomputed(cfg: ModelConfig, length: int, remat: str) -> float:
    """Return the FLOPs per token that the backward pass computes a second time."""
    products = forward_flops(cfg)
    attention = forward_flops(cfg, mean_keys(cfg, length)) - products
    again = {"none": 0.0, "dots": 0.0, "attention": products, "full": products + attention}[remat]
    return again + (ELEMENTWISE * products if remat != "none" else 0.0)
