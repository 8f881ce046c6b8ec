"""Refuse draft models that were made for another target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dovetail.core.errors import CheckpointError
from dovetail.models.config import ModelConfig


def check_size(field: str, given: int, expected: int, where: str) -> None:
    """Refuse a draft model whose `field` (hidden_size, vocab_size) is not the target's."""
    if given != expected:
        raise CheckpointError(
            f"{where} is a draft for another model: {field} is {given}, the target has {expected}", param=field
        )


def check_taps(field: str, taps: Sequence[int], target: ModelConfig, where: str) -> tuple[int, ...]:
    """Return the taps (from 0: the outputs of these layers); refuse those that the target does not have."""
    outside = [i for i in taps if not 0 <= i < len(target.layers)]
    if outside or not taps:
        raise CheckpointError(
            f"{where} is a draft for another model: {field} reads the outputs of layers {list(taps)} (from 0), the "
            f"target has {len(target.layers)} layers",
            param=field,
        )
    return tuple(taps)


def check_verifier(hf: dict[str, Any], target: ModelConfig, where: str) -> None:
    """Refuse a draft in the speculators format whose verifier has another architecture than the target."""
    verifier = (hf.get("speculators_config") or {}).get("verifier") or {}
    named, (own,) = verifier.get("architectures") or [], target.to_hf()["architectures"]
    if named and not any(_stem(name) == _stem(own) for name in named):
        raise CheckpointError(
            f"{where} is a draft for another model: its verifier {verifier.get('name_or_path')!r} is a "
            f"{', '.join(named)}, the target is a {own}",
            param="verifier",
        )


def _stem(architecture: str) -> str:
    """Return the name without the task: the text model of Gemma3ForConditionalGeneration is a Gemma3ForCausalLM."""
    return architecture.partition("For")[0]
