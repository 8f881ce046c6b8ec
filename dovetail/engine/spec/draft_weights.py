"""The draft model of an engine's options: its architecture, its weights and its draft tokens per step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dovetail.core.errors import CheckpointError, UserError
from dovetail.core.mesh import Placement
from dovetail.core.types import Params
from dovetail.engine.options import EngineOptions
from dovetail.engine.spec.config import DRAFT_TOKENS
from dovetail.io.draft_folder import DraftCheckpoint, has_weights, open_draft
from dovetail.models.config import ModelConfig
from dovetail.models.draft.draft import DraftModel


def with_own_draft(options: EngineOptions, model: str) -> EngineOptions:
    """Return the options with the served model as the draft model of method mtp, if they name none."""
    config = options.speculative_config
    if config is None or config.model or not config.has_weights:
        return options
    return replace(options, speculative_config=replace(config, model=model))


def open_draft_of(options: EngineOptions, cfg: ModelConfig) -> DraftCheckpoint | None:
    """Return the draft model of these options without reading a weight; None if they name none.

    Raises:
        CheckpointError: It is not a draft model of this target, or not of the method that was named.
    """
    config = options.speculative_config
    if config is None or not config.has_weights:
        return None
    if config.model is None:  # method mtp, with weights that no checkpoint is known of
        raise UserError(
            "`speculative_config.model` must name the checkpoint with the MTP layers, got none",
            param="speculative_config.model",
        )
    dummy, most = options.load_format == "dummy", config.num_speculative_tokens
    opened = open_draft(config.model, cfg, config.method, dummy)
    if most is not None and most > opened.draft.most:
        raise CheckpointError(
            f"`speculative_config.num_speculative_tokens` must be at most {opened.draft.most}, which {config.model} "
            f"proposes, got {most}",
            param="speculative_config.num_speculative_tokens",
        )
    return opened


def outline_draft_of(options: EngineOptions, cfg: ModelConfig) -> DraftModel | None:
    """Return the draft model of these options, of which its config.json suffices; None if they name none."""
    config = options.speculative_config
    if config is not None and config.has_weights and not has_weights(config.model):
        options = replace(options, load_format="dummy")
    opened = open_draft_of(options, cfg)
    return opened.draft if opened else None


def load_draft_of(
    options: EngineOptions, cfg: ModelConfig, dtype: Any, placement: Placement | None, given: DraftModel | None = None
) -> tuple[DraftModel | None, Params | None]:
    """Return the draft model of these options and its weights; None and None if they name none.

    `given`: a draft model in place of theirs, with random weights.
    """
    opened = DraftCheckpoint(given, None, {}) if given else open_draft_of(options, cfg)
    return (opened.draft, opened.read(dtype, placement)) if opened else (None, None)


def draft_choices(options: EngineOptions, draft: DraftModel | None) -> tuple[int, ...]:
    """Return the numbers of draft tokens that verify steps are compiled for; none without speculation."""
    config = options.speculative_config
    if config is None:
        return ()
    return config.choices(min(DRAFT_TOKENS, draft.most) if draft else DRAFT_TOKENS)
