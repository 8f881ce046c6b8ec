"""Define the objective of distillation: the divergence from a teacher's token distributions, and cross entropy.

The teacher is a model with the same vocabulary that runs beside the student, or its likeliest tokens and their
log-probabilities are columns of the rows (`teacher_tokens`, `teacher_logprobs`, [B, T, K]), as `likeliest` returns
them. Rows that the student has sampled itself make the distillation on-policy (GKD).

Hidden states and attention maps of chosen layers can be compared too. Hidden states after i layers are those of the
model that ends there: its first i layers and its last norm. Before the last layer, these i layers run a second time.
Hidden states of another width are compared through a learnt projection.

B rows, T tokens, N heads, D the student's model dim, E the teacher's.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.core.choice import require
from dovetail.core.errors import UnsupportedError
from dovetail.core.mesh import Placement
from dovetail.core.spec import ParamSpec, Stored
from dovetail.core.types import Batch, Column, Packed, Params
from dovetail.data.pictures import INDEX
from dovetail.io.hub import resolve
from dovetail.models.attention import Attention
from dovetail.models.block import norm
from dovetail.models.config import ModelConfig
from dovetail.models.spec import spec
from dovetail.ops.linear import matmul
from dovetail.ops.packed import packed_attention
from dovetail.ops.token_loss import token_divergence, token_top_k, top_k_divergence
from dovetail.train.external import frozen_logits
from dovetail.train.images import rope_positions
from dovetail.train.objective import (
    Frozen,
    Measured,
    Metrics,
    Objective,
    StepContext,
    cross_entropy,
    hidden_states,
    loads_of,
)
from dovetail.train.objective import export as export_model
from dovetail.tune.policy import Model, Policy, columns_of_images, frozen_model, head_of, policy_of, unembed_of
from dovetail.tune.sections import AttentionLoss, Distillation, check_teacher

PROJECTIONS = "projections"  # weights that only the training needs
LEAST_NORM = 1e-6
LEAST = 1e-9  # attention weights below this are raised to it before the logarithm


def divergence_objective(
    settings: Distillation,
    policy: Model,
    teacher: Model | None,
    teacher_cfg: ModelConfig | None,
    specs: Callable[[ModelConfig], Any] = spec,
    export: Callable[..., None] = export_model,
    trains_head: bool = True,
) -> Objective:
    """Return the objective of distillation settings.

    Args:
        settings: The loss.
        policy: Returns the student's weights from the trained ones and the step's context.
        teacher: The same for a live teacher; None where the rows have the teacher's tokens.
        teacher_cfg: The teacher's config.
        specs: Declares the trained weights.
        export: Exports the trained weights.
        trains_head: Whether the output head is trained; otherwise its gradient is not computed.
    """
    taught = _Distilled(settings, policy, teacher, teacher_cfg, trains_head)
    K, from_rows = settings.top_k, {}
    if settings.teacher == "disk":
        from_rows = {"teacher_tokens": Column("int32", width=K), "teacher_logprobs": Column(width=K)}
    return Objective(
        taught.measure,
        columns=from_rows,
        specs=lambda cfg: specs(cfg) | taught.projections(cfg),
        held_out=taught.held_out,
        export=lambda folder, cfg, params, *rest: export(folder, cfg, _without_projections(params), *rest),
    )


def top_logits(logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Return the k likeliest tokens and their log-probabilities, [B, T, K] each, of logits [B, T, V]."""
    values, words = jax.lax.top_k(jax.nn.log_softmax(logits), k)
    return words.astype(jnp.int32), values


def likeliest(params: Params, cfg: ModelConfig, batch: Batch, ctx: StepContext, k: int) -> tuple[jax.Array, jax.Array]:
    """Return a teacher's k likeliest tokens and their log-probabilities at each position, [B, T, K] each."""
    if cfg.external:
        return top_logits(frozen_logits(params, cfg, batch, ctx), k)
    hidden, _ = hidden_states(params, cfg, batch, dataclasses.replace(ctx, remat="none"))
    return token_top_k(hidden, head_of(params, cfg), k, **unembed_of(cfg, ctx))


