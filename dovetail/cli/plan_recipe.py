"""What `dovetail plan` is asked about: a recipe, or a model alone, as a training's settings."""

from typing import Any

BATCH, LENGTH = 256, 4096  # of a model alone, where nothing is said


def settings_of(what: str, overrides: list[str], tokens: int = 0, batch: int = 0, length: int = 0) -> Any:
    """A recipe with these in place of its own; of a model alone, a plain training."""
    from pathlib import Path

    from dovetail.core import recipe
    from dovetail.core.training import DERIVED, Training
    from dovetail.models.registry import read_model
    from dovetail.train.settings import Pretrain

    given = [f"{name}={value}" for name, value in (("tokens", tokens), ("batch", batch), ("length", length)) if value]
    if what in recipe.shipped() or Path(what).suffix in (".yaml", ".yml"):
        return recipe.load(what, [*given, *overrides], Pretrain)
    cfg = read_model(what)
    whole: dict[str, Any] = {"model": what, "batch": batch or BATCH, "length": length or min(LENGTH, cfg.max_len)}
    whole |= {"tokens": tokens} if tokens else {"steps": 1000}
    return recipe.change(Training(**whole, mesh=DERIVED), overrides)
