"""Muon: momentum whose singular values are all made about 1, for the matrices between embedding and head.

A step along the polar factor U V^T of the momentum U S V^T turns every direction the gradient has by the same amount.
The factor comes from five steps of a Newton-Schulz iteration, products alone, so it runs where products are fast.
Scaled by 0.2 sqrt(max(rows, columns)), its elements have the rms of an Adam step, 0.2 or so, and Adam's learning rate
and weight decay carry over (Moonlight, arXiv 2502.16982).

Weights of one shape and layout are orthogonalised together: a model of 32 layers has some 200 matrices of five shapes,
and 200 small programs would take minutes to compile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dovetail.core.spec import ParamSpec

# An odd polynomial a x + b x^3 + c x^5 with the steepest slope at 0 that still brings [0, 1] near 1 (Keller Jordan's).
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
STEPS = 5
RMS = 0.2


class MuonState(NamedTuple):
    momentum: Any


def is_hidden_matrix(spec: ParamSpec) -> bool:
    """Multiplies activations, and neither embeds tokens nor predicts them."""
    return len(spec.shape) >= 2 and spec.active > 0 and "vocab" not in spec.axes


def matrix_shape(spec: ParamSpec) -> tuple[int, ...]:
    """The shape [..., out, in] of a weight as the linear map it is: heads are part of out or in, experts a batch."""
    if spec.axes[0] == "experts":
        return spec.shape
    if spec.shape[-1] == spec.stored.shape[-1]:  # [N, H, D], and a checkpoint keeps D last
        return math.prod(spec.shape[:-1]), spec.shape[-1]
    return spec.shape[0], math.prod(spec.shape[1:])


def scale_by_muon(
    specs: Sequence[ParamSpec], momentum: float, platform: str | None = None
) -> optax.GradientTransformation:
    """For a tree whose leaves, in order, are declared by `specs`: orthogonalised Nesterov momentum of an Adam step's
    size, ascending (the learning rate brings the sign). Products are bf16 but on a CPU, where those are slow."""

    def init(params: Any) -> MuonState:
        return MuonState(jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, MuonState]:
        buffers = jax.tree.map(lambda m, g: momentum * m + g, state.momentum, updates)
        ahead, tree = jax.tree.flatten(jax.tree.map(lambda m, g: momentum * m + g, buffers, updates))
        dtype = jnp.float32 if (platform or jax.default_backend()) == "cpu" else jnp.bfloat16
        return tree.unflatten(_orthogonal_steps(ahead, specs, dtype)), MuonState(buffers)

    return optax.GradientTransformation(init, update)


def _orthogonal_steps(tensors: Sequence[jax.Array], specs: Sequence[ParamSpec], dtype: Any) -> list[jax.Array]:
    # Equal axes too: stacking what is split differently would move it between devices.
    groups: dict[tuple, list[int]] = {}
    for i, spec in enumerate(specs):
        groups.setdefault((matrix_shape(spec), spec.shape, spec.axes), []).append(i)
    out = list(tensors)
    for (shape, *_), members in groups.items():
        stacked = jnp.stack([tensors[i].reshape(shape) for i in members]).astype(dtype)
        steps = orthogonalize(stacked).astype(jnp.float32) * (RMS * math.sqrt(max(shape[-2:])))
        for i, step in zip(members, steps, strict=True):
            out[i] = step.reshape(specs[i].shape)
    return out


def orthogonalize(x: jax.Array) -> jax.Array:
    """About U V^T for each matrix U S V^T of x [..., rows, columns]; 0 stays 0."""
    wide = x.shape[-2] <= x.shape[-1]  # the products are of the smaller side
    x = x if wide else x.mT
    x32 = x.astype(jnp.float32)
    x = (x32 / (jnp.sqrt(jnp.sum(x32 * x32, axis=(-2, -1), keepdims=True)) + 1e-20)).astype(x.dtype)
    a, b, c = NEWTON_SCHULZ
    for _ in range(STEPS):
        square = x @ x.mT
        x = a * x + (b * square + c * (square @ square)) @ x
    return x if wide else x.mT
