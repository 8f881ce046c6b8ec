"""What every fine-tuning recipe says besides what every training's does (core.training)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from dovetail.core.choice import not_negative, one_of, require
from dovetail.core.compute import compute_of
from dovetail.core.recipe import dump
from dovetail.core.training import Optimizer, Precision, Training
from dovetail.data.settings import TrainedTokens, TuningData
from dovetail.io.outline import config_of
from dovetail.models.config import ModelConfig
from dovetail.models.frozen import HELD, SCHEMES
from dovetail.models.lora import OUTER, Lora, lora_spec, outer_names
from dovetail.tune.sections import Distillation, Preference, ReferenceSettings, RewardLoss, check_teacher

OPTIMIZER = Optimizer(lr=1e-4, beta2=0.999, weight_decay=0.0)
EPOCHS = 3.0  # unless a recipe says how long to train; as transformers' num_train_epochs
SUMMED = Precision(logits="f32")  # log-probabilities are summed over completions, and bf16's errors with them
SMALL_STEPS, SCORED = replace(OPTIMIZER, lr=1e-6), replace(OPTIMIZER, lr=1e-5)
DATA, PREFERENCE, REWARD, DISTILLATION = TuningData(), Preference(), RewardLoss(), Distillation()
REFERENCE = ReferenceSettings()


@dataclass(frozen=True)
class SampleSettings:
    """What the model says to a few prompts as it learns, for the report."""

    every: int = 0  # steps between samples of what the model answers; 0: never
    prompts: tuple[str, ...] = ()  # what to ask: as a user's message, where the tokenizer has a chat template
    tokens: int = 64  # the most tokens of an answer

    def __post_init__(self) -> None:
        not_negative(self, "every")
        require(self.tokens >= 1, f"tokens must be at least 1; got {self.tokens}")
        require(
            bool(self.every) == bool(self.prompts),
            "every and prompts belong together: what to ask, and every how many steps; "
            f"got every={self.every}, prompts={list(self.prompts)}",
        )


@dataclass(frozen=True, kw_only=True)
class Tuning(Training):
    ALTERNATIVES: ClassVar = (("steps", "tokens", "epochs"),)

    epochs: float = 0.0  # in place of steps: passes over the data; 3 where neither steps nor tokens are given
    batch: int = 8  # examples of one step, or pairs; with packing, rows
    length: int = 1024  # the most tokens of an example; with packing, tokens of a row
    packing: bool = False  # several examples share a row of `length` tokens
    optimizer: Optimizer = OPTIMIZER
    data: TuningData = DATA
    lora: Lora | None = None  # adapters are trained, and the weights stay as they are
    quantization: str = ""  # storage of the frozen weights: bf16, f32, int8 or nf4 (QLoRA); default: as compute
    from_adapter: str = ""  # the folder of an adapter to train further, in place of a new one
    samples: SampleSettings = SampleSettings()

    def __post_init__(self) -> None:
        if not (self.steps or self.tokens or self.epochs):
            object.__setattr__(self, "epochs", EPOCHS)
        super().__post_init__()
        one_of("quantization", self.quantization, ("", *HELD))
        require(
            self.lora is not None or self.quantization not in SCHEMES,
            f"quantization={self.quantization} requires lora, because without it all weights are trained: set "
            "lora.r=16, or leave quantization out",
        )
        require(
            self.lora is not None or not self.from_adapter,
            f"from_adapter={self.from_adapter} are adapters to go on with, and lora is not set: set lora.r",
        )
        require(
            self.eval.every == 0 or self.data.held_out > 0,
            "eval.every measures the held-out loss, and nothing is held out: set data.held_out, such as 0.01",
        )

    def with_steps(self, rows: int) -> Self:
        """The same with its epochs counted in steps. One epoch is so many rows, and no batch holds rows of two."""
        if not self.epochs:
            return self
        whole, rest = divmod(self.epochs, 1)
        steps = int(whole) * -(-rows // self.batch) + math.ceil(rest * rows / self.batch)
        return replace(self, epochs=0.0, steps=steps)

    @property
    def weights(self) -> str:
        return self.init or self.model

    @property
    def examples(self) -> str:
        """The kind that the rows are made of: see data.open_examples."""
        return "sft"

    @property
    def trained_tokens(self) -> TrainedTokens:
        """Which of an example's tokens count."""
        return TrainedTokens()

    @property
    def columns(self) -> tuple[str, ...]:
        """What the records are to bring besides: see data.open_examples."""
        return ()

    @property
    def exports_at_end(self) -> bool:
        return True

    @property
    def adapter(self) -> Any:
        return self.lora

    @property
    def held(self) -> str:
        """How weights that are not trained are held."""
        return self.quantization or ("bf16" if self.precision.compute == "bf16" else "f32")

    @property
    def frozen(self) -> tuple[tuple[Any, str], ...]:
        return ((None, self.held),) if self.lora else ()

    def beside(self, cfg: ModelConfig, hbm: int | None) -> dict[str, int]:
        """An adapted embedding or head is added to its base in every step: the sum and its gradient."""
        names = outer_names(cfg, self.lora) if self.lora else []
        itemsize = compute_of(self.precision.compute).dtype.itemsize
        return {f"{OUTER[name]} with its adapter": cfg.vocab * cfg.dim * (itemsize + 4) for name in names}

    @property
    def rows_key(self) -> dict[str, Any]:
        return {"data": dump(self.data), "packing": self.packing, **super().rows_key}

    def check_model(self, cfg: ModelConfig) -> None:
        super().check_model(cfg)
        if self.lora:
            lora_spec(cfg, self.lora)


