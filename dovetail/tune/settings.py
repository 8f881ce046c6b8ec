"""Recipes of fine-tuning: `Sft`, `Dpo`, `Reward`, `Distill` and `Draft`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from dovetail.core.choice import one_of, require
from dovetail.core.formats import ROUNDED
from dovetail.core.recipe import NOT_A_KEY, dump
from dovetail.core.training import Eval, Optimizer, Precision, StepModels, TorchModel, Training
from dovetail.data.settings import TrainedTokens, TuningData
from dovetail.models.config import ModelConfig
from dovetail.models.frozen import HELD
from dovetail.models.lora import Lora
from dovetail.train.settings import shape_key
from dovetail.tune.draft_sections import AnswerSettings, DrafterSettings
from dovetail.tune.sections import (
    Distillation,
    Preference,
    ReferenceSettings,
    RewardLoss,
    SampleSettings,
)

OPTIMIZER = Optimizer(lr=1e-4, beta2=0.999, weight_decay=0.0)
DRAFT_EPOCHS = 20.0
EPOCHS = 3.0  # where a recipe does not say how long to train; as transformers' num_train_epochs
SUMMED = Precision(logits="f32")  # log-probabilities are summed over completions, and bf16's errors with them
SMALL_STEPS, SCORED = replace(OPTIMIZER, lr=1e-6), replace(OPTIMIZER, lr=1e-5)
DATA, PREFERENCE, REWARD, DISTILLATION = TuningData(), Preference(), RewardLoss(), Distillation()
REFERENCE, SAMPLES = ReferenceSettings(), SampleSettings()
NEW_WEIGHTS, SELDOM = replace(OPTIMIZER, lr=2e-3, beta2=0.95), Eval(every=100, batches=2)
APART = TuningData(held_out=0.1)
DRAFTER, ANSWERS = DrafterSettings(), AnswerSettings()


@dataclass(frozen=True, kw_only=True)
class Tuning(Training):
    """The keys that all recipes of fine-tuning share, besides those of `Training`."""

    ALTERNATIVES: ClassVar = (("steps", "tokens", "epochs"),)
    exports_at_end: ClassVar[bool] = True
    starts_from_model: ClassVar[bool] = True
    takes_images: ClassVar[bool] = False

    epochs: float = 0.0  # in place of steps: passes over the data; 3 where neither steps nor tokens are given
    batch: int = 8  # examples (or pairs) of one step; with packing, rows
    length: int = 1024  # the most tokens of an example; with packing, tokens of a row
    packing: bool = False  # several examples share a row of `length` tokens
    optimizer: Optimizer = OPTIMIZER
    data: TuningData = DATA
    lora: Lora | None = None  # train adapters; the weights below them are frozen
    quantization: str = ""  # storage of the frozen weights: bf16, f32, int8, nf4 (QLoRA); default: as compute
    from_adapter: str = ""  # the folder of an adapter to train further, in place of a new one
    samples: SampleSettings = SAMPLES
    # the most patches of an image's item in the data, 0 without images: filled in when the data is read
    image_patches: int = field(default=0, compare=False, repr=False, metadata=NOT_A_KEY)
    image_items: int = field(default=0, compare=False, repr=False, metadata=NOT_A_KEY)  # the most items of a row

    def __post_init__(self) -> None:
        if not (self.steps or self.tokens or self.epochs):
            object.__setattr__(self, "epochs", EPOCHS)
        super().__post_init__()
        one_of("quantization", self.quantization, ("", *HELD))
        if not isinstance(self.model, str):
            for key, is_set in (("lora", self.lora), ("samples", self.samples.every)):
                require(not is_set, f"{key} must not be set for a torch module: leave it out", param=key)
        require(
            self.lora is not None or self.quantization not in ROUNDED,
            f"quantization={self.quantization} requires lora, because without it all weights are trained: set "
            "lora.r=16, or leave quantization out",
            param="quantization",
        )
        require(
            self.lora is not None or not self.from_adapter,
            f"from_adapter={self.from_adapter} requires lora, which is not set: set lora.r",
            param="from_adapter",
        )
        require(
            self.eval.every == 0 or self.data.held_out > 0,
            "eval.every requires held-out data, and data.held_out is 0: set data.held_out, such as 0.01",
            param="data.held_out",
        )

    def with_steps(self, rows: int) -> Self:
        """Return the settings with epochs converted to steps; an epoch has so many rows, and no batch spans two."""
        if not self.epochs:
            return self
        whole, rest = divmod(self.epochs, 1)
        steps = int(whole) * -(-rows // self.batch) + math.ceil(rest * rows / self.batch)
        return replace(self, epochs=0.0, steps=steps)

    @property
    def examples(self) -> str:
        """Return the kind of examples: see data.example_rows."""
        return "sft"

    @property
    def trained_tokens(self) -> TrainedTokens:
        """Return which tokens of an example count in the loss."""
        return TrainedTokens()

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the further columns that the records must give: see data.example_rows."""
        return ()

    @property
    def held(self) -> str:
        """Return the storage format of the frozen weights."""
        return self.quantization or ("bf16" if self.precision.compute == "bf16" else "f32")

    @property
    def step_models(self) -> StepModels:
        """Return which models a step holds: with adapters, also their frozen base."""
        images = self.image_items, self.image_patches
        return StepModels(self.lora, ((None, self.held),) if self.lora else (), images=images)


