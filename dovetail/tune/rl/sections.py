"""Sections of an RL recipe: sampling, engine, speculation, reference, critic and evaluation.

The loss is in tune.rl.algorithms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dovetail.core.choice import not_negative, one_of, require
from dovetail.core.errors import RecipeError, UserError
from dovetail.core.formats import KEPT
from dovetail.core.training import Eval
from dovetail.engine.options import EngineOptions
from dovetail.tune.sections import ReferenceSettings

MAX_TOP_K = 20  # the most top log-probabilities that the engine returns for a token: see engine.request.params
TOOL_CHOICES = ("", "auto", "required")
SUFFIX, DSPARK = SPECULATION_KINDS = ("suffix", "dspark")


@dataclass(frozen=True)
class Sampling:
    """Configure how completions are sampled. The policy is trained as this same distribution."""

    temperature: float = 1.0  # temperature of sampling; the policy's probabilities are computed with it too
    top_k: int = -1  # sample from the k most probable tokens; -1: from all
    top_p: float = 1.0  # of the top_k tokens, sample from the most probable ones that have this share together
    stop: tuple[str, ...] = ()  # strings that end a completion
    tool_choice: str = ""  # agents: auto or required constrain tool calls by the server's grammar; "": no grammar
    parallel_tool_calls: bool = True  # false: the grammar ends a turn after one call

    def __post_init__(self) -> None:
        one_of("tool_choice", self.tool_choice, TOOL_CHOICES)
        require(
            self.parallel_tool_calls or bool(self.tool_choice),
            "parallel_tool_calls=false requires tool_choice, which is not set: set tool_choice to auto or required",
            param="parallel_tool_calls",
        )
        require(
            self.temperature > 0,
            f"temperature must be above 0, got {self.temperature}: greedy completions of a prompt are all the same",
            param="temperature",
        )
        require(
            self.top_k == -1 or 1 <= self.top_k <= MAX_TOP_K,
            f"top_k must be from 1 to {MAX_TOP_K}, or -1 for all tokens, got {self.top_k}: the trainer stores the "
            "candidates of each token",
            param="top_k",
        )
        require(
            0 < self.top_p <= 1 and (self.top_p == 1 or self.top_k > 0),
            f"top_p must be above 0 and at most 1, and below 1 it requires top_k (at most {MAX_TOP_K}), got "
            f"top_p={self.top_p} and top_k={self.top_k}: the trainer stores the candidates of each token",
            param="top_p",
        )


@dataclass(frozen=True)
class RolloutEngine:
    """Configure the engine that samples beside the trainer, in the same process.

    A key that is also a field of engine.options.EngineOptions has the same meaning, type and range as there.
    """

    # Earlier names of keys, and options of the engine that a rollout does not leave open, each with the reason.
    RENAMED: ClassVar[Mapping[str, str]] = {
        **EngineOptions.RENAMED, "sleep": "enable_sleep_mode", "offload": "offload_optimizer", "stale": "max_staleness",
    }  # fmt: skip
    REFUSED: ClassVar[Mapping[str, str]] = {
        "dtype": "the engine computes in precision.compute, as the trainer does",
        "max_model_len": "it is max_prompt_length + max_completion_length",
        "tensor_parallel_size": "set engine.devices, the devices of the engine",
        "load_format": "the trainer publishes its weights to the engine",
        "scheduling_policy": "the completions of a rollout have no priorities",
        "lora_modules": "the engine serves the adapter that is trained: see lora",
        "max_loras": "the engine serves one adapter, the one that is trained",
        "max_lora_rank": "it is lora.r",
        "seed": "every completion has a seed that follows from the recipe's seed",
        "speculative_config": "set speculation, such as {kind: suffix}",
        "backend": "the policy is a model that Dovetail implements",
    }

    devices: int = 0  # devices for the engine alone, the last ones; 0: it shares the trainer's first device
    enable_sleep_mode: bool = False  # free the engine's weights and KV cache while the trainer computes
    offload_optimizer: bool = False  # keep the optimizer's state in host memory while the engine samples
    max_staleness: int = 0  # 1: sample a step's completions during the step before, with weights one rollout older
    max_num_seqs: int | None = None  # maximum number of sequences per step; default: all of a rollout, up to 512
    max_num_batched_tokens: int | None = None  # maximum number of tokens per step of the engine
    gpu_memory_utilization: float | None = None  # share of the memory that a separate or sleeping engine may use
    kv_cache_memory_bytes: int | None = None  # bytes of KV cache per device; default: as many as the plan leaves
    enable_prefix_caching: bool = True  # reuse the KV pages of prompts that start with the same tokens
    max_decode_steps: int | None = None  # maximum number of decode steps per dispatch
    block_size: int | None = None  # tokens per KV page
    quantization: str | None = None  # scheme that the engine rounds the published weights to, such as fp8 or int8
    kv_cache_dtype: str = "auto"  # how the engine holds keys and values: auto, fp8 or int8
    warm_up: bool | None = None  # compile every step of the engine at the start; default: yes, except on a CPU

    def __post_init__(self) -> None:
        not_negative(self, "devices")
        require(
            self.max_staleness in (0, 1),
            f"max_staleness must be 0 or 1, got {self.max_staleness}",
            param="max_staleness",
        )
        for key in ("enable_sleep_mode", "offload_optimizer"):
            require(
                not (self.max_staleness and getattr(self, key)),
                f"{key} must be false with max_staleness=1, which samples while the trainer computes: leave one out",
                param=key,
            )
        require(
            self.gpu_memory_utilization is None or self.has_own_memory,
            "gpu_memory_utilization requires devices or enable_sleep_mode, got neither: beside the trainer, set "
            "kv_cache_memory_bytes",
            param="gpu_memory_utilization",
        )
        require(
            self.quantization not in (*KEPT, "none"),
            f"quantization must be a scheme that weights are rounded to, such as fp8, got {self.quantization}",
            param="quantization",
        )
        _checked(lambda: EngineOptions(**self.options))

    @property
    def is_rounded(self) -> bool:
        """Return whether the engine samples with rounded weights or rounded keys and values."""
        return self.quantization is not None or self.kv_cache_dtype != "auto"

    @property
    def has_own_memory(self) -> bool:
        """Return whether the engine's memory is not shared with a trainer that computes."""
        return bool(self.devices) or self.enable_sleep_mode

    @property
    def options(self) -> dict[str, Any]:
        """Return the engine options that are set here."""
        found = {name: value for name, value in vars(self).items() if name in EngineOptions.__dataclass_fields__}
        return {name: value for name, value in found.items() if value is not None}


