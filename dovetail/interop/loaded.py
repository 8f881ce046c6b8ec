"""Define what a view of a model needs of it: `io.load.Model`, without importing it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from dovetail.core.compute import Compute
from dovetail.core.errors import UnsupportedError
from dovetail.core.types import Params
from dovetail.models.config import ModelConfig


class LoadedModel(Protocol):
    """A model with its weights, as `dt.load` returns it; a dataclass."""

    config: ModelConfig
    params: Params
    compute: Compute

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, array) for every tensor of a Hugging Face checkpoint with these weights."""
        ...

    def save(self, folder: str | Path) -> None:
        """Write a Hugging Face folder."""
        ...


def check_text(cfg: ModelConfig) -> None:
    """Refuse a model that does not map tokens to logits."""
    if cfg.vision or cfg.images or cfg.scored or cfg.external:
        raise UnsupportedError("`model` must be a causal language model of text", param="model")
