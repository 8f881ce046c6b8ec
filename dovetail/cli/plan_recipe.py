"""What `dovetail plan` is asked about: a recipe, or a model alone, as a training's settings; the options of prices."""

import functools
from typing import Any

import typer

from dovetail.core.errors import UserError

BATCH, LENGTH = 256, 4096  # of a model alone, where nothing is said
TOKENS_PER_WEIGHT = 20  # likewise: the run whose days and dollars are shown
MODEL = "A shipped architecture, a hub id (its config alone is fetched), a folder, a .gguf file or a config.json."
PRICE = typer.Option(None, min=0.0, help="Dollars per chip and hour, in place of the list's.")
SPOT = typer.Option(False, help="With the list's price of spot machines.")
REGION = typer.Option("", help="Of the list, such as europe-west4; US otherwise.")


@functools.cache
def outline_of(model: str) -> tuple[Any, Any]:
    """Return io.outline's config and dtype, asking the hub once."""
    from dovetail.io.outline import outline

    return outline(model)


def settings_of(what: str, overrides: list[str], tokens: int = 0, batch: int = 0, length: int = 0) -> Any:
    """Return a recipe with these in place of its own; of a model alone, a plain training."""
    from dovetail.core import recipe
    from dovetail.core.training import DERIVED, Training
    from dovetail.train.settings import Pretrain

    given = [f"{name}={value}" for name, value in (("tokens", tokens), ("batch", batch), ("length", length)) if value]
    words = [*given, *without_warmup(overrides), *overrides]
    if is_recipe(what):
        return recipe.load(what, words, Pretrain)
    cfg = outline_of(what)[0]
    whole: dict[str, Any] = {"model": what, "batch": batch or BATCH, "length": length or min(LENGTH, cfg.max_len)}
    whole |= {"tokens": tokens or usual_tokens(cfg)}
    return recipe.change(Training(**whole, mesh=DERIVED), overrides)


def is_recipe(what: str) -> bool:
    from pathlib import Path

    from dovetail.core import recipe

    return what in recipe.shipped() or Path(what).suffix in (".yaml", ".yml")


def without_warmup(overrides: list[str]) -> list[str]:
    """Return the override that leaves a recipe's warmup out: a plan of few steps is no reason to refuse it."""
    return [] if any(word.startswith("schedule") for word in overrides) else ["schedule.warmup=0"]


def usual_tokens(cfg: Any) -> int:
    """Return 20 tokens for each weight, to two digits."""
    from dovetail.core.spec import num_params
    from dovetail.models.spec import spec

    return int(float(f"{TOKENS_PER_WEIGHT * num_params(spec(cfg)):.2g}"))


def checked_region(price: float | None, spot: bool, region: str) -> str:
    """Return the region in lower case; ValueError for an unknown one, or for a list's options beside --price."""
    from dovetail.core.regions import check_region

    if price is not None and (spot or region):
        raise UserError("--price is the price itself: leave out --spot and --region")
    return check_region("--region", region) if region else ""