def _checked(make: Callable[[], object]) -> None:
    """Raise the UserError of engine options as a recipe's: its message starts with the key, without quotes."""
    try:
        make()
    except UserError as error:
        raise RecipeError(str(error).replace("`", ""), param=error.param) from None


@dataclass(frozen=True)
class RolloutSpeculation:
    """Configure speculative decoding of rollouts. It changes how fast completions come, never the completions."""

    kind: str = ""  # suffix: draft from the completions of the group and of past rollouts; dspark: train a drafter
    refresh: int = 8  # steps after which suffix drops completions of older policies and dspark is trained; 0: never
    num_speculative_tokens: int = 7  # most draft tokens per completion and verify step
    model: str = ""  # dspark: the drafter to start from, a folder or hub id; "": random weights
    updates: int = 16  # dspark: updates of the drafter at each refresh, on the newest rollout
    lr: float = 2e-3  # dspark: learning rate of the drafter

    def __post_init__(self) -> None:
        one_of("kind", self.kind, ("", *SPECULATION_KINDS))
        not_negative(self, "refresh")
        self._check_read()
        require(self.updates >= 1, f"updates must be at least 1, got {self.updates}", param="updates")
        require(self.lr > 0, f"lr must be above 0, got {self.lr}", param="lr")
        require(
            self.kind != DSPARK or bool(self.model) or self.refresh > 0,
            "refresh must be above 0 with kind=dspark and no model, got 0: a drafter with random weights must be "
            "trained",
            param="refresh",
        )
        if self.kind:
            _checked(lambda: EngineOptions(**self.options))

    def _check_read(self) -> None:
        """Refuse keys that this kind does not read."""
        for name, value in vars(self).items():
            is_set = name != "kind" and value != getattr(RolloutSpeculation, name)
            require(
                not is_set or bool(self.kind),
                f"kind is required where {name} is set: set it, such as kind=suffix",
                param="kind",
            )
            require(
                not is_set or name not in ("model", "updates", "lr") or self.kind == DSPARK,
                f"{name} is read with kind=dspark only, got kind={self.kind}: leave it out",
                param=name,
            )

    @property
    def is_limited(self) -> bool:
        """Return whether the draft tokens are a number of the recipe's, not the given drafter's own."""
        return not self.model or self.num_speculative_tokens != RolloutSpeculation.num_speculative_tokens

    @property
    def options(self) -> dict[str, Any]:
        """Return the engine option that these settings stand for; none without speculation.

        A drafter of kind dspark is in memory (engine.llm.LLM.from_weights), so its name is not read.
        """
        count = self.num_speculative_tokens if self.is_limited else None
        config = {"method": self.kind, "num_speculative_tokens": count}
        config |= {"model": self.model or "speculation"} if self.kind == DSPARK else {}
        return {"speculative_config": config} if self.kind else {}


