"""The parts of a recipe of reinforcement learning: who samples and how, and what is beside the policy."""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.core.choice import not_negative, one_of, require
from dovetail.tune.sections import ReferenceSettings

MOST_SUPPORT = 20  # likeliest words that the engine names beside each token: see engine.params
TOOL_CHOICES = ("", "auto", "required")


@dataclass(frozen=True)
class Sampling:
    """How the policy answers: from this very distribution it is trained."""

    temperature: float = 1.0  # of sampled answers; the policy is trained at it too
    top_k: int = 0  # 0: all words
    top_p: float = 1.0  # of the top_k words
    stop: tuple[str, ...] = ()  # texts at which an answer ends
    tool_choice: str = ""  # of agents: auto or required keep their calls to the server's grammar; "": nothing does
    parallel_tool_calls: bool = True  # False: the grammar ends a turn after one

    def __post_init__(self) -> None:
        one_of("tool_choice", self.tool_choice, TOOL_CHOICES)
        require(
            self.parallel_tool_calls or bool(self.tool_choice),
            "parallel_tool_calls=false is kept to by a grammar, and there is none: set tool_choice to auto or required",
        )
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
class Reference(ReferenceSettings):
    """The model that a KL term compares the policy with."""

    devices: int = 0  # of its own, the last before the engine's; 0: it shares the trainer's

    def __post_init__(self) -> None:
        super().__post_init__()
        not_negative(self, "devices")
        require(
            not (self.devices and self.sync_every),
            f"devices={self.devices} gives the reference devices of its own, which sync_every={self.sync_every} does "
            "not reach: leave one of them out.",
        )


@dataclass(frozen=True)
class Critic:
    """Of algo=ppo: a second model, with a value in the place of words."""

    weight: float = 0.5  # of its loss beside the policy's
    clip: float = 0.2  # how far a value may move in one update
    gamma: float = 1.0  # discount of later rewards
    lam: float = 0.95  # GAE's lambda
    beta: float = 0.0  # what each token's KL from the reference takes from the reward

    def __post_init__(self) -> None:
        not_negative(self, "weight", "beta")
        require(self.clip > 0, f"clip must be above 0; got {self.clip}")


@dataclass(frozen=True)
class Exam:
    """On held-out prompts (data.held_out): of each `samples` answers, every `eval.every` steps."""

    samples: int = 8  # answers to each held-out prompt
    prompts: int = 64  # the most held-out prompts of one evaluation
    right: float = 1.0  # the least reward of an answer that is right

    def __post_init__(self) -> None:
        require(self.samples >= 1 and self.prompts >= 1, "exam takes one prompt and one sample at least")