TRAINED_SCHEMES = ("int8", "fp8", "int4", "int4_asym")  # those that an export can have (io.compressed_tensors)


@dataclass(frozen=True, kw_only=True)
class Sft(Tuning):
    """Supervised fine-tuning, by default on the assistant's tokens alone."""

    takes_images: ClassVar[bool] = True
    takes_torch: ClassVar[bool] = True

    assistant_only_loss: bool = True  # false: train every token of a conversation
    completion_only_loss: bool = True  # false: train the prompt as well as the completion
    quantize: str = ""  # quantisation-aware training: compute with weights rounded to int8, fp8, int4 or int4_asym

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("quantize", self.quantize, ("", *TRAINED_SCHEMES))
        require(
            not self.quantize or (self.lora is None and isinstance(self.model, str)),
            f"quantize={self.quantize} trains all weights of a model that Dovetail implements: leave lora out, or set "
            "quantization, which rounds the frozen weights below an adapter",
            param="quantize",
        )

    @property
    def trained_tokens(self) -> TrainedTokens:
        """Return which tokens of an example count in the loss."""
        return TrainedTokens(self.assistant_only_loss, self.completion_only_loss)


@dataclass(frozen=True, kw_only=True)
class Dpo(Tuning):
    """Preference training, with DPO's loss or a related one."""

    takes_images: ClassVar[bool] = True

    optimizer: Optimizer = SMALL_STEPS
    precision: Precision = SUMMED
    preference: Preference = PREFERENCE
    reference: ReferenceSettings = REFERENCE

    def __post_init__(self) -> None:
        super().__post_init__()
        source, reference = self.preference.source, self.reference
        require(
            source != "none" or reference == REFERENCE,
            f"reference is not read with preference.loss_type={self.preference.loss_name}, which has no reference: "
            "leave it out",
            param="reference",
        )
        require(
            source == "live" or not reference.sync_every,
            f"reference.sync_every must be 0 with preference.reference=disk, which is computed once; got "
            f"{reference.sync_every}: set preference.reference=live",
            param="reference.sync_every",
        )
        require(
            isinstance(reference.model, str) or source == "disk",
            f"preference.reference must be disk with a torch module as reference.model, got {source}",
            param="preference.reference",
        )
        reference.check(self.lora is not None, self.from_adapter)

    @property
    def kept_reference(self) -> ReferenceSettings | None:
        """Return the settings of a reference that is part of the training state; None where it is not."""
        return self.reference.kept(self.from_adapter) if self.preference.source == "live" else None

    @property
    def step_models(self) -> StepModels:
        """Return which models a step holds. The base of a new adapter is its reference too: no second copy."""
        beside = self.preference.source == "live" and not self.kept_reference
        frozen = ((None, self.held),) if self.lora or beside else ()
        return StepModels(self.lora, frozen, self.kept_reference)

    @property
    def examples(self) -> str:
        """Return the kind of examples: see data.example_rows."""
        return "unpaired" if self.preference.is_kto else "preference"

    @property
    def most_documents(self) -> int:
        """Return the most documents of a row: each has at least two tokens, and they come in pairs."""
        return self.length // 4 * 2