@dataclass(frozen=True)
class RlReference(ReferenceSettings):
    """Configure the model that a KL term compares the policy with."""

    devices: int = 0  # devices for the reference alone, the last before the engine's; 0: it shares the trainer's

    def __post_init__(self) -> None:
        super().__post_init__()
        require(isinstance(self.model, str), "model must be policy or base, got a torch module", param="model")
        not_negative(self, "devices")
        require(
            not (self.devices and self.sync_every),
            f"sync_every must be 0 with devices={self.devices}, got {self.sync_every}: a reference with its own "
            "devices is not updated. Leave one of them out.",
            param="sync_every",
        )


@dataclass(frozen=True)
class Critic:
    """Configure the value model of algo=ppo."""

    RENAMED: ClassVar[Mapping[str, str]] = {"weight": "vf_coef", "clip": "cliprange_value", "beta": "kl_coef"}

    vf_coef: float = 0.5  # weight of the value loss beside the policy's loss
    cliprange_value: float = 0.2  # how far a value may move in one update before its loss is clipped
    gamma: float = 1.0  # discount of later rewards
    lam: float = 0.95  # lambda of generalised advantage estimation
    kl_coef: float = 0.0  # weight of each token's KL from the reference, subtracted from its reward

    def __post_init__(self) -> None:
        not_negative(self, "vf_coef", "kl_coef")
        for name in ("gamma", "lam"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"{name} must be from 0 to 1, got {value}", param=name)
        require(
            self.cliprange_value > 0,
            f"cliprange_value must be above 0, got {self.cliprange_value}",
            param="cliprange_value",
        )


@dataclass(frozen=True)
class RlEval(Eval):
    """Configure the evaluation on held-out prompts (`data.held_out`): pass@k, maj@k and the mean reward."""

    RENAMED: ClassVar[Mapping[str, str]] = {"samples": "num_generations", "right": "success_threshold"}

    every: int = 0  # steps between evaluations; 0: none
    num_generations: int = 8  # completions of each held-out prompt
    prompts: int = 64  # the most held-out prompts of one evaluation
    success_threshold: float = 1.0  # the least reward of a completion that counts as correct

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_generations", "prompts"):
            value = getattr(self, name)
            require(value >= 1, f"{name} must be at least 1, got {value}", param=name)
        require(
            self.batches == Eval.batches,
            f"batches is not read by RL, got {self.batches}: set prompts, the most held-out prompts of an evaluation",
            param="batches",
        )
        own = (self.num_generations, self.prompts, self.success_threshold)
        require(
            self.every > 0 or own == (RlEval.num_generations, RlEval.prompts, RlEval.success_threshold),
            "every must be above 0 where num_generations, prompts or success_threshold is set, got 0: set it, such as "
            "every=20",
            param="every",
        )
