"""Share code between the commands of `dovetail plan`: reading a recipe or a model, prices, and pages of plots."""

import functools
from pathlib import Path
from typing import Any

import typer

from dovetail.core.errors import UserError

BATCH, LENGTH = 256, 4096  # defaults for a model without a recipe
TOKENS_PER_WEIGHT = 20  # likewise, for the run whose time and cost are shown
MODEL = "Shipped architecture, hub id (only its config is downloaded), folder, .gguf file or config.json."
RECIPE_OR_MODEL = typer.Argument(metavar="RECIPE_OR_MODEL", help=f"Recipe; or model: {MODEL[0].lower()}{MODEL[1:]}")
PRICE = typer.Option(None, min=0.0, help="Dollars per chip and hour, in place of the list price.")
SPOT = typer.Option(False, "--spot", help="Use the list price of spot machines.")
REGION = typer.Option("", help="Region of the list price, such as europe-west4. Default: US.")
JSON = typer.Option(False, "--json", help="Print JSON.")


@functools.cache
def outline_of(model: str) -> tuple[Any, Any]:
    """Return the config and dtype from io.load.outline, asking the hub once."""
    from dovetail.io.load import outline

    return outline(model)


def settings_of(what: str, overrides: list[str], tokens: int = 0, batch: int = 0, length: int = 0) -> Any:
    """Return a recipe's settings with these values in place of its own; for a model, plain training settings."""
    from dovetail.core import recipe
    from dovetail.core.training import DERIVED, Training
    from dovetail.train.pretrain import pretrain_class

    given = [f"{name}={value}" for name, value in (("tokens", tokens), ("batch", batch), ("length", length)) if value]
    words = [*given, *without_warmup(overrides), *overrides]
    if is_recipe(what):
        settings = recipe.load(what, words, pretrain_class(what, words))
        if not isinstance(settings.model, str):
            raise UserError("a plan requires a model whose layers are known, got a torch module", param="model")
        is_image = hasattr(settings, "for_model")
        return settings.for_model(outline_of(settings.model)[0]) if is_image else settings
    cfg = outline_of(what)[0]
    whole: dict[str, Any] = {"model": what, "batch": batch or BATCH, "length": length or min(LENGTH, cfg.max_len)}
    whole |= {"tokens": tokens or usual_tokens(cfg)}
    return recipe.change(Training(**whole, mesh=DERIVED), overrides)


def is_recipe(what: str) -> bool:
    """Return whether `what` names a shipped recipe or a YAML file."""
    from dovetail.core import recipe

    return what in recipe.shipped() or Path(what).suffix in (".yaml", ".yml")


def without_warmup(overrides: list[str]) -> list[str]:
    """Return an override that removes the warmup, so that a plan of few steps is not refused for it."""
    return [] if any(word.startswith("schedule") for word in overrides) else ["schedule.warmup=0"]


def usual_tokens(cfg: Any) -> int:
    """Return 20 tokens per weight, rounded to two digits."""
    from dovetail.core.spec import num_params
    from dovetail.models.spec import spec

    return int(float(f"{TOKENS_PER_WEIGHT * num_params(spec(cfg)):.2g}"))


def checked_region(price: float | None, spot: bool, region: str) -> str:
    """Return the region in lower case.

    Raises:
        UserError: The region is unknown, or --price was given together with options of the price list.
    """
    from dovetail.core.cloud import check_region

    if price is not None and (spot or region):
        raise UserError("--price replaces the list price: leave out --spot and --region", param="--price")
    return check_region("--region", region) if region else ""


def write_page(path: str, page: Any) -> None:
    """Write a page of plots and print its path to stderr, because stdout may be JSON for a program."""
    import sys

    from dovetail.plan.page import write

    print(f"plots: {write(path, page)}", file=sys.stderr)