@dataclass(frozen=True, kw_only=True)
class Reward(Tuning):
    """Training of a reward model, which scores texts, on pairs of a better and a worse text."""

    scores: ClassVar[bool] = True

    optimizer: Optimizer = SCORED
    reward: RewardLoss = REWARD

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not self.samples.every,
            "samples.every must be 0: a reward model does not generate text; leave samples out",
            param="samples.every",
        )

    @property
    def examples(self) -> str:
        """Return the kind of examples: see data.example_rows."""
        return "preference"

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the further columns that the records must give."""
        return ("margin",) if self.reward.margin else ()

    @property
    def most_documents(self) -> int:
        """Return the most documents of a row: each has at least two tokens, and they come in pairs."""
        return self.length // 4 * 2


@dataclass(frozen=True, kw_only=True)
class Distill(Tuning):
    """Training of a student on the token distributions of a teacher."""

    takes_images: ClassVar[bool] = True

    # the model to learn from: a folder, a name, a hub id, or a torch module: {torch: package.module:function}
    teacher: str | TorchModel
    distillation: Distillation = DISTILLATION
    # the config of `teacher`: tune.policy.with_teacher_cfg reads it
    teacher_cfg: ModelConfig | None = field(default=None, compare=False, repr=False, metadata=NOT_A_KEY)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("features", "attention") if isinstance(self.teacher, TorchModel) else ():
            require(
                getattr(self.distillation, name).weight == 0,
                f"distillation.{name}.weight must be 0 with a torch module as teacher, whose layers are not known",
                param=f"distillation.{name}.weight",
            )

    @property
    def step_models(self) -> StepModels:
        """Return which models a step holds: also a live teacher."""
        found = super().step_models
        return found if self.distillation.teacher == "disk" else with_teacher(found, self.teacher_cfg, self.held)


@dataclass(frozen=True, kw_only=True)
class Draft(Tuning):
    """Training of a drafter for speculative decoding, on the target's own answers to prompts."""

    epochs: float = 0.0  # in place of steps: passes over the data; 20 where neither steps nor tokens are given
    length: int = 512  # the most tokens of an example; with packing, tokens of a row
    packing: bool = True  # several examples share a row of `length` tokens
    batch: int = 2  # rows of one step
    optimizer: Optimizer = NEW_WEIGHTS
    eval: Eval = SELDOM
    data: TuningData = APART
    drafter: DrafterSettings = DRAFTER
    answers: AnswerSettings = ANSWERS
    # the new draft model and its vocabulary: tune.draft.draft fills them in
    model_to_train: Any = field(default=None, compare=False, repr=False, metadata=NOT_A_KEY)
    vocab_ids: tuple[int, ...] = field(default=(), compare=False, repr=False, metadata=NOT_A_KEY)

    def __post_init__(self) -> None:
        if not (self.steps or self.tokens or self.epochs):
            object.__setattr__(self, "epochs", DRAFT_EPOCHS)
        super().__post_init__()
        for key, is_set in (("lora", self.lora), ("from_adapter", self.from_adapter), ("samples", self.samples.every)):
            require(not is_set, f"{key} must not be set: a drafter is trained as a whole; leave it out", param=key)

    @property
    def step_models(self) -> StepModels:
        """Return which models a step holds: the drafter is trained, and a live target is frozen."""
        live = self.drafter.hidden_states == "live"
        return StepModels(self.model_to_train, ((None, self.held),) if live else ())


def with_teacher(models: StepModels, teacher_cfg: ModelConfig | None, held: str) -> StepModels:
    """Return the models of a step with a teacher's."""
    assert teacher_cfg is not None, "tune.policy.with_teacher_cfg fills it in"
    return replace(models, frozen=(*models.frozen, (teacher_cfg, held)))


def rows_key(settings: Tuning) -> dict[str, Any]:
    """Return the keys that determine the rows of a batch: a run resumes only if they are the same."""
    data = {name: value for name, value in dump(settings.data).items() if name != "cache"}
    trained = {"trained": list(settings.trained_tokens)} if isinstance(settings, Sft) else {}
    return {"data": data, "packing": settings.packing, **shape_key(settings), **trained}
