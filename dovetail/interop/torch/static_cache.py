"""Run a Hugging Face language model token by token, with a cache of one size, as pure functions of jax arrays.

A cache is the keys and values of each attention layer, as Hugging Face's StaticCache holds them. Three ways to call a
model are tried, in this order, and the first one whose logits equal those of a plain forward pass is used:

- "static": with the cache;
- "masked": with the cache and a mask of ones over all of it, for models that would otherwise make one of its length;
- "none": without a cache. The "cache" is then the row of tokens, and each step computes all of it: for models with a
  recurrent state, or whose attention reads the length as a Python number.

B is 1: one sequence. T tokens of a step, L tokens of a cache, V vocabulary.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.core.compute import Compute
from dovetail.core.errors import UnsupportedError
from dovetail.interop.torch.function import Arrays, ModuleFunction

log = logging.getLogger(__name__)
CacheKind = Literal["static", "masked", "none"]
Cache = Any  # a tuple of (keys, values) [1, heads, L, dim] for each layer, or a row of tokens [1, L]
TRIED = 9  # tokens that are computed both ways before a kind of cache is used


class StaticCacheSteps:
    """Compute the logits of a sequence's next tokens, given the cache of those before.

    Attributes:
        kind: How the model is called (see the module); None before `choose`.
        run_logits: `logits`, compiled once per number of tokens.
        run_step: `step`, compiled once per number of tokens and length of the cache, which it donates.
    """

    def __init__(self, apply: ModuleFunction, max_len: int, compute: Compute):
        self._apply, self._max_len, self._compute = apply, max_len, compute
        self.kind: CacheKind | None = None
        self.run_logits = jax.jit(self.logits)
        self.run_step = jax.jit(self.step, donate_argnames="cache", static_argnames="kind")

    def choose(self, params: Arrays, size: int, length: int) -> CacheKind:
        """Choose the kind of cache by running a few tokens, in steps of `size` on caches of `length`.

        Raises:
            UnsupportedError: The model cannot be run at all; the error names an operator or a module.
        """
        if self.kind is not None:
            return self.kind
        tokens = np.zeros((1, size), np.int32)
        tokens[0, :TRIED] = 1 + np.arange(TRIED)
        want = np.asarray(self.run_logits(params, tokens), np.float32)[0, TRIED - 1]
        bound = (1e-3 if self._compute.dtype == jnp.float32 else 5e-2) * max(np.abs(want).max(), 1e-3)
        for kind in ("static", "masked"):
            try:
                found = self._last_logits(params, tokens, length, kind)
            except Exception as error:  # whatever a model's code does with a cache that it does not expect
                log.debug("the cache %r does not work: %r", kind, error)
                continue
            if np.abs(found - want).max() <= bound:
                self.kind = kind
                return kind
        self.kind = "none"
        return self.kind

    def _last_logits(self, params: Arrays, tokens: np.ndarray, length: int, kind: CacheKind) -> np.ndarray:
        """Return the logits after TRIED tokens, of which the last one is a step of its own."""
        _, cache = self.run_step(params, self.new_cache(params, length, kind), tokens, np.int32(0), kind=kind)
        found, _ = self.run_step(params, cache, tokens[:, TRIED - 1 : TRIED], np.int32(TRIED - 1), kind=kind)
        return np.asarray(found, np.float32)[0, 0]

    def logits(self, params: Arrays, tokens: jax.Array) -> jax.Array:
        """Return the logits [1, T, V] of tokens [1, T], without a cache."""
        with self._compute.products():
            return self._apply(params, input_ids=tokens, use_cache=False).logits

    def hidden(self, params: Arrays, tokens: jax.Array) -> jax.Array:
        """Return the final hidden states [1, T, D] of tokens [1, T]."""
        with self._compute.products():
            found, _ = self._apply.with_buffers(
                params, self._apply.buffers, input_ids=tokens, use_cache=False, method="base_model"
            )
        return found.last_hidden_state

    def new_cache(self, params: Arrays, length: int, kind: CacheKind) -> Cache:
        """Allocate a cache of `length` tokens."""
        if kind == "none":
            return jnp.zeros((1, length), jnp.int32)
        fresh = functools.partial(self._apply, input_ids=np.zeros((1, 1), np.int32), use_cache=True)
        found = jax.eval_shape(
            lambda params: fresh(params, past_key_values=self._empty(length)).past_key_values, params
        )
        return tuple((_zeros(layer.keys), _zeros(layer.values)) for layer in found.layers)

    def step(
        self, params: Arrays, cache: Cache, tokens: jax.Array, start: jax.Array, *, kind: CacheKind
    ) -> tuple[jax.Array, Cache]:
        """Return the logits [1, T, V] of tokens [1, T] at positions from `start` on, and the cache with them."""
        if kind == "none":
            row = jax.lax.dynamic_update_slice(cache, jnp.asarray(tokens, jnp.int32), (0, start))
            return jax.lax.dynamic_slice_in_dim(self.logits(params, row), start, tokens.shape[1], axis=1), row
        length = cache[0][0].shape[2]
        # Padding may lie past the model's last position, whose embedding would be NaN.
        given = {"position_ids": jnp.minimum(start + jnp.arange(tokens.shape[1]), self._max_len - 1)[None]}
        if kind == "masked":
            given["attention_mask"] = jnp.ones((1, length), jnp.int32)
        if not self._takes_positions:
            del given["position_ids"]
        filled = self._filled(cache, start)
        with self._compute.products():
            found = self._apply(params, input_ids=tokens, use_cache=True, past_key_values=filled, **given)
        return found.logits, tuple((layer.keys, layer.values) for layer in found.past_key_values.layers)

    @functools.cached_property
    def _takes_positions(self) -> bool:
        import inspect

        return "position_ids" in inspect.signature(self._apply.module.forward).parameters

    def _empty(self, length: int) -> Any:
        """Return an empty StaticCache of torch; layers with a sliding window keep every token, and their mask hides."""
        from transformers.cache_utils import StaticCache, StaticLayer

        cache: Any = StaticCache(config=self._apply.module.config, max_cache_len=length)  # type: ignore[arg-type]
        if not all(isinstance(layer, StaticLayer) for layer in cache.layers):
            raise UnsupportedError("a layer has a recurrent state, which a step with padding would spoil.")
        cache.layers = [StaticLayer(max_cache_len=length) for _ in cache.layers]
        return cache

    def _filled(self, arrays: Cache, start: jax.Array) -> Any:
        """Return a StaticCache with these keys and values, of which the first `start` are in use."""
        import torch

        cache = self._empty(arrays[0][0].shape[2])
        for layer, (keys, values) in zip(cache.layers, arrays, strict=True):
            layer.keys, layer.values, layer.cumulative_length = keys, values, jnp.asarray(start, jnp.int32)
            layer.dtype, layer.device, layer.is_initialized = _torch_dtype(keys), torch.device("jax:0"), True
            layer.batch_size, layer.num_heads = keys.shape[:2]
            layer.k_head_dim, layer.v_head_dim = keys.shape[-1], values.shape[-1]
        return cache


def _zeros(like: Any) -> jax.Array:
    return jnp.zeros(like.shape, like.dtype)


def _torch_dtype(array: jax.Array) -> Any:
    from torchax.ops.mappings import j2t_dtype

    return j2t_dtype(array.dtype)
