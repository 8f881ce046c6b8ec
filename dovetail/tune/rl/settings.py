"""The recipe of RL: `Rl`, with the keys that fine-tuning recipes do not have (tune.settings)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from dovetail.core.choice import not_negative, one_of, require
from dovetail.core.compute import compute_of
from dovetail.core.recipe import NOT_A_KEY, dump
from dovetail.core.spec import num_params
from dovetail.core.training import Optimizer, Precision, StepModels
from dovetail.data.settings import TuningData
from dovetail.models.config import ModelConfig
from dovetail.models.lora import lora_spec, outer_names, saved_names
from dovetail.models.spec import VISION, spec
from dovetail.plan.serve_memory import beside_trainer, rollout_pool
from dovetail.tune.rl.algorithms import (
    ALGORITHMS,
    DEFAULT_LOSS,
    DISTILLATIONS,
    LOSS_SETTINGS,
    WITHOUT_GROUPS,
    Loss,
    check_loss,
    loss_of,
    policy_loss_of,
)
from dovetail.tune.rl.sections import DSPARK, Critic, RlEval, RlReference, RolloutEngine, RolloutSpeculation, Sampling
from dovetail.tune.sections import Distillation, SampleSettings
from dovetail.tune.settings import SMALL_STEPS, SUMMED, Tuning, rows_key, with_teacher

MAX_NUM_SEQS = 512  # the most sequences of an engine's step, if the recipe does not set engine.max_num_seqs
# Keys that change neither the weights that sample nor how they sample.
REPORT_KEYS = ("checkpoint", "eval", "health", "log_every", "profile", "show_every", "speculation")
ON_POLICY = Distillation(kind="reverse", alpha=1.0)
SAMPLING, CRITIC, ENGINE, REFERENCE, EVAL = Sampling(), Critic(), RolloutEngine(), RlReference(), RlEval()
SPECULATION = RolloutSpeculation()
POLICY = "policy"  # the key of the policy in the trained tree, if there is a critic


@dataclass(frozen=True, kw_only=True)
class Rl(Tuning):
    """RL of a policy on rewards for its own completions."""

    takes_images: ClassVar[bool] = True
    # Earlier names of keys, and keys that are at the top level in TRL.
    RENAMED: ClassVar[Mapping[str, str]] = {
        "group_size": "num_generations", "max_prompt": "max_prompt_length", "max_tokens": "max_completion_length",
        "truncated": "mask_truncated_completions", "reward_seconds": "reward_timeout", "exam": "eval",
        "beta": "loss.beta", "loss_type": "loss.loss_type", "delta": "loss.delta",
        "scale_rewards": "loss.scale_rewards", "top_entropy_quantile": "loss.top_entropy_quantile",
    }  # fmt: skip

    batch: int = 0  # rows of an update; 0: as many as a step's completions may fill
    length: int = 0  # tokens of a row; 0: the longest prompt and completion
    optimizer: Optimizer = SMALL_STEPS
    precision: Precision = SUMMED
    algo: str = "grpo"  # grpo, dr_grpo, dapo, gspo, cispo, sapo, rloo, reinforce_pp, ppo, gkd or reverse_kl
    prompts: int = 8  # prompts of a rollout
    num_generations: int = 8  # completions of each prompt
    max_prompt_length: int = 512  # tokens; longer prompts are left out
    max_completion_length: int = 256  # tokens of a completion; with an environment, all tokens after the prompt
    updates: int = 1  # updates of one pass over a rollout, each on its share of the completions
    num_iterations: int = 1  # passes over a rollout; ratios are to the policy before the first
    mask_truncated_completions: bool = False  # leave completions that reached max_completion_length out of the loss
    sampling: Sampling = SAMPLING
    loss: Loss = DEFAULT_LOSS
    critic: Critic = CRITIC
    engine: RolloutEngine = ENGINE
    speculation: RolloutSpeculation = SPECULATION
    reference: RlReference = REFERENCE
    eval: RlEval = EVAL
    teacher: str = ""  # gkd and reverse_kl: the model to learn from, a folder or a name
    # the config of `teacher`: tune.policy.with_teacher_cfg reads it
    teacher_cfg: ModelConfig | None = field(default=None, compare=False, repr=False, metadata=NOT_A_KEY)
    distillation: Distillation = ON_POLICY  # gkd: the divergence from the teacher
    rewards: tuple[Mapping[str, Any], ...] = ()  # a list of kinds or functions: see docs/rl.md
    reward_timeout: float = 60.0  # seconds that a reward may take for a group
    environment: str = ""  # agents: file.py:Class or package.module:Class; "": one completion per prompt
    show_every: int = 10  # steps between tables of completions; 0: none

    def __post_init__(self) -> None:
        one_of("algo", self.algo, ALGORITHMS)
        for name in ("prompts", "num_generations", "max_prompt_length", "max_completion_length", "updates",
                     "num_iterations"):  # fmt: skip
            value = getattr(self, name)
            require(value >= 1, f"{name} must be at least 1, got {value}", param=name)
        require(
            self.prompts * self.num_generations % self.updates == 0,
            f"updates must divide the {self.prompts} x {self.num_generations} completions of a rollout, got "
            f"{self.updates}",
            param="updates",
        )
        require(
            self.num_generations > 1 or self.algo in WITHOUT_GROUPS,
            f"num_generations must be at least 2 with algo={self.algo}, which compares the completions of a prompt, "
            f"got {self.num_generations}",
            param="num_generations",
        )
        check_loss(self.algo, self.loss, self.num_generations, self.max_completion_length)
        require(
            not self.engine.is_rounded or self.loss.importance_sampling_mode != "none",
            "engine.quantization and engine.kv_cache_dtype change the sampler's probabilities, which "
            "loss.importance_sampling_mode=none does not correct: use truncate or mask",
            param="loss.importance_sampling_mode",
        )
        self._check_teacher()
        self._check_reference()
        self._check_unread()
        super().__post_init__()

    # --- checks -------------------------------------------------------------------------------------------------------

    def _check_teacher(self) -> None:
        require(
            bool(self.teacher) == self.has_teacher,
            f"teacher is required with algo={' and algo='.join(DISTILLATIONS)}, and read by no other; got "
            f"algo={self.algo}, teacher={self.teacher!r}",
            param="teacher",
        )
        require(
            self.algo != "gkd" or self.distillation.teacher == "live",
            f"distillation.teacher must be live with algo=gkd, got {self.distillation.teacher}: completions are "
            "sampled during the run",
            param="distillation.teacher",
        )

    def _check_reference(self) -> None:
        weight = "critic.kl_coef" if self.has_critic else "loss.beta"
        require(
            self.has_reference or self.reference == REFERENCE,
            f"reference requires {weight} above 0, got 0: set it, or leave reference out",
            param="reference",
        )
        self.reference.check(self.lora is not None, self.from_adapter)
        require(
            not (self.has_critic and self.reference.sync_every),
            f"reference.sync_every must be 0 with algo=ppo, got {self.reference.sync_every}: leave it out",
            param="reference.sync_every",
        )

    def _check_unread(self) -> None:
        """Refuse keys that this algorithm, or RL, does not read."""
        for name, default, algo in (("critic", CRITIC, "ppo"), ("distillation", ON_POLICY, "gkd")):
            require(
                self.algo == algo or getattr(self, name) == default,
                f"{name} is read with algo={algo} only, got algo={self.algo}: leave it out",
                param=name,
            )
        require(
            not (self.has_critic and self.from_adapter),
            f"from_adapter is not read with algo=ppo, got {self.from_adapter}: merge it first (dovetail merge) and "
            "train the merged folder",
            param="from_adapter",
        )
        given = {
            "samples": (self.samples != SampleSettings(), "completions.jsonl has every completion"),
            "data.overlong": (
                self.data.overlong != TuningData().overlong, "prompts above max_prompt_length are left out"
            ),
            "data.cache": (bool(self.data.cache), "prompts are not cached"),
            "packing": (self.packing, "the completions of an update always share rows"),
            "data.sources": (
                any(source.weight != 1 for source in self.data.sources),
                "its sources have no weight, because each prompt is drawn once per epoch",
            ),
            "tokens": (bool(self.tokens), "set steps, or epochs over the prompts"),
        }  # fmt: skip
        for key, (is_given, reason) in given.items():
            require(not is_given, f"{key} is not read by RL: {reason}. Leave it out", param=key)

    def _check_rows(self) -> None:
        not_negative(self, "batch", "length")
        require(
            self.length == 0 or self.length >= self.max_sequence_length,
            f"length must be at least max_prompt_length + max_completion_length, {self.max_sequence_length}, got "
            f"{self.length}",
            param="length",
        )

    # --- sizes --------------------------------------------------------------------------------------------------------

    @property
    def max_sequence_length(self) -> int:
        """Return the most tokens of a prompt and its completion."""
        return self.max_prompt_length + self.max_completion_length

    @property
    def updates_per_rollout(self) -> int:
        """Return the updates of all passes over a rollout."""
        return self.updates * self.num_iterations

    @property
    def total_rollouts(self) -> int:
        """Return the rollouts of the whole run."""
        return -(-self.total_steps // self.updates_per_rollout)

    @property
    def max_num_seqs(self) -> int:
        """Return the most sequences of a step of the engine."""
        return self.engine.max_num_seqs or min(self.prompts * self.num_generations, MAX_NUM_SEQS)

    @property
    def most_documents(self) -> int:
        """Return the most completions of a row: each has at least one token of a prompt and one of a completion."""
        return max(1, self.length // 2)

    def with_steps(self, rows: int) -> Rl:
        """Return the settings with epochs converted to steps; an epoch has so many prompts."""
        steps = math.ceil(self.epochs * rows / self.prompts) * self.updates_per_rollout
        return replace(self, epochs=0.0, steps=steps) if self.epochs else self

    def filled(self, devices: int = 1) -> Rl:
        """Return the settings with `length` and `batch` set: rows for the longest completions, equally many per device.

        Raises:
            RecipeError: `batch` is set, and too small.
        """
        length = self.length or -(-self.max_sequence_length // 64) * 64
        completions = self.prompts * self.num_generations // self.updates
        rows = -(-completions // (length // self.max_sequence_length))
        require(
            self.batch == 0 or self.batch >= rows,
            f"batch must be 0 or at least {rows} rows, which the {completions} completions of an update may fill, got "
            f"{self.batch}",
            param="batch",
        )
        return replace(self, length=length, batch=self.batch or -(-rows // devices) * devices)

    # --- what the algorithm needs -------------------------------------------------------------------------------------

    @property
    def resolved_loss(self) -> Loss:
        """Return the algorithm's loss with the recipe's changes."""
        return loss_of(self.algo, self.loss)

    @property
    def effective(self) -> Rl:
        """Return the settings with every key of `loss` filled in."""
        if self.algo == "gkd":  # which reads distillation in place of loss
            return self
        loss = self.resolved_loss
        made = policy_loss_of(loss)
        own = {name: getattr(made, name) for name in LOSS_SETTINGS if hasattr(made, name)}
        return replace(self, loss=replace(loss, **own))

    @property
    def has_critic(self) -> bool:
        """Return whether a value model is trained beside the policy."""
        return self.algo == "ppo"

    @property
    def has_teacher(self) -> bool:
        """Return whether a teacher takes the place of rewards."""
        return self.algo in DISTILLATIONS

    @property
    def has_group_advantages(self) -> bool:
        """Return whether advantages are computed from the rewards of groups."""
        return not (self.has_critic or self.has_teacher)

    @property
    def has_reference(self) -> bool:
        """Return whether a reference model is run."""
        return bool(self.resolved_loss.beta) or (self.has_critic and self.critic.kl_coef > 0)

    @property
    def kept_reference(self) -> RlReference | None:
        """Return the settings of a reference that is part of the training state; None where it is not."""
        return self.reference.kept(self.from_adapter) if self.has_reference else None

    @property
    def scores_old_policy(self) -> bool:
        """Return whether the trainer computes log-probabilities before the first update of a rollout.

        It does if a rollout has several updates, or if the sampler reports another distribution than the policy's.
        """
        return self.updates_per_rollout > 1 or self.has_critic or self.reshapes_logits or self.selects_tokens

    @property
    def selects_tokens(self) -> bool:
        """Return whether only the tokens with the highest entropy are trained."""
        return self.resolved_loss.top_entropy_quantile < 1

    @property
    def reshapes_logits(self) -> bool:
        """Return whether the policy is another distribution than the model's, which the sampler reports."""
        return self.has_top_k or self.sampling.temperature != 1.0

    @property
    def has_top_k(self) -> bool:
        """Return whether the candidates of each token are stored."""
        return self.sampling.top_k > 0

    @property
    def has_grammar(self) -> bool:
        """Return whether the trainer masks the tokens that a grammar did not allow; gkd compares all tokens."""
        return bool(self.sampling.tool_choice) and self.algo != "gkd"

    # --- memory and devices -------------------------------------------------------------------------------------------

    @property
    def step_models(self) -> StepModels:
        """Return which models the trainer holds: also a reference in its state, and a teacher."""
        found = replace(super().step_models, reference=self.kept_reference)
        return with_teacher(found, self.teacher_cfg, self.held) if self.has_teacher else found

    @property
    def spare_devices(self) -> int:
        """Return how many of the last devices belong to the engine and the reference."""
        return self.engine.devices + self.reference.devices

    # --- keys of a resume ---------------------------------------------------------------------------------------------

    @property
    def rollouts_key(self) -> dict[str, Any]:
        """Return the keys that determine a rollout: the journal is read only if they are the same."""
        return {key: value for key, value in dump(self).items() if key not in REPORT_KEYS}


