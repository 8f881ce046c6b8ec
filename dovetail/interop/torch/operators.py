"""Operators of torch in jax, where torchax has none or leaves out a part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp


def operators() -> dict[Any, Callable[..., Any]]:
    """Return functions of torchax tensors, by the function of torch that they replace."""
    import torch.nn.functional as F

    return {F.batch_norm: batch_norm, F.scaled_dot_product_attention: attention}


def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attend with `jax.nn.dot_product_attention`, which is cuDNN's flash attention on an NVIDIA GPU.

    torchax's own writes all scores to memory; dropout of scores is left to it.
    """
    from torchax.ops.jtorch import _sdpa_reference
    from torchax.tensor import Tensor

    if dropout_p or query.ndim != 4:
        return _sdpa_reference(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    q, k, v = (jnp.swapaxes(tensor.jax(), 1, 2) for tensor in (query, key, value))  # [B, T, N, H]
    extra: dict[str, Any] = {}
    if attn_mask is not None:
        mask = attn_mask.jax()
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
        extra = {"mask": mask} if mask.dtype == jnp.bool_ else {"bias": mask.astype(q.dtype)}
    found = jax.nn.dot_product_attention(
        q, k, v, scale=scale, is_causal=is_causal, implementation=_implementation(q, v, attn_mask), **extra
    )
    return Tensor(jnp.swapaxes(found, 1, 2), query._env)


def _implementation(q: jax.Array, v: jax.Array, mask: Any) -> Literal["cudnn", "xla"]:
    """Return cuDNN where it can: half precision, no mask but a causal one, rows of several tokens, its head dims."""
    half = q.dtype in (jnp.bfloat16, jnp.float16)
    dim = q.shape[-1]
    fits = mask is None and q.shape[1] > 1 and dim == v.shape[-1] and dim % 8 == 0 and dim <= 128
    return "cudnn" if jax.default_backend() == "gpu" and half and fits else "xla"


def batch_norm(
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Normalise each channel (dim 1), and update the running statistics in place, which torchax does not."""
    from torchax.tensor import Tensor

    x = input.jax()
    mean, var, scale, shift = map(_array, (running_mean, running_var, weight, bias))
    if training:
        over = tuple(dim for dim in range(x.ndim) if dim != 1)
        wide = x.astype(jnp.float32)
        mean, var = jnp.mean(wide, over), jnp.var(wide, over)
        count = x.size // x.shape[1]
        if running_mean is not None:
            _move(running_mean, mean, momentum)
            _move(running_var, var * (count / max(count - 1, 1)), momentum)
    shape = (1, -1) + (1,) * (x.ndim - 2)
    factor = jax.lax.rsqrt(var.astype(jnp.float32) + eps) * (1 if scale is None else scale)
    offset = (0 if shift is None else shift) - mean * factor
    return Tensor((x * factor.reshape(shape) + offset.reshape(shape)).astype(x.dtype), input._env)


def _array(tensor: Any) -> Any:
    return None if tensor is None else tensor.jax()


def _move(running: Any, now: jax.Array, momentum: float) -> None:
    """Move a running statistic towards the batch's own."""
    old = running.jax()
    running.copy_(type(running)(((1 - momentum) * old + momentum * now).astype(old.dtype), running._env))
