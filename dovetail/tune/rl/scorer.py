"""Compute log-probabilities of given rows by the policy, the reference and the teacher, without a gradient."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.core.mesh import Placement, make_mesh
from dovetail.core.types import Batch, Params
from dovetail.models.config import ModelConfig
from dovetail.ops.token_loss import token_logprobs
from dovetail.train.objective import hidden_states, step_context
from dovetail.train.prepare import Ready
from dovetail.train.step import compute_copy
from dovetail.tune.policy import frozen_model, head_of, policy_of, unembed_of
from dovetail.tune.rl.objective import CRITIC, allowed_tokens, banned_token, policy_scores, values_of
from dovetail.tune.rl.settings import POLICY, Rl


class RowScorer:
    """Score rows in the trainer's arithmetic."""

    def __init__(self, settings: Rl, ready: Ready):
        self._settings, self._ready, self._policy = settings, ready, policy_of(settings)
        context = step_context(ready.settings, ready.placement, ready.platform)
        self._ctx = dataclasses.replace(context, remat="none", logits=jnp.float32)
        self._reference_placement = _reference_placement(settings, ready)
        self._old_policy, self._by_reference = jax.jit(self._score), jax.jit(self._score_reference)
        self._by_teacher = jax.jit(self._score_teacher)
        self._reference: Any = None
        self._teacher: Any = None

    def old_policy(self, params: Params, batch: Batch) -> dict[str, np.ndarray]:
        """Return the scores by the weights before the first update, each [B, T].

        `old`: log-probabilities of the policy. `plain`: those of the model, which the sampler reports, if sampling
        reshapes them. `entropy`: the policy's, if only the tokens with the highest are trained. `values`: a critic's.
        """
        return jax.device_get(self._old_policy(params, batch, self._ready.frozen))

    def reference(self, batch: Batch, kept: Params | None = None) -> jax.Array:
        """Return the reference's log-probabilities, [B, T], without waiting for them.

        Args:
            batch: The rows.
            kept: The reference of the training state, if it has one; otherwise a frozen model is loaded.
        """
        if self._reference is None:
            self._reference = self._load_reference()
        rows, own = batch, self._reference_placement
        if own:
            rows = self._ready.place(batch, own)
            kept = kept and jax.device_put(kept, own.shardings(self._ready.specs))
        return self._by_reference(self._reference, kept, rows)

    def teacher(self, batch: Batch) -> np.ndarray:
        """Return the teacher's log-probabilities, [B, T]."""
        settings = self._settings
        if self._teacher is None:
            frozen = frozen_model(settings.teacher, settings.held, settings.precision.compute)
            self._teacher = frozen.load(self._teacher_cfg, self._ready.placement)
        return np.asarray(self._by_teacher(self._teacher, batch))

    @property
    def _teacher_cfg(self) -> ModelConfig:
        assert self._settings.teacher_cfg is not None, "tune.policy.with_teacher_cfg fills it in"
        return self._settings.teacher_cfg

    def _load_reference(self) -> Any:
        """Return the frozen part of the reference. For adapters it is their base, without a second copy if possible."""
        settings, ready = self._settings, self._ready
        if settings.kept_reference and not settings.lora:
            return ()
        if settings.lora and not self._reference_placement:
            return ready.frozen
        return frozen_model(settings.weights, settings.held, settings.precision.compute).load(
            ready.cfg, self._reference_placement or ready.placement
        )

    def _score(self, params: Params, batch: Batch, frozen: Any) -> dict[str, jax.Array]:
        cfg, settings, ctx = self._ready.cfg, self._settings, dataclasses.replace(self._ctx, frozen=frozen)
        with ctx.compute.products(ctx.platform):
            own = compute_copy(params, self._ready.specs, ctx.compute)
            model = self._policy.params(own[POLICY] if settings.has_critic else own, ctx)
            hidden, _ = hidden_states(model, cfg, batch, ctx)
            scores = policy_scores(model, cfg, hidden, batch, ctx, settings, banned_token(cfg))
            found = {"old": scores.logprobs}
            if settings.selects_tokens:
                assert scores.entropy is not None
                found["entropy"] = scores.entropy
            if settings.reshapes_logits:
                found["plain"] = token_logprobs(
                    hidden, head_of(model, cfg), batch.targets, allowed=allowed_tokens(batch),
                    banned=banned_token(cfg), **unembed_of(cfg, ctx),
                )  # fmt: skip
            if settings.has_critic:
                found["values"] = values_of(own[CRITIC], self._policy, cfg, batch, ctx)
        return found

    def _score_reference(self, model: Params, kept: Params | None, batch: Batch) -> jax.Array:
        if kept is not None:
            own = compute_copy(kept, self._ready.specs, self._ctx.compute)
            model = self._policy.params(own, dataclasses.replace(self._ctx, frozen=model))
        return self._logprobs(model, self._ready.cfg, batch, self._reference_placement)

    def _score_teacher(self, model: Params, batch: Batch) -> jax.Array:
        return self._logprobs(model, self._teacher_cfg, batch)

    def _logprobs(self, model: Params, cfg: ModelConfig, batch: Batch, own: Placement | None = None) -> jax.Array:
        ctx = dataclasses.replace(self._ctx, placement=own) if own else self._ctx
        with ctx.compute.products(ctx.platform):
            hidden, _ = hidden_states(model, cfg, batch, ctx)
            banned = banned_token(self._ready.cfg)
            return policy_scores(model, cfg, hidden, batch, ctx, self._settings, banned).logprobs


def _reference_placement(settings: Rl, ready: Ready) -> Placement | None:
    """Return the placement on the reference's own devices, which come before the engine's; None: the trainer's."""
    count, end = settings.reference.devices, jax.device_count() - settings.engine.devices
    if not count:
        return None
    return Placement(make_mesh({"fsdp": count}, jax.devices()[end - count : end]), ready.placement.rules)