def rl_rows_key(settings: Rl) -> dict[str, Any]:
    """Return the keys that determine the rows of a batch: a run resumes only if they are the same."""
    keys = ("algo", "prompts", "num_generations", "max_prompt_length", "max_completion_length", "updates",
            "num_iterations", "sampling")  # fmt: skip
    given = dump(settings)
    return {**rows_key(settings), **{key: given.get(key) for key in keys}}


def check_rl_model(settings: Rl, cfg: ModelConfig) -> None:
    """Refuse adapters that the engine does not serve."""
    require(
        not settings.lora or not (outer_names(cfg, settings.lora) or saved_names(cfg, settings.lora)),
        "lora.target_modules and lora.modules_to_save must not name embed_tokens or lm_head in RL: the engine does "
        "not serve such an adapter while it is trained. Leave them out",
        param="lora.target_modules",
    )
    require(
        not settings.lora or VISION not in lora_spec(cfg, settings.lora),
        "lora.target_modules must not name the vision tower or its projector in RL: the engine serves adapters of the "
        "language model alone. Leave them out, or train all weights",
        param="lora.target_modules",
    )
    require(
        not settings.image_patches or settings.speculation.kind != DSPARK,
        f"speculation.kind={DSPARK} is not supported with images, which its drafter is not trained on: leave "
        "speculation out",
        param="speculation.kind",
    )


def beside_policy(settings: Rl, cfg: ModelConfig, hbm: int | None) -> dict[str, int]:
    """Return bytes per device of the critic, the reference and the engine, where they share the trainer's."""
    others: dict[str, int] = {}
    params, itemsize = num_params(spec(cfg)), compute_of(settings.precision.compute).dtype.itemsize
    if settings.has_critic:  # the plan counts one model: weights, moments, gradients and compute copy once more
        others["critic"] = params * (16 + itemsize) if not settings.lora else 0
    if settings.has_reference and not (settings.lora or settings.reference.devices or settings.kept_reference):
        others["reference"] = params * itemsize
    if not settings.engine.has_own_memory:
        others |= beside_trainer(cfg, itemsize, kv_cache_bytes(settings, cfg, hbm), hbm)
    return others


def kv_cache_bytes(settings: Rl, cfg: ModelConfig, hbm: int | None) -> int:
    """Return the bytes of the engine's KV cache on a device that it shares with the trainer."""
    if settings.engine.kv_cache_memory_bytes:
        return settings.engine.kv_cache_memory_bytes
    itemsize = compute_of(settings.precision.compute).dtype.itemsize
    return rollout_pool(cfg, settings.max_num_seqs, settings.max_sequence_length, itemsize, hbm)
