"""Train the drafter of a run on its rollouts (speculation.kind=dspark).

Every `speculation.refresh` steps the policy runs once on the newest rollout, and the drafter is updated on its hidden
states as `dovetail draft` does (tune.draft). The drafter's weights and moments are the companion of the training state,
so that checkpoints have them and a resumed run continues with the same drafter.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dovetail.core.choice import require
from dovetail.core.compute import compute_of
from dovetail.core.mesh import Placement
from dovetail.core.spec import num_params
from dovetail.core.training import Schedule
from dovetail.core.types import Batch, Params
from dovetail.io.draft_folder import DraftCheckpoint, open_draft, save_draft
from dovetail.models.config import ModelConfig
from dovetail.models.draft.block_attention import BlockAttention
from dovetail.models.draft.dflash import DFlash
from dovetail.models.frozen import dense
from dovetail.train.objective import Companion, Objective, step_context
from dovetail.train.optim import Rate, learning_rate, make_optimizer
from dovetail.train.prepare import Ready
from dovetail.train.state import TrainState, abstract_state, init_state
from dovetail.train.step import Step, compute_copy, make_step
from dovetail.tune.draft.blocks import TrainedBlocks
from dovetail.tune.draft.new import NewDraft, as_new, draft_config, new_draft, with_given
from dovetail.tune.draft.objective import DraftObjective
from dovetail.tune.draft.states import FINAL, TAPS, States, run_target
from dovetail.tune.draft_sections import DrafterSettings
from dovetail.tune.policy import head_of, policy_of
from dovetail.tune.rl.sections import DSPARK
from dovetail.tune.rl.settings import POLICY, Rl
from dovetail.tune.settings import NEW_WEIGHTS, Draft

EXPORTED = "drafter"  # its folder within an export of the run
PART_TOKENS = 8192  # tokens per device that an update computes at once


@dataclass(frozen=True)
class RunDrafter:
    """Describe the drafter of a recipe and its training."""

    new: NewDraft
    settings: Draft
    opened: DraftCheckpoint | None  # the folder that it starts from

    @property
    def model(self) -> DFlash:
        """Return the draft model."""
        assert isinstance(self.new.model, DFlash)
        return self.new.model

    @functools.cached_property
    def ids(self) -> tuple[int, ...]:
        """Return the policy's tokens that it knows; () for all."""
        if not self.model.own_head:
            return ()
        assert self.opened is not None and self.opened.source is not None, "a new drafter has the policy's head"
        offsets = self.opened.source.read(self.opened.names["d2t"])
        return tuple((np.arange(len(offsets)) + offsets).tolist())

    @functools.cached_property
    def rate(self) -> Rate:
        """Return its learning rate, which is constant."""
        return learning_rate(Schedule(name="constant"), self.settings.optimizer.lr, 1)

    @functools.cached_property
    def optimizer(self) -> optax.GradientTransformation:
        """Return its optimizer."""
        return make_optimizer(self.settings.optimizer, self.rate, self.new.trained_spec())

    def abstract(self, cfg: ModelConfig, placement: Placement) -> TrainState:
        """Return its state as shapes with shardings."""
        return abstract_state(self.new.trained_spec(), self.settings, self.optimizer, placement)

    def init(self, ready: Ready, params: Params, policy: Callable[[Params, Any], Params]) -> TrainState:
        """Return its state at the start of a run: the folder's weights, or random ones."""
        specs, placement = self.new.trained_spec(), ready.placement
        if self.opened:
            given = self.opened.read(compute_of(self.settings.precision.params).dtype, placement)
        else:  # the policy's last norm has the scale that its head expects
            own = policy(params, ready.frozen)["norm"]
            weight = jnp.array(own + ready.cfg.norm_offset, compute_of(self.settings.precision.params).dtype, copy=True)
            given = {"norm": jax.device_put(weight, placement.shardings(specs)["norm"])}
        given = {name: part for name, part in given.items() if name in specs}
        return init_state(ready.cfg, specs, self.settings, self.optimizer, placement, given)

    def weights(self, own: Params, outer: Params, cfg: ModelConfig) -> Params:
        """Return all its weights: its own, and of its head the rows of the policy, whose `outer_weights` these are."""
        return with_given(self.new, own, head_of(outer, cfg), self.ids) if self.new.given else own

    def export(self, folder: Path, own: Params, outer: Params, cfg: ModelConfig, dtype: Any) -> None:
        """Write it in the format of `speculators`."""
        own, outer = jax.tree.map(lambda x: x.astype(dtype), (own, outer))
        weights = self.weights(own, outer, cfg)
        config = json.loads(self.model.source) | {"dtype": str(jnp.dtype(dtype))}
        config["transformer_layer_config"] |= {"vocab_size": cfg.vocab}  # other writers leave out defaults
        save_draft(folder, self.model, jax.tree.map(np.asarray, weights), config)


