"""Settings of a recipe that trains a model of images."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from dovetail.core.choice import not_negative, one_of, require
from dovetail.core.training import DERIVED, Mesh, Training
from dovetail.data.image_settings import ImageData
from dovetail.models.config import ModelConfig
from dovetail.models.towers.classifier import ImageClassifier

OBJECTIVES = ("classification", "siglip")


@dataclass(frozen=True, kw_only=True)
class ImagePretrain(Training):
    """Hold the settings of a recipe that trains a model of images; `objective` distinguishes it from one of text."""

    ALTERNATIVES: ClassVar = (("steps", "epochs"),)

    objective: str  # classification: the classes of images; siglip: pairs of images and captions
    data: ImageData
    epochs: float = 0.0  # in place of steps: passes over the images
    length: int = 0  # patches of an image; 0: the model's
    mixup: float = 0.0  # classification: mix pairs of images, with shares from a Beta distribution of this parameter
    mesh: Mesh = DERIVED

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("objective", self.objective, OBJECTIVES)
        not_negative(self, "mixup", "epochs")
        require(not self.tokens, "tokens is not a key of image recipes: set steps or epochs", param="tokens")
        require(
            self.mixup == 0 or self.objective == "classification",
            f"mixup requires objective=classification, got {self.objective}: remove it",
            param="mixup",
        )
        require(
            self.objective != "siglip" or self.accumulate in (0, 1),
            f"accumulate must be 1 with objective=siglip, whose loss compares all pairs of a batch; got "
            f"{self.accumulate}",
            param="accumulate",
        )
        if self.objective == "siglip":
            object.__setattr__(self, "accumulate", 1)
        require(
            self.eval.every == 0 or bool(self.data.held_out or self.data.validation),
            "eval.every requires images to evaluate on: set data.held_out, such as 0.1, or data.validation",
            param="data.held_out",
        )

    def _check_rows(self) -> None:
        require(self.batch >= 1, f"batch must be at least 1 image; got {self.batch}", param="batch")

    @property
    def total_steps(self) -> int:
        """Return the steps of the run; 0 if they depend on the data (epochs)."""
        return self.steps

    def for_model(self, cfg: ModelConfig) -> Self:
        """Return the settings with the number of patches filled in.

        Raises:
            RecipeError: The model is of another kind, or has another number of patches.
        """
        check_images(cfg, self.objective)
        require(
            self.length in (0, cfg.max_len),
            f"length must be the {cfg.max_len} patches of the model's images; got {self.length}: remove it",
            param="length",
        )
        return replace(self, length=cfg.max_len)

    def for_images(self, count: int) -> Self:
        """Return the settings with epochs over `count` images as steps."""
        return replace(self, epochs=0.0, steps=max(1, round(self.epochs * count / self.batch))) if self.epochs else self


def check_images(cfg: ModelConfig, objective: str) -> None:
    """Refuse a model that this objective cannot train."""
    require(
        cfg.images is not None,
        "model must be a model of images, such as vit-s16, got a language model: remove objective to train it on text",
        param="model",
    )
    is_classifier = isinstance(cfg.images, ImageClassifier)
    require(
        is_classifier == (objective == "classification"),
        f"objective={objective} does not match the model, which is {'a classifier' if is_classifier else 'SigLIP'}",
        param="objective",
    )
