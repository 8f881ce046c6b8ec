"""Operators of torch in jax, where torchax has none or leaves out a part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def operators() -> dict[Any, Callable[..., Any]]:
    """Return functions of torchax tensors, by the function of torch that they replace."""
    import torch.nn.functional as F

    return {F.batch_norm: batch_norm}


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

    given = (input, running_mean, running_var, weight, bias)
    x, mean, var, scale, shift = (None if tensor is None else tensor.jax() for tensor in given)
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


def _move(running: Any, now: jax.Array, momentum: float) -> None:
    """Move a running statistic towards the batch's own."""
    old = running.jax()
    running.copy_(type(running)(((1 - momentum) * old + momentum * now).astype(old.dtype), running._env))
