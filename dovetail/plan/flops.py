"""What a training token costs, and the share of the chips' peak that a rate of tokens is (MFU).

Two conventions are in use for attention, and a figure without its convention says little: *full* counts every pair of
tokens of a row (12 * heads * head dim * length a layer and token), *causal* only the pairs a decoder computes, half as
many. Recomputation is never counted: it is work, but not the model's.
"""

from __future__ import annotations

from dovetail.core.errors import UserError
from dovetail.models.config import Attention, Latent, ModelConfig
from dovetail.models.spec import flops_per_token

FORWARD_AND_BACKWARD = 3  # the gradient of a product is two products
FROZEN = 2  # of a product with a weight that is not trained, one


def train_flops_per_token(cfg: ModelConfig, length: int, causal: bool, frozen: bool = False) -> float:
    """FLOPs of one token in a row of `length`, forward and backward. Experts count by the share that a token visits,
    the unembedding once (tied or not), a look-up not at all. With `frozen` weights, which adapters are trained on, 4N
    and not 6N: the products that give the weights' own gradients are not made, and the adapters' are too few to count.
    """
    if length < 1:
        raise UserError(f"a row has at least 1 token; got a length of {length}")
    attention = sum(layer.attn.flops_per_key * _keys(layer.attn, length, causal) for layer in cfg.layers)
    products = flops_per_token(cfg) * (FROZEN if frozen else FORWARD_AND_BACKWARD)
    return products + FORWARD_AND_BACKWARD * attention


def mfu(
    tokens_per_second: float, cfg: ModelConfig, length: int, peak: float, *, chips: int = 1, causal: bool = True
) -> float:
    """The share (0.4 is 40%) of `chips` chips with a peak of `peak` FLOP/s each. `tokens_per_second` is of all."""
    if peak <= 0 or chips < 1:
        raise UserError(f"the peak in FLOP/s and the number of chips must be positive; got {peak} and {chips}")
    return tokens_per_second * train_flops_per_token(cfg, length, causal) / (peak * chips)


def _keys(attn: Attention | Latent, length: int, causal: bool) -> float:
    """How many keys a query sees, on average over the row. The first `window` queries of a causal row see fewer."""
    most = attn.keys_seen(length)
    return most - most**2 / (2 * length) if causal else float(most)