def run_drafter(settings: Rl, cfg: ModelConfig) -> RunDrafter:
    """Return the drafter of a recipe with speculation.kind=dspark.

    Raises:
        CheckpointError: `speculation.model` is not a DSpark drafter of this model.
        RecipeError: It cannot be trained, or does not draft so many tokens.
    """
    wanted, opened = settings.speculation, None
    if wanted.model:
        opened = open_draft(wanted.model, cfg, DSPARK)
        new = as_new(opened.draft)
    else:
        shape = DrafterSettings(kind=DSPARK, num_speculative_tokens=wanted.num_speculative_tokens)
        new = new_draft(draft_config(shape, cfg, settings.weights), cfg)
    assert isinstance(new.model, DFlash)
    _check(new.model, settings)
    drafter = DrafterSettings(kind=DSPARK, num_speculative_tokens=new.model.most)
    optimizer = replace(NEW_WEIGHTS, lr=wanted.lr)
    training = Draft(
        model=settings.model, steps=1, seed=settings.seed, precision=settings.precision, drafter=drafter,
        optimizer=optimizer, batch=1, length=settings.length or 64,
    )  # fmt: skip
    return RunDrafter(new, training, opened)


def _check(model: DFlash, settings: Rl) -> None:
    attentions = [layer.attn for layer in model.layers]
    require(
        all(isinstance(a, BlockAttention) and a.window is None and not a.causal for a in attentions),
        f"speculation.model must have layers with full attention, got {settings.speculation.model} with sliding ones",
        param="speculation.model",
    )
    count = settings.speculation.num_speculative_tokens
    require(
        not settings.speculation.is_limited or count <= model.most,
        f"speculation.num_speculative_tokens must be at most {model.most}, which {settings.speculation.model} drafts, "
        f"got {count}",
        param="speculation.num_speculative_tokens",
    )


def drafter_companion(settings: Rl) -> Companion:
    """Return the drafter's state as a part of the run's checkpoints."""

    def abstract(cfg: ModelConfig, placement: Placement) -> TrainState:
        return run_drafter(settings, cfg).abstract(cfg, placement)

    def init(ready: Ready, params: Params) -> TrainState:
        return run_drafter(settings, ready.cfg).init(ready, params, functools.partial(outer_weights, settings))

    def export(folder: Path, ready: Ready, params: Params, state: TrainState, dtype: Any) -> None:
        outer = outer_weights(settings, params, ready.frozen)
        run_drafter(settings, ready.cfg).export(folder / EXPORTED, state.params, outer, ready.cfg, dtype)

    return Companion(abstract, init, export)


def drafter_bytes(settings: Rl, cfg: ModelConfig) -> int:
    """Return the bytes of the drafter: weights and moments, and the engine's copy."""
    itemsize = compute_of(settings.precision.compute).dtype.itemsize
    return num_params(run_drafter(settings, cfg).new.trained_spec()) * (12 + itemsize)


def outer_weights(settings: Rl, params: Params, frozen: Any) -> Params:
    """Return the policy's weights outside of its layers, of which adapters have none: embedding, last norm, head."""
    if settings.lora:
        own = frozen["base"] if settings.algo == "gkd" else frozen
    else:
        own = params[POLICY] if settings.has_critic else params
    return dense({name: own[name] for name in ("embed", "norm", "head") if name in own})