@dataclass(frozen=True, kw_only=True)
class Sft(Tuning):
    """Supervised fine-tuning: the assistant's tokens alone count, unless told otherwise."""

    assistant_only_loss: bool = True  # false: every token of a conversation is trained
    completion_only_loss: bool = True  # false: the prompt is trained as the completion is

    @property
    def trained_tokens(self) -> TrainedTokens:
        return TrainedTokens(self.assistant_only_loss, self.completion_only_loss)

    @property
    def rows_key(self) -> dict[str, Any]:
        return {**super().rows_key, "trained": list(self.trained_tokens)}


@dataclass(frozen=True, kw_only=True)
class Dpo(Tuning):
    """Learning from preferences, by DPO's loss or one of its relatives."""

    optimizer: Optimizer = SMALL_STEPS
    precision: Precision = SUMMED
    preference: Preference = PREFERENCE
    reference: ReferenceSettings = REFERENCE

    def __post_init__(self) -> None:
        super().__post_init__()
        source, reference = self.preference.source, self.reference
        require(
            source != "none" or reference == REFERENCE,
            f"reference is not used by preference.loss_type={self.preference.told}, which has none: leave it out.",
        )
        require(
            source == "live" or not reference.sync_every,
            f"reference.sync_every={reference.sync_every} changes the reference, which preference.reference=disk "
            "computes once: set preference.reference=live.",
        )
        reference.check(self.lora is not None, self.from_adapter)

    @property
    def kept_reference(self) -> ReferenceSettings | None:
        return self.reference.kept(self.from_adapter) if self.preference.source == "live" else None

    @property
    def frozen(self) -> tuple[tuple[Any, str], ...]:
        """A new adapter's base is its reference too: no second copy."""
        beside = self.preference.source == "live" and not self.kept_reference
        return ((None, self.held),) if self.lora or beside else ()

    @property
    def examples(self) -> str:
        return "unpaired" if self.preference.is_kto else "preference"

    @property
    def most_documents(self) -> int:
        """Of a row: one that is to be judged has two tokens at least, and they come in pairs."""
        return self.length // 4 * 2


@dataclass(frozen=True, kw_only=True)
class Reward(Tuning):
    """A reward model: a score of texts, learnt from pairs of which one is better."""

    optimizer: Optimizer = SCORED
    reward: RewardLoss = REWARD

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not self.samples.every,
            "samples.every asks the model for answers, and a reward model gives scores: leave samples out",
        )

    @property
    def examples(self) -> str:
        return "preference"

    @property
    def columns(self) -> tuple[str, ...]:
        return ("margin",) if self.reward.margin else ()

    @property
    def scores(self) -> bool:
        return True

    @property
    def most_documents(self) -> int:
        """Of a row: as Dpo's."""
        return self.length // 4 * 2


@dataclass(frozen=True, kw_only=True)
class Distill(Tuning):
    """Learning from a teacher's distribution of the next word."""

    teacher: str  # the model to learn from: a folder, a name or a hub id
    distillation: Distillation = DISTILLATION

    @property
    def frozen(self) -> tuple[tuple[Any, str], ...]:
        live = ((config_of(self.teacher), self.held),) if self.distillation.teacher == "live" else ()
        return (*super().frozen, *live)

    def check_model(self, cfg: ModelConfig) -> None:
        super().check_model(cfg)
        check_teacher(cfg, config_of(self.teacher))
