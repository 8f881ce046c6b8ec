"""Settings of a pretraining recipe besides those of every training (core.training): data and loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from dovetail.core.choice import not_negative, require
from dovetail.core.training import DERIVED, Mesh, StepModels, Training
from dovetail.data.settings import Data
from dovetail.models.config import ModelConfig


@dataclass(frozen=True)
class PretrainLoss:
    """Set the weights of the terms that are added to the cross entropy."""

    z: float = 0.0  # z loss: keeps the logits' normaliser near 1
    router_aux: float = 0.0  # MoE load balancing loss
    router_bias_rate: float = 0.0  # MoE load balance without a loss: the step size of the choice bias
    mtp: float = 0.0  # multi-token prediction loss; above 0 its layers are trained

    def __post_init__(self) -> None:
        not_negative(self, "z", "router_aux", "router_bias_rate", "mtp")


@dataclass(frozen=True, kw_only=True)
class Pretrain(Training):
    """Hold the settings of a pretraining recipe."""

    takes_torch: ClassVar[bool] = True

    data: Data
    loss: PretrainLoss = PretrainLoss()
    mesh: Mesh = DERIVED

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            isinstance(self.model, str) or self.loss == PretrainLoss(),
            "loss must be left out for a torch module, whose loss is the cross entropy of the next token",
            param="loss",
        )
        require(
            self.eval.every == 0 or self.data.held_out > 0,
            "eval.every measures the held-out loss and requires data.held_out, got 0: set it, such as 0.01",
            param="data.held_out",
        )

    @property
    def step_models(self) -> StepModels:
        """Return which models a step holds besides the trained weights."""
        return StepModels(mtp=self.loss.mtp > 0)


def check_causal(cfg: ModelConfig) -> None:
    """Refuse a model that does not predict tokens."""
    require(
        cfg.images is None,
        "model must be a causal language model, got a model of images: train it with `dovetail pretrain` and a recipe "
        "such as vit-s16",
        param="model",
    )
    require(
        not cfg.scored,
        "model must be a causal language model, got a reward model: use another, or train it with `dovetail reward`",
        param="model",
    )


def check_pretrain(loss: PretrainLoss, cfg: ModelConfig) -> None:
    """Refuse a model that cannot be trained with this loss."""
    check_causal(cfg)
    require(
        not (loss.router_aux or loss.router_bias_rate) or any(layer.moe for layer in cfg.layers),
        "loss.router_aux and loss.router_bias_rate require a model with experts: remove them",
        param="loss.router_aux" if loss.router_aux else "loss.router_bias_rate",
    )


def shape_key(settings: Training) -> dict[str, Any]:
    """Return the keys that determine the shape of a batch."""
    return {"batch": settings.batch, "length": settings.length}
