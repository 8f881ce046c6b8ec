"""What a recipe says otherwise than the one that a run was saved with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.core import recipe
from dovetail.core.training import Training


def changes(stored: Mapping[str, Any], settings: Training) -> dict[str, str]:
    """Dotted key -> `key old -> new`. `stored` is a checkpoint's, as core.recipe.dump made it, with what was derived
    filled in, as in `settings`."""
    try:
        before = recipe.read(type(settings), stored)
    except ValueError as error:  # keys have been renamed since, or their checks are stricter
        return {"": f"the recipe in the checkpoint is another version's ({error})"}
    return {key: f"{key} {_text(old)} -> {_text(new)}" for key, old, new in recipe.differences(before, settings)}


def _text(value: Any) -> str:
    if value is None or value == "":
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
