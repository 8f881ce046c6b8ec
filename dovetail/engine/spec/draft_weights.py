"""The draft model of a speculative config: its architecture, its weights and its draft tokens per step."""

from __future__ import annotations

from typing import Any

from dovetail.core.errors import CheckpointError, UserError
from dovetail.core.mesh import Placement
from dovetail.core.types import Params
from dovetail.engine.spec.config import DRAFT_TOKENS, SpeculativeConfig
from dovetail.io.draft_folder import DraftCheckpoint, has_weights, open_draft
from dovetail.models.config import ModelConfig
from dovetail.models.draft.draft import DraftModel


def open_draft_of(config: SpeculativeConfig | None, cfg: ModelConfig, dummy: bool = False) -> DraftCheckpoint | None:
    """Return the draft model of a config without reading a weight; None if it names none.

    Args:
        config: The config.
        cfg: The target.
        dummy: Whether its weights are random.

    Raises:
        CheckpointError: It is not a draft model of this target, or not of the method that was named.
    """
    if config is None or not config.has_weights:
        return None
    if config.model is None:  # `method: mtp` without a checkpoint
        raise UserError(
            "`speculative_config.model` must name the checkpoint with the MTP layers, got none",
            param="speculative_config.model",
        )
    most = config.num_speculative_tokens
    opened = open_draft(config.model, cfg, config.method, dummy)
    if most is not None and most > opened.draft.most:
        raise CheckpointError(
            f"`speculative_config.num_speculative_tokens` must be at most {opened.draft.most}, which {config.model} "
            f"proposes, got {most}",
            param="speculative_config.num_speculative_tokens",
        )
    return opened


def outline_draft_of(config: SpeculativeConfig | None, cfg: ModelConfig, dummy: bool = False) -> DraftModel | None:
    """Return the draft model of a config, of which its config.json suffices; None if it names none."""
    absent = config is not None and config.has_weights and not (config.model and has_weights(config.model))
    opened = open_draft_of(config, cfg, dummy or absent)
    return opened.draft if opened else None


def load_draft_of(
    config: SpeculativeConfig | None,
    cfg: ModelConfig,
    dtype: Any,
    placement: Placement | None,
    dummy: bool = False,
    given: DraftModel | None = None,
) -> tuple[DraftModel | None, Params | None]:
    """Return the draft model of a config and its weights; None and None if it names none.

    `given`: a draft model in place of the named one, with random weights.
    """
    opened = DraftCheckpoint(given, None, {}) if given else open_draft_of(config, cfg, dummy)
    return (opened.draft, opened.read(dtype, placement)) if opened else (None, None)


def draft_choices(config: SpeculativeConfig | None, draft: DraftModel | None) -> tuple[int, ...]:
    """Return the numbers of draft tokens that verify steps are compiled for; none without speculation."""
    if config is None:
        return ()
    return config.choices(min(DRAFT_TOKENS, draft.most) if draft else DRAFT_TOKENS)