@dataclass(frozen=True)
class _Distilled:
    """The loss and metrics of a student."""

    settings: Distillation
    policy: Model
    teacher: Model | None
    teacher_cfg: ModelConfig | None
    trains_head: bool = True

    def projections(self, cfg: ModelConfig) -> dict[str, Any]:
        """Declare the projections of the student's hidden states."""
        if not self.settings.features.weight:
            return {}
        assert self.teacher_cfg is not None, "settings.teacher is live"
        number = len(layer_pairs(self.settings.features, cfg, self.teacher_cfg))
        return {PROJECTIONS: projections(number, cfg, self.teacher_cfg)}

    def measure(self, params: Params, cfg: ModelConfig, batch: Batch, weight: jax.Array, ctx: StepContext) -> Measured:
        """Measure a microstep."""
        wanted, own = self.settings, self.policy(_without_projections(params), ctx)
        hidden, stats = hidden_states(own, cfg, batch, ctx)
        theirs = self._teachers(params, cfg, batch, ctx)
        learnt = _learnt(wanted.alpha < 1, own, cfg, hidden)
        nll, parts = cross_entropy(*learnt, batch, ctx, trains_head=self.trains_head and wanted.alpha < 1)
        apart = self._divergence(*_learnt(wanted.alpha > 0, own, cfg, hidden), batch, ctx, theirs)
        apart = _mean(apart, batch, weight)
        loss = wanted.alpha * wanted.temperature**2 * apart + (1 - wanted.alpha) * nll / weight
        metrics = {"divergence": apart, "nll": nll / weight, "token_accuracy": parts["correct"] / weight}
        if wanted.features.weight:
            distance = self._feature_distance(params[PROJECTIONS], own, cfg, hidden, batch, ctx, theirs)
            metrics["features"] = _mean(distance, batch, weight)
            loss = loss + wanted.features.weight * metrics["features"]
        if wanted.attention.weight:
            metrics["attention"] = _mean(self._attention_divergence(own, cfg, batch, ctx, theirs), batch, weight)
            loss = loss + wanted.attention.weight * metrics["attention"]
        return Measured(loss, jax.tree.map(jax.lax.stop_gradient, metrics), loads_of(stats))

    def _teachers(self, params: Params, cfg: ModelConfig, batch: Batch, ctx: StepContext) -> Any:
        """Return (weights, hidden states) of a live teacher; logits for hidden states, if it is a torch module.

        None: the rows have its tokens.
        """
        if self.settings.teacher == "disk":
            return None
        assert self.teacher is not None and self.teacher_cfg is not None, "settings.teacher is live"
        check_teacher(cfg, self.teacher_cfg)
        model = jax.lax.stop_gradient(self.teacher(params, ctx))
        if self.teacher_cfg.external:
            return model, frozen_logits(model, self.teacher_cfg, batch, ctx)
        return model, hidden_states(model, self.teacher_cfg, batch, dataclasses.replace(ctx, remat="none"))[0]

    def _divergence(
        self, own: Params, cfg: ModelConfig, hidden: jax.Array, batch: Batch, ctx: StepContext, theirs: Any
    ) -> jax.Array:
        """Return the divergence of the student from the teacher at each position, [B, T]."""
        wanted, head = self.settings, head_of(own, cfg)
        how: dict[str, Any] = dict(
            kind=wanted.kind, beta=wanted.beta, temperature=wanted.temperature, **unembed_of(cfg, ctx)
        )
        if theirs is None:
            return top_k_divergence(
                hidden, head, batch.columns["teacher_tokens"], batch.columns["teacher_logprobs"], **how
            )
        (model, states), of = theirs, self.teacher_cfg
        assert of is not None
        if of.external:
            return top_k_divergence(hidden, head, *top_logits(states, wanted.top_k or of.vocab), **how)
        if wanted.top_k:
            likely = token_top_k(states, head_of(model, of), wanted.top_k, **unembed_of(of, ctx))
            return top_k_divergence(hidden, head, *likely, **how)
        scale, softcap = of.logit_scale, of.logit_softcap
        return token_divergence(
            hidden, head, states, head_of(model, of), teacher_scale=scale, teacher_softcap=softcap, **how
        )

    def _feature_distance(
        self, projected: tuple, own: Params, cfg: ModelConfig, hidden: jax.Array, batch: Batch, ctx: StepContext,
        theirs: Any,
    ) -> jax.Array:  # fmt: skip
        """Return the distance of the hidden states, averaged over the compared layers, [B, T]."""
        (model, states), of, wanted = theirs, self.teacher_cfg, self.settings.features
        assert of is not None
        plain, total = dataclasses.replace(ctx, remat="none"), jnp.zeros(hidden.shape[:2])
        for (i, j), projection in zip(layer_pairs(wanted, cfg, of), projected, strict=True):
            ours = states_after(i, own, cfg, batch, ctx, hidden)
            target = jax.lax.stop_gradient(states_after(j, model, of, batch, plain, states))
            total += state_distance(ours, target, projection, wanted.kind)
        return total / len(projected)

    def _attention_divergence(
        self, own: Params, cfg: ModelConfig, batch: Batch, ctx: StepContext, theirs: Any
    ) -> jax.Array:
        """Return the divergence of the attention maps, averaged over the compared layers, [B, T]."""
        (model, _), of = theirs, self.teacher_cfg
        assert of is not None
        plain, layers = dataclasses.replace(ctx, remat="none"), layer_pairs(self.settings.attention, cfg, of)
        total = jnp.zeros(batch.tokens.shape)
        for i, j in layers:
            target = jax.lax.stop_gradient(attention_map(j, model, of, batch, plain))
            total += map_divergence(attention_map(i, own, cfg, batch, ctx), target)
        return total / len(layers)

    def held_out(self, params: Params, cfg: ModelConfig, batch: Batch, ctx: StepContext) -> tuple[Metrics, jax.Array]:
        """Return sums over the targets of held-out rows, and the number of targets."""
        found = self.measure(params, cfg, batch, jnp.ones(()), ctx)
        return {"loss": found.loss, **found.metrics}, batch.loss_mask.sum()


