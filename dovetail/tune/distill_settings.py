"""What a recipe says of learning from a teacher."""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.core.choice import not_negative, one_of, require
from dovetail.models.config import ModelConfig
from dovetail.ops.token_loss import DIVERGENCES

LIKENESSES = ("cosine", "mse")
TEACHERS = ("live", "disk")


@dataclass(frozen=True)
class Attention:
    """What the student attends to made what the teacher attends to: KL(teacher || student) of how each spreads over the
    tokens, averaged over its heads. Whole maps [T, T] are in memory for it: for short rows."""

    weight: float = 0.0  # beside the other parts of the loss; 0: none
    student: tuple[int, ...] = ()  # which layers, from 1; unless given, the last
    teacher: tuple[int, ...] = ()  # and of the teacher, one for each of the student's

    def __post_init__(self) -> None:
        not_negative(self, "weight")
        require(
            len(self.student) == len(self.teacher),
            "teacher must have a number of layers for each of student's; "
            f"got student={list(self.student)}, teacher={list(self.teacher)}",
        )
        for name in ("student", "teacher"):
            require(
                min(getattr(self, name), default=1) >= 1,
                f"{name} must be numbers of layers from 1, the first; got {list(getattr(self, name))}",
            )


@dataclass(frozen=True)
class Features(Attention):
    """The student's hidden states after these layers, projected by a weight that is learnt too, made like the
    teacher's."""

    kind: str = "cosine"  # 1 - cos, or mse

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("kind", self.kind, LIKENESSES)


@dataclass(frozen=True)
class Distillation:
    """The loss is alpha T^2 divergence(softmax(teacher / T), softmax(student / T)) + (1 - alpha) cross entropy, over
    targets alone. T^2 makes up for a temperature's effect on the gradient, which is 1 / T^2 of it."""

    kind: str = "forward"  # KL(teacher || student); reverse; or jsd, with beta between the two (GKD)
    beta: float = 0.5  # jsd: 0 is forward, 1 is reverse
    alpha: float = 0.5  # the weight of the divergence from the teacher; 1 - alpha is that of cross entropy
    temperature: float = 1.0  # of both distributions
    top_k: int = 0  # the teacher's likeliest words, over which both distributions are renormalised; 0: all words
    teacher: str = "live"  # run beside the student; or disk: its likeliest words are in the rows
    features: Features = Features()
    attention: Attention = Attention()

    def __post_init__(self) -> None:
        one_of("kind", self.kind, DIVERGENCES)
        one_of("teacher", self.teacher, TEACHERS)
        require(0 <= self.beta <= 1, f"beta must be from 0 (forward) to 1 (reverse); got {self.beta}")
        require(0 <= self.alpha <= 1, f"alpha must be a share of the loss from 0 to 1; got {self.alpha}")
        require(self.temperature > 0, f"temperature must be above 0; got {self.temperature}")
        not_negative(self, "top_k")
        require(
            self.teacher == "live" or self.top_k > 0,
            "top_k must say how many of the teacher's likeliest words the rows hold (teacher=disk), such as 32; got 0",
        )
        for name in ("features", "attention"):
            require(
                self.teacher == "live" or getattr(self, name).weight == 0,
                f"{name}.weight must be 0 with teacher=disk: the rows hold only words of it; set teacher=live",
            )


def check_teacher(cfg: ModelConfig, teacher_cfg: ModelConfig) -> None:
    require(
        not teacher_cfg.scored, "the teacher gives texts a score and has no words to teach: choose a model that writes"
    )
    require(
        cfg.vocab == teacher_cfg.vocab,
        f"the teacher must have the student's vocabulary, of {cfg.vocab:,} words; it has {teacher_cfg.vocab:,}: "
        "choose a teacher with the same tokenizer",
    )
