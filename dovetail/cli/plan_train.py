"""`dovetail plan train`: the meshes that fit, the time of a step on each, and the cost of a run."""

import typer

from dovetail.cli.plan_recipe import (
    JSON,
    PRICE,
    RECIPE_OR_MODEL,
    REGION,
    SPOT,
    TOKENS_PER_WEIGHT,
    checked_region,
    is_recipe,
    outline_of,
    settings_of,
    write_page,
)
from dovetail.core.errors import UserError


def train(
    what: str = RECIPE_OR_MODEL,
    overrides: list[str] = typer.Argument(
        None, metavar="[KEY=VALUE]...", help="Overrides, such as mesh.tensor=4 remat=full."
    ),
    on: str = typer.Option(..., "--on", help="Accelerator: v5e-256, v5p-128, h100x64, 2 x v6e-256, cpu."),
    batch: str = typer.Option("", help="Tokens per step, such as 4M. Default: the recipe's."),
    seq: int = typer.Option(0, min=0, show_default=False, help="Tokens per row. Default: the recipe's, or 4096."),
    tokens: str = typer.Option("", help="Tokens of the run, such as 1T. Default: the recipe's, or 20 per weight."),
    remat: str = typer.Option("", help="none, dots, attention or full. Default: try each."),
    stages: int = typer.Option(1, min=1, help="Estimate a pipeline of this many stages, which the trainer lacks."),
    top: int = typer.Option(5, min=1, help="Number of plans to show."),
    price: float = PRICE,
    spot: bool = SPOT,
    region: str = REGION,
    explain: bool = typer.Option(False, "--explain", help="Show the arithmetic of the best plan."),
    html: str = typer.Option("", help="Write a page of plots to this .html file."),
    as_json: bool = JSON,
) -> None:
    """Estimate memory, time and cost of training on every mesh that fits."""
    from dovetail.cli import plan_train_table as tables
    from dovetail.core.accelerator import parse
    from dovetail.core.cloud import rate
    from dovetail.plan.calibration import fractions
    from dovetail.plan.train_plan import Prices, plan_training
    from dovetail.train.settings import check_causal, check_pretrain

    region, accelerator = checked_region(price, spot, region), parse(on)
    settings = _settings(what, overrides or [], accelerator, batch, seq, tokens, remat)
    cfg = outline_of(settings.model)[0]
    check_pretrain(settings.loss, cfg) if is_recipe(what) else check_causal(cfg)
    prices = Prices(rate(accelerator.chip, False, region, price), rate(accelerator.chip, True, region, price))
    known = fractions(accelerator.chip.name if accelerator.chip else "CPU")
    plans = plan_training(cfg, settings, accelerator, prices=prices, known=known)
    if as_json:
        print(tables.as_json(what, plans[:top], len(plans)))
    else:
        tables.show(what, plans, top, spot, _whose(what, overrides or [], tokens), explain)
        if stages > 1:
            tables.show_stages(plans[0], stages)
    if html:
        from dovetail.plan.page.training import training_page

        write_page(html, training_page(plans[:top]))


def _whose(what: str, overrides: list[str], tokens: str) -> str:
    """Return where the number of tokens comes from, unless it was given."""
    if tokens or any(word.startswith(("tokens=", "steps=")) for word in overrides):
        return ""
    return "the recipe's" if is_recipe(what) else f"{TOKENS_PER_WEIGHT} per weight; set --tokens"


def _settings(what: str, overrides: list[str], accelerator, batch: str, seq: int, tokens: str, remat: str):
    """Return the recipe with the options applied; a batch in tokens becomes rows that the devices can share."""
    from dovetail.core.recipe import read_count
    from dovetail.plan.train_plan import rows_of

    words = [*overrides, *([f"remat={remat}"] if remat else [])]
    count = read_count(tokens, "--tokens") if tokens else 0
    settings = settings_of(what, words, count, length=seq)
    if not batch:
        return settings
    wanted = read_count(batch, "--batch")
    if wanted < settings.length:
        raise UserError(
            f"--batch must be at least one row of {settings.length:,} tokens, got {wanted:,}", param="--batch"
        )
    return settings_of(what, words, count, rows_of(wanted, settings.length, accelerator), seq)
