"""What a recipe says otherwise than the one that a run was saved with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.core import recipe
from dovetail.core.training import Training


def changes(stored: Mapping[str, Any], settings: Training) -> dict[str, str]:
    """Dotted key -> `key old -> new`. `stored` is a checkpoint's recipe (train.recorded); both it and `settings` have
    what was derived filled in."""
    try:
        before = recipe.read(type(settings), stored).effective
    except ValueError as error:  # keys have been renamed since, or their checks are stricter
        return {"": f"the recipe in the checkpoint is another version's ({error})"}
    found = recipe.differences(before, settings.effective)
    return {key: f"{key} {_text(old)} -> {_text(new)}" for key, old, new in found}


def rows_key_of(stored: Mapping[str, Any], cls: type[Training]) -> dict[str, Any] | None:
    """Return the rows_key of a checkpoint's recipe, as this version writes it; None where it cannot be read."""
    try:
        return recipe.read(cls, stored).rows_key
    except ValueError:
        return None


def _text(value: Any) -> str:
    if value is None or value == "":
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
