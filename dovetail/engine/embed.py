"""Embedder: embeddings (a prompt's final hidden states, pooled, of length 1) and the scores of a reward model.

Each prompt is a forward pass of its own between the engine's steps; it uses no pages.

T tokens of a prompt, padded to one of a few sizes; D model dim.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.core.errors import RequestError, UserError
from dovetail.core.types import Params
from dovetail.engine.device.arrays import abstract_of
from dovetail.engine.engine import Engine
from dovetail.models.decoder import score

Pooling = Literal["mean", "last"]
Wanted = Literal["mean", "last", "score"]  # a pooled vector, or the last token's score
Cancelled = Callable[[], bool]  # returns True once the client has left or the request timed out
LEAST = 16  # tokens of the smallest size


def _never() -> bool:
    return False


class Embedder:
    """Compute embeddings and scores beside an engine's steps.

    Args:
        engine: The engine.
        do: Calls a function with the engine where the engine may be used, such as on an EngineLoop's thread. Programs
            are compiled on the caller's thread, so that streams continue meanwhile.
    """

    def __init__(self, engine: Engine, do: Callable[[Callable[[Engine], Any]], Any]):
        self._engine, self._do = engine, do
        self._compiled, self._lock = {}, threading.Lock()

    def embed(
        self,
        prompts: Many[Many[int]],
        pooling: Pooling = "mean",
        adapter: str | None = None,
        cancelled: Cancelled = _never,
    ) -> list[list[float]]:
        """Return one vector [D] per prompt.

        Raises:
            RequestError: If a prompt is refused, before any is computed, or if `cancelled` returns True.
        """
        if pooling not in get_args(Pooling):
            raise RequestError(f"`pooling` must be 'mean' or 'last', got {pooling!r}", param="pooling")
        return self._each(prompts, pooling, adapter, cancelled)

    def score(self, prompts: Many[Many[int]], adapter: str | None = None, cancelled: Cancelled = _never) -> list[float]:
        """Return one score of a reward model per prompt; raises as `embed`."""
        if not self._engine.cfg.scored:
            raise RequestError(
                "the model is not a reward model: use one trained with `dovetail reward`, or a "
                "ForSequenceClassification model of Hugging Face with one label"
            )
        return self._each(prompts, "score", adapter, cancelled)

    def _each(self, prompts: Many[Many[int]], wanted: Wanted, adapter: str | None, cancelled: Cancelled) -> list[Any]:
        engine = self._engine
        for prompt in prompts:
            engine.intake.check_tokens(list(prompt))
        _number(engine, adapter)
        found = []
        for prompt in prompts:
            if cancelled():
                raise RequestError(f"cancelled after {len(found)} of {len(prompts)} prompts", code="cancelled")
            found.append(self._one(engine, prompt, wanted, adapter))
        return found

    def _one(self, engine: Engine, prompt: Many[int], wanted: Wanted, adapter: str | None) -> Any:
        size = min(max(LEAST, 1 << (len(prompt) - 1).bit_length()), engine.scheduler.config.max_model_len)
        tokens = np.zeros((1, size), np.int32)
        tokens[0, : len(prompt)] = prompt
        run = self._ready(engine, size, wanted)
        # The adapter's slot is looked up where it is used: another adapter may be there by then.
        found = self._do(lambda engine: run(_weights(engine), tokens, np.int32(len(prompt)), _number(engine, adapter)))
        return np.asarray(found).tolist()  # fetched here: the engine's thread does not wait for it

    def _ready(self, engine: Engine, size: int, wanted: Wanted) -> Any:
        with self._lock:
            if (size, wanted) not in self._compiled:
                run = jax.jit(functools.partial(_embed, hidden_states=engine.runner.hidden_states, wanted=wanted))
                tokens, count = jax.ShapeDtypeStruct((1, size), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
                params = abstract_of(engine.runner.params)
                self._compiled[size, wanted] = run.lower(params, tokens, count, count).compile()
            return self._compiled[size, wanted]


def _weights(engine: Engine) -> Params:
    if engine.weightless:
        raise UserError(engine.weightless)
    return engine.runner.params


def _number(engine: Engine, adapter: str | None) -> np.int32:
    """Return the number of an adapter's slot; 0 for the base model."""
    return np.int32(engine.runner.adapters.find(adapter).number if adapter else 0)


def _embed(
    params: Params, tokens, count, adapter, *, hidden_states: Callable[..., jax.Array], wanted: Wanted
) -> jax.Array:
    """Return a vector [D] f32, or a score [], for tokens [1, T] of which the first `count` are the prompt's.

    `adapter` is the number of its slot, or 0; `hidden_states` is the runner's.
    """
    hidden = hidden_states(params, tokens, count, adapter)
    if wanted == "score":
        return score(params, hidden[0, count - 1])
    hidden, real = hidden[0].astype(jnp.float32), jnp.arange(tokens.shape[1]) < count
    pooled = hidden[count - 1] if wanted == "last" else (hidden * real[:, None]).sum(0) / count
    return pooled / jnp.maximum(jnp.linalg.norm(pooled), 1e-12)
