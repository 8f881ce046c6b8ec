"""Packed attention through tokamax's splash kernel, the successor of upstream's: it knows sinks, and its backward pass
is one kernel.

It is taken from where tokamax has it: the public call has no name for what a checkpoint is to keep, and would run the
forward pass again.
"""

from __future__ import annotations

from dovetail.core.types import Packed
from dovetail.ops.kernels.tpu.packed import blocks, over_heads


def packed_attention(
    q, k, v, ctx: Packed, *, scale: float, window=None, softcap=None, sinks=None, key_segments=None, interpret=False
):
    """As ops.packed.packed_attention, for T and S multiples of 128. With `key_segments` the queries are the last of
    their keys (ops.context). Output and denominators are named `attention`, for a checkpoint to keep."""
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_kernel as splash  # type: ignore
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_mask as masks  # type: ignore

    T, S = q.shape[1], k.shape[1]
    sizes = {name: size for name, size in blocks(T).items() if not name.endswith("_dq")}
    config = splash.SplashConfig(
        **sizes, attn_logits_soft_cap=softcap, residual_checkpoint_name="attention", interpret=interpret
    )
    if window is None and S == T:
        mask = masks.CausalMask((T, T))
    else:
        mask = masks.LocalMask((T, S), (window - 1 if window else None, 0), offset=S - T)
    kernel = splash.make_splash_mqa_single_device(mask, config=config)
    segments = splash.SegmentIds(ctx.segment_ids, ctx.segment_ids if key_segments is None else key_segments)
    return over_heads(kernel, q, k, v, segments, scale, *(() if sinks is None else (sinks,)))
