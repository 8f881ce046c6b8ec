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
from dovetail.core.training import Optimizer, Precision
from dovetail.models.config import ModelConfig
from dovetail.models.registry import read_model
from dovetail.models.spec import kv_bytes_per_token, spec
from dovetail.tune.distill_settings import Distillation, check_teacher
from dovetail.tune.rl.algorithms import ALGORITHMS, TAUGHT, Loss
from dovetail.tune.rl.losses import policy_loss
from dovetail.tune.settings import SMALL_STEPS, SUMMED, Tuning

MOST_SUPPORT = 20  # likeliest words that the engine names beside each token: see engine.params
TRUNCATED = ("keep", "mask")
MOST_SEQUENCES = 512  # of a step of the engine
PAGE = 128  # tokens: no pages are larger
POOL_SHARE = 0.3  # of a device's memory, that the engine's pages take beside a trainer at most
STEP_BYTES = 2 * 2**30  # of the engine's largest step, about
OWN = Loss()
ON_POLICY = Distillation(kind="reverse", alpha=1.0)


@dataclass(frozen=True)
class Sampling:
    """How the policy answers: from this very distribution it is trained."""

    temperature: float = 1.0
    top_k: int = 0  # 0: all words
    top_p: float = 1.0  # of the top_k words
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(
            self.temperature > 0,
            f"temperature must be above 0: a greedy policy explores nothing; got {self.temperature}",
        )
        require(
            0 <= self.top_k <= MOST_SUPPORT,
            f"top_k must be at most {MOST_SUPPORT}, or 0 for all words: the trainer must know the words it left; got "
            f"{self.top_k}",
        )
        require(
            0 < self.top_p <= 1 and (self.top_p == 1 or self.top_k > 0),
            f"top_p must be above 0 and at most 1, and below 1 it needs top_k (at most {MOST_SUPPORT}) beside it: the "
            f"trainer must know the words it left; got top_p={self.top_p}, top_k={self.top_k}",
        )


@dataclass(frozen=True)
class Engine:
    """The engine that samples, beside the trainer in this process."""

    devices: int = 0  # of its own, the last ones; 0: it shares the trainer's first
    max_num_seqs: int = 0  # 0: all of a step's, up to 512
    kv_gib: float = 0.0  # for its KV pages on each device; 0: what the plan leaves
    sleep: bool = False  # gives its weights and pages back while the trainer computes
    offload: bool = False  # the optimizer's state waits on the host while it samples
    stale: int = 0  # 1: a step's answers are sampled while the one before is trained, by weights one update older

    def __post_init__(self) -> None:
        not_negative(self, "devices", "max_num_seqs", "kv_gib")
        require(self.stale in (0, 1), f"stale must be 0 or 1 update; got {self.stale}")
        require(
            not (self.stale and (self.sleep or self.offload)),
            "stale=1 samples while the trainer computes, so neither makes room for the other: leave out sleep and "
            "offload",
        )


@dataclass(frozen=True)
class Critic:
    """Of algo=ppo: a second model, with a value in the place of words."""

    weight: float = 0.5  # of its loss beside the policy's
    clip: float = 0.2
    gamma: float = 1.0
    lam: float = 0.95
    beta: float = 0.0  # what each token's KL from the reference takes from the reward

    def __post_init__(self) -> None:
        not_negative(self, "weight", "beta")
        require(self.clip > 0, f"clip must be above 0; got {self.clip}")


@dataclass(frozen=True)
class Exam:
    """On held-out prompts (data.held_out): of each `samples` answers, every `eval.every` steps."""

    samples: int = 8
    prompts: int = 64  # at most
    right: float = 1.0  # the least reward of an answer that is right

    def __post_init__(self) -> None:
        require(self.samples >= 1 and self.prompts >= 1, "exam takes one prompt and one sample at least")