def _learnt(counts: bool, own: Params, cfg: ModelConfig, hidden: jax.Array) -> tuple[Params, ModelConfig, jax.Array]:
    """Return the arguments without a gradient, unless they count in the loss: metrics need no backward pass."""
    return (own, cfg, hidden) if counts else (jax.lax.stop_gradient(own), cfg, jax.lax.stop_gradient(hidden))


def _mean(values: jax.Array, batch: Batch, weight: jax.Array) -> jax.Array:
    """Return the microstep's share of the mean over targets; values elsewhere are undefined."""
    return jnp.sum(jnp.where(batch.loss_mask > 0, batch.loss_mask * values, 0.0)) / weight


def _without_projections(params: Params) -> Params:
    return {name: x for name, x in params.items() if name != PROJECTIONS}


def distill_objective(settings: Any) -> Objective:
    """Return the objective of a recipe for distillation, also of RL's with `teacher` and `distillation`."""
    if isinstance(settings.teacher, str):
        resolve(settings.teacher)  # fails now if it cannot be fetched, not after the step is compiled
    policy, teacher = policy_of(settings), None
    if settings.distillation.teacher == "live":
        teacher = frozen_model(settings.teacher, settings.held, settings.precision.compute)
    teacher_cfg = settings.teacher_cfg
    found = divergence_objective(
        settings.distillation, lambda params, ctx: _student(policy, params, ctx),
        (lambda params, ctx: ctx.frozen["teacher"]) if teacher else None, teacher_cfg, policy.specs, policy.export,
        policy.trains_head,
    )  # fmt: skip
    initial = policy.initial and functools.partial(policy.initial, base=lambda ready: ready.frozen["base"])
    frozen, columns = _both(policy.frozen, teacher, teacher_cfg), {**found.columns, **columns_of_images(settings)}
    return dataclasses.replace(
        found, columns=columns, frozen=frozen, initial=initial, check=policy.check, beside=policy.beside
    )


def _student(policy: Policy, params: Params, ctx: StepContext) -> Params:
    return policy.params(params, dataclasses.replace(ctx, frozen=(ctx.frozen or {}).get("base")))


def _both(base: Frozen | None, teacher: Frozen | None, teacher_cfg: ModelConfig) -> Frozen:
    """Return the student's base and the teacher as one frozen tree, by name."""

    def abstract(cfg: ModelConfig, placement: Placement) -> Any:
        own = {"base": base.abstract(cfg, placement)} if base else {}
        return own | ({"teacher": teacher.abstract(teacher_cfg, placement)} if teacher else {})

    def load(cfg: ModelConfig, placement: Placement) -> Any:
        own = {"base": base.load(cfg, placement)} if base else {}
        return own | ({"teacher": teacher.load(teacher_cfg, placement)} if teacher else {})

    return Frozen(abstract, load)


# --- compared layers --------------------------------------------------------------------------------------------------


def layer_pairs(settings: AttentionLoss, cfg: ModelConfig, teacher_cfg: ModelConfig) -> list[tuple[int, int]]:
    """Return the layers that are compared, from 1: (student's, teacher's)."""
    for name, model in (("student", cfg), ("teacher", teacher_cfg)):
        deepest, has = max(getattr(settings, name), default=0), len(model.layers)
        require(deepest <= has, f"{name} must name some of the {has} layers of that model; got {deepest}", param=name)
    last = (len(cfg.layers), len(teacher_cfg.layers))
    return list(zip(settings.student, settings.teacher, strict=True)) or [last]


