"""Declare the weights of draft models, and map the tokens of a reduced vocabulary to the target's.

S sequences, V the target's vocabulary, U the draft's.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.core.spec import ParamSpec, Stored


def declare(name: str, shape: tuple[int, ...], axes: tuple[str | None, ...], **more: Any) -> ParamSpec:
    """Return the spec of a weight that is stored as it is used."""
    return ParamSpec(shape, axes, Stored((name,), shape), **more)


def declare_norm(name: str, dim: int) -> ParamSpec:
    """Return the spec of a norm's weight."""
    return declare(name, (dim,), (None,), init="ones", active=0.0)


def declare_tokens(name: str, count: int) -> ParamSpec:
    """Return the spec of a table of tokens, stored as int64."""
    return declare(name, (count,), (None,), init="zeros", active=0.0, dtype="int32")


def without_model(leaf: ParamSpec) -> ParamSpec:
    """Return the spec with names such as layers.0.mlp.up_proj.weight, without the `model.` of whole models."""
    names = tuple(name.removeprefix("model.") for name in leaf.stored.names)
    return dataclasses.replace(leaf, stored=dataclasses.replace(leaf.stored, names=names))


def target_ids(d2t: jax.Array) -> jax.Array:
    """Return the target's ids [U] of the draft's tokens."""
    return jnp.arange(d2t.shape[0], dtype=jnp.int32) + d2t


def in_target_vocab(logits: jax.Array, d2t: jax.Array, vocab: int) -> jax.Array:
    """Return logits [S, U] as [S, V], minus infinity for tokens that the draft does not have."""
    return jnp.full((logits.shape[0], vocab), -jnp.inf).at[:, target_ids(d2t)].set(logits)