class PolicyDrafter:
    """Train the drafter of a run and return its weights for the engine."""

    def __init__(self, settings: Rl, ready: Ready):
        self._settings, self._ready, self._policy = settings, ready, policy_of(settings)
        self._drafter = run_drafter(settings, ready.cfg)
        context = step_context(ready.settings, ready.placement, ready.platform)
        self._ctx = dataclasses.replace(context, remat="none", scan=False, logits=jnp.float32)
        model, drafter = self._drafter.model, self._drafter.settings.drafter
        states = States(model.taps, live=False, ids=self._drafter.ids)
        loss = DraftObjective(TrainedBlocks(model), drafter, states)
        specs = self._drafter.new.trained_spec()
        self._objective = Objective(loss.measure, columns=states.columns(ready.cfg), specs=lambda cfg: specs)
        self._see = jax.jit(self._seen)
        self._steps: dict[int, Step] = {}  # by the rows of a batch

    @property
    def model(self) -> DFlash:
        """Return the draft model."""
        return self._drafter.model

    def is_due(self, rollout: int) -> bool:
        """Return whether it is trained after this rollout: after the first, and then every `refresh` steps."""
        every, updates = self._settings.speculation.refresh, self._settings.updates_per_rollout
        return bool(every) and (rollout == 0 or rollout * updates // every > (rollout - 1) * updates // every)

    def train(self, state: TrainState, batches: Sequence[Batch]) -> tuple[TrainState, dict[str, float]]:
        """Update the drafter on the batches of a rollout; return the training state with it, and metrics."""
        own, metrics = state.companion, {}
        rows = [replace(batch, loss_mask=np.asarray(batch.loss_mask > 0, np.float32), columns={}) for batch in batches]
        seen = [self._see(state.params, self._ready.place(batch), self._ready.frozen) for batch in rows]
        for i in range(self._settings.speculation.updates):
            batch, outer = seen[i % len(seen)]
            own, metrics = self._step(batch.tokens.shape[0])(own, batch, outer)  # type: ignore[call-arg]
        found = jax.device_get(metrics)
        names = {"loss": "drafter_loss", "accepted": "drafter_accepted"}
        return replace(state, companion=own), {name: float(found[key]) for key, name in names.items()}

    def weights(self, state: TrainState) -> Params:
        """Return all weights of the drafter; of its head, the policy's rows."""
        outer = outer_weights(self._settings, state.params, self._ready.frozen)
        return self._drafter.weights(state.companion.params, outer, self._ready.cfg)

    def _seen(self, params: Params, batch: Batch, frozen: Any) -> tuple[Batch, Params]:
        """Return the batch with the policy's hidden states, and what the drafter uses of its weights."""
        settings, cfg, ctx = self._settings, self._ready.cfg, self._ctx
        base = frozen["base"] if settings.lora and settings.algo == "gkd" else frozen
        with ctx.compute.products(ctx.platform):
            own = compute_copy(params, self._ready.specs, ctx.compute)
            policy = own[POLICY] if settings.has_critic else own
            model = self._policy.params(policy, dataclasses.replace(ctx, frozen=base))
            seen = run_target(model, cfg, self.model.taps, batch, ctx)
        outer = outer_weights(settings, own, frozen)
        return replace(batch, columns={TAPS: seen.taps, FINAL: seen.final}), outer

    def _step(self, rows: int) -> Step:
        """Return the compiled update for batches of so many rows."""
        if rows not in self._steps:
            devices, length = self._ready.placement.mesh.size, self._settings.length
            parts = next(
                n for n in range(1, rows + 1)
                if rows % n == 0 and (rows // n * length <= PART_TOKENS * devices or rows // n <= devices)
            )  # fmt: skip
            settings = replace(self._drafter.settings, accumulate=parts, batch=rows, length=length)
            step = make_step(
                self._ready.cfg, settings, self._objective, self._drafter.optimizer, self._drafter.rate, self._ctx
            )
            abstract = self._drafter.abstract(self._ready.cfg, self._ready.placement)
            places = jax.tree.map(lambda leaf: leaf.sharding, abstract)
            self._steps[rows] = jax.jit(step, donate_argnums=0, out_shardings=(places, None))
        return self._steps[rows]
