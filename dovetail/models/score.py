"""Models that give a text a score in place of words: Hugging Face's models for sequence classification with one label,
as reward models are kept."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from dovetail.core.errors import UserError
from dovetail.models.config import ModelConfig

WORDS, SCORES = "ForCausalLM", "ForSequenceClassification"  # the ends of their architectures' names
LABELS = 2  # of a classifier whose config.json does not say


def is_scored(hf: dict[str, Any], where: str) -> bool:
    """Whether a config.json is of such a model; several labels are refused."""
    if not any(str(name).endswith(SCORES) for name in hf.get("architectures") or ()):
        return False
    labels = len(hf.get("id2label") or ()) or hf.get("num_labels", LABELS)
    if labels != 1:
        raise UserError(
            f"{where}: a model for sequence classification with {labels} labels; those with one, which is a score, "
            "are supported"
        )
    return True


def scored(cfg: ModelConfig) -> ModelConfig:
    """The same layers under a score."""
    if cfg.scored:
        return cfg
    hf = cfg.to_hf()
    hf["architectures"] = [name.removesuffix(WORDS) + SCORES for name in hf["architectures"]]
    hf |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    if hf.get("pad_token_id") in cfg.eos_ids:  # transformers would pass over an end of text, taking it for padding
        hf["pad_token_id"] = None
    return replace(cfg, scored=True, source=json.dumps(hf, sort_keys=True))
