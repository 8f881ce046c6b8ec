"""A Flax NNX view of a Dovetail model, and back (extra `nnx`).

    module = to_nnx(dt.load("smollm2-135m", dtype="f32"))
    optimizer = nnx.Optimizer(module, optax.adamw(1e-5), wrt=nnx.Param)
    logits = module(tokens)                      # [B, T] -> [B, T, V]
    from_nnx(module).save("folder")              # the model again, as dt.load returns it

Pass the module through `nnx.jit`; `jax.jit` of a function that closes over it keeps the weights of its first call.

The weights are the arrays themselves, not copies: each is an `nnx.Param` in the tree of `models.spec`, so filters,
optimizers, `nnx.split` and Orbax see them as those of any module. The forward pass is models.decoder's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from dovetail.core.errors import MissingPackageError
from dovetail.core.types import Packed, Params
from dovetail.interop.loaded import LoadedModel, check_text
from dovetail.models.decoder import trunk, unembed

if TYPE_CHECKING:
    from flax import nnx


def to_nnx(model: LoadedModel) -> nnx.Module:
    """Return a loaded model as an NNX module that shares its weights.

    The module maps tokens [B, T] to logits [B, T, V]; `segment_ids` [B, T] keeps packed documents apart (0: padding).

    Raises:
        MissingPackageError: Flax is not installed.
        UnsupportedError: The model is not a causal language model of text.
    """
    try:
        from flax import nnx
    except ImportError as error:
        raise MissingPackageError("an NNX view needs flax: `pip install 'dovetail[nnx]'`") from error
    cfg, compute = model.config, model.compute
    check_text(cfg)

    class NnxModel(nnx.Module):
        def __init__(self) -> None:
            self.weights = nnx.data(jax.tree.map(nnx.Param, model.params))
            self.source = nnx.static(replace(model, params={}))  # type: ignore[type-var]

        def __call__(self, tokens: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
            params, segments = _arrays(self.weights), segment_ids
            segments = jnp.ones_like(tokens) if segments is None else segments
            with compute.products():
                hidden, _ = trunk(params, cfg.within(tokens.shape[1]), tokens, _positions(segments), Packed(segments))
                return unembed(params, cfg, hidden)

    return NnxModel()


def from_nnx(module: Any) -> Any:
    """Return the model of a module that `to_nnx` returned, with the module's current weights."""
    return replace(module.source, params=_arrays(module.weights))


def _arrays(weights: Any) -> Params:
    from flax import nnx

    return jax.tree.map(lambda x: x[...], weights, is_leaf=lambda x: isinstance(x, nnx.Variable))


def _positions(segment_ids: jax.Array) -> jax.Array:
    """Return [B, T] positions from 0 in each run of equal ids."""
    index = jnp.broadcast_to(jnp.arange(segment_ids.shape[1], dtype=jnp.int32), segment_ids.shape)
    is_first = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return index - jax.lax.cummax(jnp.where(is_first, index, 0), axis=1)
