"""The scorer: what a model in the trainer's numbers says of rows that are there, without a gradient."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.core.mesh import Placement, make_mesh
from dovetail.core.types import Batch, Params
from dovetail.io.outline import config_of
from dovetail.models.config import ModelConfig
from dovetail.ops.token_loss import token_logprobs
from dovetail.train.objective import hidden_states, step_context
from dovetail.train.prepare import Ready
from dovetail.train.step import compute_copy
from dovetail.tune.policy import frozen_model, head_of, policy_of, unembed_of
from dovetail.tune.rl.critic import ACTOR, CRITIC, values_of
from dovetail.tune.rl.objective import allowed_words, policy_scores
from dovetail.tune.rl.settings import Rl


class Scorer:
    def __init__(self, settings: Rl, ready: Ready):
        self._settings, self._ready, self._policy = settings, ready, policy_of(settings)
        context = step_context(ready.settings, ready.placement, ready.platform)
        self._ctx = dataclasses.replace(context, remat="none", logits=jnp.float32)
        self._apart = _apart(settings, ready)
        self._before, self._by_reference = jax.jit(self._score), jax.jit(self._score_reference)
        self._by_teacher = jax.jit(self._score_teacher)
        self._reference: Any = None
        self._teacher: Any = None

    def before(self, params: Params, batch: Batch) -> dict[str, np.ndarray]:
        """By the weights before the first update, each [B, T]: `old`, log-probabilities of the policy; where its
        sampling reshapes them `plain` too, those of the model, which the sampler reports; the policy's `entropy`, where
        only the tokens with the highest are trained; a critic's `values`.
        """
        return jax.device_get(self._before(params, batch, self._ready.frozen))

    def reference(self, batch: Batch, kept: Params | None = None) -> jax.Array:
        """Return the reference's log-probabilities, [B, T], without waiting for them: on devices of its own it computes
        while others do. kept: the training state's reference, where it has one; else it is a frozen model.
        """
        if self._reference is None:
            self._reference = self._load()
        rows = batch
        if self._apart:
            rows = self._ready.place(batch, self._apart)
            kept = kept and jax.device_put(kept, self._apart.shardings(self._ready.specs))
        return self._by_reference(self._reference, kept, rows)

    def teacher(self, batch: Batch) -> np.ndarray:
        """[B, T]: log-probabilities by the recipe's teacher."""
        settings = self._settings
        if self._teacher is None:
            frozen = frozen_model(settings.teacher, settings.held, settings.precision.compute)
            self._teacher = frozen.load(self._teacher_cfg, self._ready.placement)
        return np.asarray(self._by_teacher(self._teacher, batch))

    @functools.cached_property
    def _teacher_cfg(self) -> ModelConfig:
        return config_of(self._settings.teacher)

    def _load(self) -> Any:
        """Return the frozen part of the reference. Of adapters it is their base: no second copy where that lies."""
        settings, ready = self._settings, self._ready
        if settings.kept_reference and not settings.lora:
            return ()
        if settings.lora and not self._apart:
            return ready.frozen
        return frozen_model(settings.weights, settings.held, settings.precision.compute).load(
            ready.cfg, self._apart or ready.placement
        )

    def _score(self, params: Params, batch: Batch, frozen: Any) -> dict[str, jax.Array]:
        cfg, settings, ctx = self._ready.cfg, self._settings, dataclasses.replace(self._ctx, frozen=frozen)
        with ctx.compute.products(ctx.platform):
            own = compute_copy(params, self._ready.specs, ctx.compute)
            model = self._policy.params(own[ACTOR] if settings.has_critic else own, ctx)
            hidden, _ = hidden_states(model, cfg, batch, ctx)
            scores = policy_scores(model, cfg, hidden, batch, ctx, settings)
            found = {"old": scores.logprobs}
            if settings.selects_tokens:
                assert scores.entropy is not None
                found["entropy"] = scores.entropy
            if settings.is_reshaped:
                found["plain"] = token_logprobs(
                    hidden, head_of(model, cfg), batch.targets, allowed=allowed_words(batch), **unembed_of(cfg, ctx)
                )
            if settings.has_critic:
                found["values"] = values_of(own[CRITIC], self._policy, cfg, batch, ctx)
        return found

    def _score_reference(self, model: Params, kept: Params | None, batch: Batch) -> jax.Array:
        if kept is not None:
            own = compute_copy(kept, self._ready.specs, self._ctx.compute)
            model = self._policy.params(own, dataclasses.replace(self._ctx, frozen=model))
        return self._alone(model, self._ready.cfg, batch, self._apart)

    def _score_teacher(self, model: Params, batch: Batch) -> jax.Array:
        return self._alone(model, self._teacher_cfg, batch)

    def _alone(self, model: Params, cfg: ModelConfig, batch: Batch, apart: Placement | None = None) -> jax.Array:
        ctx = dataclasses.replace(self._ctx, placement=apart) if apart else self._ctx
        with ctx.compute.products(ctx.platform):
            hidden, _ = hidden_states(model, cfg, batch, ctx)
            return policy_scores(model, cfg, hidden, batch, ctx, self._settings).logprobs


def _apart(settings: Rl, ready: Ready) -> Placement | None:
    """The reference's own devices, which lie before the engine's; None: the trainer's."""
    count, end = settings.reference.devices, jax.device_count() - settings.engine.devices
    if not count:
        return None
    return Placement(make_mesh({"fsdp": count}, jax.devices()[end - count : end]), ready.placement.rules)
