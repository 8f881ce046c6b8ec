"""What the backward pass keeps of a layer, by name; the rest it computes again.

none       everything
dots       what weights' products and attention give: the rest is cheap to compute again
attention  what attention gives and each layer's input
full       each layer's input alone
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

# cuDNN's forward kernel (the start of its primitive's name) gives the sums of its softmax besides the output that we
# name: without them the backward pass would run it again.
ATTENTION_KERNEL = "dot_product_attention_fwd"


def remember(run: Callable, remat: str, in_loop: bool = False) -> Callable:
    """`run` with what its backward pass keeps. What is static is given to it by keyword. `in_loop`: it is all of a
    loop's body. Elsewhere XLA must be kept from sharing with the forward pass what is computed again, and from
    computing it again for all layers of a group at once (Gemma 3's six: 11 GiB of products)."""
    if remat == "none":
        return run
    keep = jax.checkpoint_policies
    attention = keep.save_from_both_policies(_is_attention, keep.save_only_these_names("attention"))
    products = keep.save_from_both_policies(
        keep.dots_with_no_batch_dims_saveable,
        keep.save_only_these_names("product"),  # experts' have kernels of their own
    )
    policy = {
        "dots": keep.save_from_both_policies(products, attention),
        "attention": attention,
        "full": keep.nothing_saveable,
    }[remat]

    def again(*args: Any, **static: Any) -> Any:
        return jax.checkpoint(functools.partial(run, **static), policy=policy, prevent_cse=not in_loop)(*args)

    return again


def _is_attention(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name.startswith(ATTENTION_KERNEL)