@dataclass(frozen=True, kw_only=True)
class Rl(Tuning):
    """Learning from rewards of what the model itself writes."""

    batch: int = 0  # rows of an update; 0: as many as a step's answers may fill
    length: int = 0  # tokens of a row; 0: the longest prompt and answer
    optimizer: Optimizer = SMALL_STEPS
    precision: Precision = SUMMED
    algo: str = "grpo"
    prompts: int = 8  # of a step
    group_size: int = 8  # answers to each
    max_prompt: int = 512  # tokens; longer prompts are left out
    max_tokens: int = 256  # of an answer; of an episode in an environment, all that is written after its prompt
    updates: int = 1  # per rollout, each on its share of the answers
    truncated: str = "keep"  # what reached max_tokens: keep, or mask it out of the loss
    sampling: Sampling = Sampling()
    loss: Loss = OWN
    critic: Critic = Critic()
    engine: Engine = Engine()
    exam: Exam = Exam()
    teacher: str = ""  # of gkd and reverse_kl: a folder or a name, as `model` is
    distillation: Distillation = ON_POLICY  # of gkd: which divergence from the teacher
    rewards: tuple[Mapping[str, Any], ...] = ()  # see tune.rl.rewards
    reward_seconds: float = 60.0  # that a reward may take for a group
    environment: str = ""  # file.py:Class or package.module:Class, for agents; "": a prompt and its answer
    show_every: int = 10  # steps between tables of completions; 0: none

    def __post_init__(self) -> None:
        one_of("algo", self.algo, ALGORITHMS)
        one_of("truncated", self.truncated, TRUNCATED)
        for name in ("prompts", "group_size", "max_prompt", "max_tokens", "updates"):
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
        policy_loss(wanted.policy or "clipped", eps_low=wanted.eps_low, eps_high=wanted.eps_high)
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
        for name, default, algo in (("critic", Critic(), "ppo"), ("distillation", ON_POLICY, "gkd")):
            require(
                self.algo == algo or getattr(self, name) == default,
                f"{name} is read by algo={algo} alone; got algo={self.algo}: leave it out",
            )
        require(self.algo != "gkd" or self.loss == OWN, "loss is not read by algo=gkd, whose own is distillation")
        require(
            not self.samples.every,
            "samples.every is for other trainings: every answer of this one is in completions.jsonl; leave it out",
        )

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

    def with_steps(self, rows: int) -> Rl:
        """`rows` are prompts."""
        steps = math.ceil(self.epochs * rows / self.prompts) * self.updates
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
        return (*super().frozen, *(((read_model(self.teacher), self.held),) if self.is_taught else ()))

    def check_model(self, cfg: ModelConfig) -> None:
        super().check_model(cfg)
        if self.is_taught:
            check_teacher(cfg, read_model(self.teacher))

    @property
    def has_reference(self) -> bool:
        return bool(self.wanted.beta) or (self.has_critic and self.critic.beta > 0)

    @property
    def scores_first(self) -> bool:
        """Whether the trainer's log-probabilities before the first update are wanted: where there are several, and
        where the policy that is trained is not the very distribution that the sampler reports."""
        return self.updates > 1 or self.has_critic or self.is_reshaped

    @property
    def is_reshaped(self) -> bool:
        """Whether the policy is another distribution than the model's own, which the sampler reports."""
        return self.has_support or self.sampling.temperature != 1.0

    @property
    def has_support(self) -> bool:
        return self.sampling.top_k > 0

    @property
    def most_documents(self) -> int:
        """Of a row: each has a token of a prompt and one of an answer at least."""
        return max(1, self.length // 2)

    @property
    def spare_devices(self) -> int:
        return self.engine.devices

    @property
    def sequences(self) -> int:
        """That the engine takes at a time."""
        return self.engine.max_num_seqs or min(self.prompts * self.group_size, MOST_SEQUENCES)

    def pool_bytes(self, cfg: ModelConfig, hbm: int | None) -> int:
        """Of the engine's KV pages beside the trainer: for all its sequences at their longest, but no more than a share
        of the device."""
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
        if self.has_reference and not self.lora:
            others["reference"] = num_params(spec(cfg)) * itemsize
        if not (self.engine.sleep or self.engine.devices):
            others["engine's weights"] = num_params(spec(cfg)) * itemsize
            others["engine's pages"] = self.pool_bytes(cfg, hbm)
            others["engine's steps"] = min(STEP_BYTES, hbm // 8) if hbm else 0  # a small device takes small steps
        return others

    @property
    def rows_key(self) -> dict[str, Any]:
        keys = ("algo", "prompts", "group_size", "max_prompt", "max_tokens", "updates", "sampling")
        told = dump(self)
        return {**super().rows_key, **{key: told.get(key) for key in keys}}
