"""Find the kind of a draft model in its config.json, and parse it.

Published formats: that of `speculators` (`speculators_model_type`), EAGLE-3's original one (an architecture with Eagle3
in its name), z-lab's of DFlash (`dflash_config`, `block_size`), that of the Gemma 4 assistant (`model_type`). Every
other config.json is of an ordinary model.
"""

from __future__ import annotations

from typing import Any

from dovetail.core.choice import did_you_mean
from dovetail.core.errors import UnsupportedError, UserError
from dovetail.models.config import ModelConfig
from dovetail.models.draft.draft import DraftModel
from dovetail.models.registry import parse_config

KINDS = ("eagle3", "mtp", "dflash", "dspark")  # with weights that only a draft model has
PLAIN = "draft_model"
ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")  # model types; vLLM calls them mtp too


def draft_kind(hf: dict[str, Any], where: str = "config.json") -> str:
    """Return one of KINDS, or PLAIN for an ordinary model, in vLLM's words for `method`."""
    if not isinstance(hf, dict):
        raise UserError(f"{where}: a config is a JSON object; this is a {type(hf).__name__}")
    if (kind := hf.get("speculators_model_type")) is not None:
        kind = "dflash" if kind == "dflash2" else kind
        if kind not in KINDS:
            raise UnsupportedError(
                f"{where}: draft models of the kind {kind!r} are not supported.{did_you_mean(str(kind), KINDS)} "
                f"Supported: {', '.join(KINDS)}",
                param="speculators_model_type",
            )
        return kind
    if hf.get("model_type") in ASSISTANTS:
        return "mtp"
    architectures = " ".join(map(str, hf.get("architectures") or ())).lower()
    for kind in ("eagle3", "dspark", "dflash"):
        if kind in architectures:
            return kind
    return "dflash" if "dflash_config" in hf or "block_size" in hf else PLAIN


def parse_draft(hf: dict[str, Any], target: ModelConfig, where: str) -> DraftModel:
    """Return the draft model that a config.json describes.

    Args:
        hf: The contents of the config.json.
        target: The model that it drafts for.
        where: The name of the checkpoint, for errors.

    Raises:
        CheckpointError: It is a draft for another model.
        UserError: The config is not supported.
    """
    kind = draft_kind(hf, where)
    if kind == "eagle3":
        from dovetail.models.draft.eagle3 import parse_eagle3

        return parse_eagle3(hf, target, where)
    if hf.get("model_type") in ASSISTANTS:
        from dovetail.models.draft.assistant import parse_assistant

        return parse_assistant(hf, target, where)
    if kind == "mtp":
        from dovetail.models.draft.mtp import parse_mtp

        return parse_mtp(hf, target, where)
    if kind in ("dflash", "dspark"):
        from dovetail.models.draft.dflash_config import parse_dflash

        return parse_dflash(hf, target, where)
    from dovetail.models.draft.plain import plain_draft

    return plain_draft(parse_config(hf, where), target, where)
