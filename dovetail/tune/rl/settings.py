"""What a recipe of reinforcement learning says besides what every fine-tuning's does (tune.settings)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dovetail.core.choice import not_negative, one_of, require
from dovetail.core.compute import compute_of
from dovetail.core.recipe import dump
from dovetail.core.spec import num_params
from dovetail.core.training import Eval, Optimizer, Precision
from dovetail.data.settings import TuningData
from dovetail.io.outline import config_of
from dovetail.models.config import ModelConfig
from dovetail.models.lora import outer_names, saved_names
from dovetail.models.spec import kv_bytes_per_token, spec
from dovetail.tune.rl.advantages import SCALED
from dovetail.tune.rl.algorithms import ALGORITHMS, LOSS_SETTINGS, TAUGHT, Loss, loss_of
from dovetail.tune.rl.parts import Critic, Engine, Exam, Reference, Sampling
from dovetail.tune.sections import Distillation, SampleSettings, check_teacher
from dovetail.tune.settings import SMALL_STEPS, SUMMED, Tuning

TRUNCATED = ("keep", "mask")
MOST_SEQUENCES = 512  # of a step of the engine
PAGE = 128  # tokens: no pages are larger
POOL_SHARE = 0.3  # of a device's memory, that the engine's pages take beside a trainer at most
STEP_BYTES = 2 * 2**30  # of the engine's largest step, about
SHOWN = ("checkpoint", "eval", "exam", "health", "log_every", "profile", "show_every")  # no matter to rollouts
OWN = Loss()
ON_POLICY = Distillation(kind="reverse", alpha=1.0)
SAMPLING, CRITIC, ENGINE, REFERENCE, EXAM = Sampling(), Critic(), Engine(), Reference(), Exam()


@dataclass(frozen=True, kw_only=True)
class Rl(Tuning):
    """Learning from rewards of what the model itself writes."""

    batch: int = 0  # rows of an update; 0: as many as a step's answers may fill
    length: int = 0  # tokens of a row; 0: the longest prompt and answer
    optimizer: Optimizer = SMALL_STEPS
    precision: Precision = SUMMED
    algo: str = "grpo"  # grpo, dr_grpo, dapo, gspo, cispo, sapo, rloo, reinforce_pp, ppo, gkd or reverse_kl
    prompts: int = 8  # prompts of a step
    group_size: int = 8  # answers to each prompt
    max_prompt: int = 512  # tokens; longer prompts are left out
    max_tokens: int = 256  # of an answer; of an episode in an environment, all that is written after its prompt
    updates: int = 1  # of a pass over a rollout, each on its share of the answers
    num_iterations: int = 1  # passes over a rollout; ratios are to the policy before the first
    truncated: str = "keep"  # what reached max_tokens: keep, or mask it out of the loss
    sampling: Sampling = SAMPLING
    loss: Loss = OWN
    critic: Critic = CRITIC
    engine: Engine = ENGINE
    reference: Reference = REFERENCE
    exam: Exam = EXAM
    teacher: str = ""  # of gkd and reverse_kl: a folder or a name, as `model` is
    distillation: Distillation = ON_POLICY  # of gkd: which divergence from the teacher
    rewards: tuple[Mapping[str, Any], ...] = ()  # what is paid for: a list of kinds or functions, see docs/rl.md
    reward_seconds: float = 60.0  # that a reward may take for a group
    environment: str = ""  # file.py:Class or package.module:Class, for agents; "": a prompt and its answer
    show_every: int = 10  # steps between tables of completions; 0: none

    def __post_init__(self) -> None:
        one_of("algo", self.algo, ALGORITHMS)
        one_of("truncated", self.truncated, TRUNCATED)
        for name in ("prompts", "group_size", "max_prompt", "max_tokens", "updates", "num_iterations"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1; got {getattr(self, name)}")
        require(
            self.prompts * self.group_size % self.updates == 0,
            f"updates must divide the {self.prompts} x {self.group_size} answers of a step; got {self.updates}",
        )
        require(
            self.group_size > 1 or self.algo in ("ppo", "reinforce_pp", *TAUGHT),
            f"group_size must be 2 or more: {self.algo} judges an answer by the others to its prompt; got "
            f"{self.group_size}",
        )
        self._check_loss()
        self._check_read()
        super().__post_init__()

    def _check_loss(self) -> None:
        wanted = self.wanted
        loss_of(wanted)
        require(
            wanted.scale_rewards is None or wanted.advantage in SCALED,
            f"loss.scale_rewards={wanted.scale_rewards} requires the advantage {' or '.join(SCALED)}, and "
            f"algo={self.algo} has {wanted.advantage or 'none'}: leave it out",
        )
        require(
            bool(self.teacher) == self.is_taught,
            f"teacher is for algo={' and '.join(TAUGHT)}, which need one; got algo={self.algo}, "
            f"teacher={self.teacher!r}",
        )
        require(
            self.algo != "gkd" or self.distillation.teacher == "live",
            "distillation.teacher must be live: nobody knows beforehand what the student will write",
        )
        require(
            self.judges_groups or self.loss.advantage is None,
            f"loss.advantage={self.loss.advantage} is for groups, and algo={self.algo} has none: leave it out",
        )
        require(
            not wanted.overlong or wanted.overlong <= self.max_tokens,
            f"loss.overlong must be at most max_tokens, {self.max_tokens}; got {wanted.overlong}",
        )
        require(
            not wanted.dynamic or self.group_size > 1, "loss.dynamic compares the answers of a group: set group_size"
        )

    def _check_read(self) -> None:
        """Nothing may be set that this algorithm does not read."""
        require(
            self.has_reference or self.reference == REFERENCE,
            "reference is used by a KL term only: set "
            f"{'critic.beta' if self.has_critic else 'loss.beta'} above 0, or leave reference out.",
        )
        self.reference.check(self.lora is not None, self.from_adapter)
        require(
            not (self.has_critic and self.reference.sync_every),
            f"reference.sync_every={self.reference.sync_every} does not work with algo=ppo: leave it out.",
        )
        for name, default, algo in (("critic", CRITIC, "ppo"), ("distillation", ON_POLICY, "gkd")):
            require(
                self.algo == algo or getattr(self, name) == default,
                f"{name} is read by algo={algo} alone; got algo={self.algo}: leave it out",
            )
        require(
            not (self.has_critic and self.from_adapter),
            f"from_adapter={self.from_adapter} is not read where a critic learns beside it (algo=ppo): merge it first "
            "(dovetail merge), and begin from that folder",
        )
        require(self.algo != "gkd" or self.loss == OWN, "loss is not read by algo=gkd, whose own is distillation")
        require(
            not (self.algo == "reverse_kl" and (self.loss.dynamic or self.loss.overlong)),
            "loss.dynamic and loss.overlong are about rewards, and algo=reverse_kl has a teacher: leave them out",
        )
        loss = self.loss
        require(
            loss.kl == OWN.kl or bool(self.wanted.beta),
            f"loss.kl={loss.kl} is what loss.beta weighs, and that is 0: set it, or leave loss.kl out",
        )
        require(
            loss.cap == OWN.cap or loss.correction != "none",
            f"loss.cap={loss.cap} is of a correction, and loss.correction=none has none: leave it out",
        )
        require(
            self.exam == EXAM or self.eval.every > 0,
            "exam is held every eval.every steps, and that is 0: set it, such as eval.every=20, or leave exam out",
        )
        self._check_others()

    def _check_others(self) -> None:
        """Nor what other trainings read."""
        sources, other = self.data.sources, "is for other trainings"
        require(
            self.samples == SampleSettings(),
            f"samples {other}: every answer of this one is in completions.jsonl; leave it out",
        )
        require(
            self.data.overlong == TuningData().overlong,
            f"data.overlong={self.data.overlong} {other}: prompts longer than max_prompt are left out; leave it out",
        )
        require(not self.data.cache, f"data.cache {other}: prompts are not cached; leave it out")
        require(not self.packing, f"packing=true {other}: the answers of an update always share rows; leave it out")
        require(
            all(source.weight == 1 for source in sources),
            f"the weight of one of data.sources {other}: each prompt is given once per epoch; leave it out",
        )
        require(
            self.eval.batches == Eval().batches,
            f"eval.batches={self.eval.batches} {other}: exam.prompts says how many held-out prompts are answered",
        )
        require(not self.tokens, f"tokens={self.tokens:,} {other}: set steps, or epochs over the prompts")

    def _check_rows(self) -> None:
        """0 is filled in (`filled`)."""
        not_negative(self, "batch", "length")
        require(
            self.length == 0 or self.length >= self.longest,
            f"length must hold the longest prompt and answer, {self.longest} tokens; got {self.length}",
        )

    @property
    def longest(self) -> int:
        return self.max_prompt + self.max_tokens

    @property
    def per_update(self) -> int:
        """Answers."""
        return self.prompts * self.group_size // self.updates

    @property
    def updates_per_rollout(self) -> int:
        return self.updates * self.num_iterations

    @property
    def rollouts(self) -> int:
        """Of the whole run."""
        return -(-self.total_steps // self.updates_per_rollout)

    def with_steps(self, rows: int) -> Rl:
        """`rows` are prompts."""
        steps = math.ceil(self.epochs * rows / self.prompts) * self.updates_per_rollout
        return replace(self, epochs=0.0, steps=steps) if self.epochs else self

    def filled(self, devices: int = 1) -> Rl:
        """With rows for the longest answers there may be, as many on each device."""
        least = self._least_rows
        require(
            self.batch == 0 or self.batch >= least,
            f"batch must be at least {least} rows, or 0: the longest {self.per_update} answers of an update may "
            f"fill so many; got {self.batch}",
        )
        batch = self.batch or -(-least // devices) * devices
        return replace(self, length=self._row, batch=batch)

    @property
    def _row(self) -> int:
        """Tokens."""
        return self.length or -(-self.longest // 64) * 64

    @property
    def _least_rows(self) -> int:
        """For the longest answers that an update may have."""
        return -(-self.per_update // (self._row // self.longest))

    @property
    def wanted(self) -> Loss:
        """The algorithm's, with what the recipe changes."""
        own = {name: value for name, value in vars(self.loss).items() if value is not None}
        return replace(ALGORITHMS[self.algo], **own)

    @property
    def effective(self) -> Rl:
        if self.algo == "gkd":  # which reads distillation in place of loss
            return self
        wanted = self.wanted
        made = loss_of(wanted)
        own = {name: getattr(made, name) for name in LOSS_SETTINGS if hasattr(made, name)}
        return replace(self, loss=replace(wanted, **own))

    @property
    def has_critic(self) -> bool:
        return self.algo == "ppo"

    @property
    def is_taught(self) -> bool:
        return self.algo in TAUGHT

    @property
    def judges_groups(self) -> bool:
        """Whether an answer's advantage comes from its group's rewards."""
        return not (self.has_critic or self.is_taught)

    @property
    def frozen(self) -> tuple[tuple[Any, str], ...]:
        return (*super().frozen, *(((config_of(self.teacher), self.held),) if self.is_taught else ()))

    def check_model(self, cfg: ModelConfig) -> None:
        super().check_model(cfg)
        require(
            not self.lora or not (outer_names(cfg, self.lora) or saved_names(cfg, self.lora)),
            "lora.target_modules and lora.modules_to_save must not name embed_tokens or lm_head in RL: the engine does "
            "not serve such an adapter while it is trained. Leave them out",
        )
        if self.is_taught:
            check_teacher(cfg, config_of(self.teacher))

    @property
    def has_reference(self) -> bool:
        return bool(self.wanted.beta) or (self.has_critic and self.critic.beta > 0)

    @property
    def kept_reference(self) -> Reference | None:
        return self.reference.kept(self.from_adapter) if self.has_reference else None

    @property
    def scores_first(self) -> bool:
        """Whether the trainer's log-probabilities before the first update are wanted: where there are several, and
        where the policy that is trained is not the very distribution that the sampler reports.
        """
        return self.updates_per_rollout > 1 or self.has_critic or self.is_reshaped or self.selects_tokens

    @property
    def selects_tokens(self) -> bool:
        """Whether only the tokens with the highest entropy are trained."""
        return self.wanted.top_entropy_quantile < 1

    @property
    def is_reshaped(self) -> bool:
        """Whether the policy is another distribution than the model's own (among the words that a grammar
        allows), which the sampler reports.
        """
        return self.has_support or self.sampling.temperature != 1.0

    @property
    def has_support(self) -> bool:
        return self.sampling.top_k > 0

    @property
    def has_masks(self) -> bool:
        """Whether the trainer must know the words that a grammar allowed: a teacher's divergence is of all words."""
        return bool(self.sampling.tool_choice) and self.algo != "gkd"

    @property
    def most_documents(self) -> int:
        """Of a row: each has a token of a prompt and one of an answer at least."""
        return max(1, self.length // 2)

    @property
    def spare_devices(self) -> int:
        return self.engine.devices + self.reference.devices

    @property
    def sequences(self) -> int:
        """That the engine takes at a time."""
        return self.engine.max_num_seqs or min(self.prompts * self.group_size, MOST_SEQUENCES)

    def pool_bytes(self, cfg: ModelConfig, hbm: int | None) -> int:
        """Of the engine's KV pages beside the trainer: for all its sequences at their longest, but no more than a share
        of the device.
        """
        if self.engine.kv_gib:
            return int(self.engine.kv_gib * 2**30)
        itemsize = compute_of(self.precision.compute).dtype.itemsize
        wanted = self.sequences * (-(-(self.longest + 1) // PAGE) * PAGE) * kv_bytes_per_token(cfg, itemsize)
        return min(wanted, int(hbm * POOL_SHARE)) if hbm else wanted

    def beside(self, cfg: ModelConfig, hbm: int | None) -> dict[str, int]:
        others = {}
        itemsize = compute_of(self.precision.compute).dtype.itemsize
        if self.has_critic:  # what the plan counts is one model: its masters, moments, gradients and copy once more
            others["critic"] = num_params(spec(cfg)) * (16 + itemsize) if not self.lora else 0
        if self.has_reference and not (self.lora or self.reference.devices or self.kept_reference):
            others["reference"] = num_params(spec(cfg)) * itemsize
        if not (self.engine.sleep or self.engine.devices):
            others["engine's weights"] = num_params(spec(cfg)) * itemsize
            others["engine's pages"] = self.pool_bytes(cfg, hbm)
            others["engine's steps"] = min(STEP_BYTES, hbm // 8) if hbm else 0  # a small device takes small steps
        return others

    @property
    def rollouts_key(self) -> dict[str, Any]:
        """What decides the weights that sample, and how: rollouts in the journal are of use where it is the same."""
        told = dump(self)
        return {key: value for key, value in told.items() if key not in SHOWN}

    @property
    def rows_key(self) -> dict[str, Any]:
        keys = ("algo", "prompts", "group_size", "max_prompt", "max_tokens", "updates", "num_iterations", "sampling")
        told = dump(self)
        return {**super().rows_key, **{key: told.get(key) for key in keys}}