# --- hidden states ----------------------------------------------------------------------------------------------------


def projections(number: int, cfg: ModelConfig, teacher_cfg: ModelConfig) -> tuple[ParamSpec, ...]:
    """Declare the projections [E, D] from the student's states to the teacher's."""
    shape = (teacher_cfg.dim, cfg.dim)
    return tuple(
        ParamSpec(shape, (None, "embed"), Stored((f"distillation.projections.{i}.weight",), shape))
        for i in range(number)
    )


def states_after(
    layers: int, params: Params, cfg: ModelConfig, batch: Batch, ctx: StepContext, last: jax.Array | None
) -> jax.Array:
    """Return the hidden states after some layers, [B, T, D]; `last`: those of the whole model, where they are known."""
    if layers == len(cfg.layers) and last is not None:
        return last
    first = dataclasses.replace(cfg, layers=cfg.layers[:layers])
    return hidden_states({**params, "layers": params["layers"][:layers]}, first, batch, ctx)[0]


def state_distance(ours: jax.Array, theirs: jax.Array, projection: Any, kind: str) -> jax.Array:
    """Return the distance of the student's states [..., D] from the teacher's [..., E]: [...] f32, 1 - cos or mse."""
    a, b = matmul(ours, projection).astype(jnp.float32), theirs.astype(jnp.float32)
    if kind == "mse":
        return jnp.mean((a - b) ** 2, axis=-1)
    norms = jnp.sqrt(jnp.sum(a * a, axis=-1) * jnp.sum(b * b, axis=-1) + LEAST_NORM**2)
    return 1.0 - jnp.sum(a * b, axis=-1) / norms


# --- attention maps ---------------------------------------------------------------------------------------------------


def attention_map(number: int, params: Params, cfg: ModelConfig, batch: Batch, ctx: StepContext) -> jax.Array:
    """Return the attention weights of layer `number`, from 1, averaged over its heads: [B, T, T] in f32."""
    layer, p = cfg.layers[number - 1], params["layers"][number - 1]
    attn = layer.attn
    if not isinstance(attn, Attention) or attn.kv_from is not None or not layer.pre_norm:
        raise UnsupportedError(
            f"attention can be compared in layers with their own keys and pre-norm only, got layer {number} of a "
            f"{cfg.family} model: set distillation.attention.weight=0, or name other layers",
            param="distillation.attention",
        )
    if cfg.vision and cfg.vision.block_mask and INDEX in batch.columns:
        raise UnsupportedError(
            f"attention cannot be compared for images in a {cfg.family} model, whose image tokens see later ones: set "
            "distillation.attention.weight=0",
            param="distillation.attention",
        )
    # The layer normalises its input, so the scale of the input does not matter: the states of the model that ends
    # before this layer, with a norm without weight, give the same result.
    flat = jnp.full((cfg.dim,), 1.0 - cfg.norm_offset, params["norm"].dtype)
    x = states_after(number - 1, {**params, "norm": flat}, cfg, batch, ctx, None)
    table = attn.rope.tables(rope_positions(batch)) if attn.rope else ()
    packed = ctx.packed(batch)
    h = norm(p["attn_norm"], cfg, x)
    q, (k, _) = attn.project_and_store(p["attn"], h, table, packed, None, cfg.norm_eps, cfg.norm_offset)
    return _attention_weights(attn, q, k, packed, p["attn"].get("sinks")).mean(axis=2)


def _attention_weights(
    attn: Attention, q: jax.Array, k: jax.Array, packed: Packed, sinks: jax.Array | None
) -> jax.Array:
    """Return the attention weights [B, T, N, T]: the output of attention for values that are one-hot positions."""
    B, T, K, _ = k.shape
    one_hot = jnp.broadcast_to(jnp.eye(T)[:, None, :], (B, T, K, T))
    how: dict[str, Any] = dict(window=attn.window, softcap=attn.softcap, sinks=sinks)
    return packed_attention(q, k, one_hot, dataclasses.replace(packed, placement=None), scale=attn.scale, **how)


def map_divergence(ours: jax.Array, theirs: jax.Array) -> jax.Array:
    """Return KL(theirs || ours) of each token's attention weights [..., T], [...]."""
    p, q = jnp.maximum(theirs, LEAST), jnp.maximum(ours, LEAST)
    return jnp.sum(theirs * (jnp.log(p) - jnp.log(q)), axis=-1)
