"""`dovetail plan train MODEL_OR_RECIPE`: the meshes that fit, how long a step takes on each, and what a run costs."""

import typer

from dovetail.cli.plan_recipe import MODEL, PRICE, REGION, SPOT
from dovetail.core.errors import UserError


def train(
    what: str = typer.Argument(metavar="MODEL_OR_RECIPE", help=f"A recipe; or a model: {MODEL[0].lower()}{MODEL[1:]}"),
    overrides: list[str] = typer.Argument(None, metavar="[KEY=VALUE]...", help="Such as mesh.tensor=4 remat=full."),
    on: str = typer.Option(..., "--on", help="Such as v5e-256, v5p-128, h100x64, 2 x v6e-256, cpu."),
    batch: str = typer.Option("", help="Tokens of a step, such as 4M; otherwise the recipe's."),
    seq: int = typer.Option(0, min=0, help="Tokens of a row; otherwise the recipe's, or 4096."),
    tokens: str = typer.Option(
        "", help="Of the whole run, such as 1T; otherwise the recipe's, or 20 for each weight of a model."
    ),
    remat: str = typer.Option("", help="none, dots, attention or full; otherwise each is tried."),
    stages: int = typer.Option(1, min=1, help="What a pipeline of so many stages would do. Our trainer has none."),
    top: int = typer.Option(5, min=1, help="Plans to show."),
    price: float = PRICE,
    spot: bool = SPOT,
    region: str = REGION,
    explain: bool = typer.Option(False, help="Show the arithmetic of the best plan, with the numbers filled in."),
    html: str = typer.Option("", help="Write one page with pictures of it all into this .html file."),
    as_json: bool = typer.Option(False, "--json", help="The same as JSON."),
) -> None:
    """Memory, time and dollars of training, for every mesh that fits: bounds, before a chip is paid for."""
    from dovetail.cli import plan_train_table as tables
    from dovetail.cli.plan_recipe import checked_region, outline_of
    from dovetail.core.accelerator import parse
    from dovetail.core.prices import rate
    from dovetail.plan.calibration import fractions
    from dovetail.plan.train_plan import Prices, plan_training

    region, accelerator = checked_region(price, spot, region), parse(on)
    settings = _settings(what, overrides or [], accelerator, batch, seq, tokens, remat)
    cfg = outline_of(settings.model)[0]
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
        from dovetail.cli.plan_page import write_training

        write_training(html, plans[:top])


def _whose(what: str, overrides: list[str], tokens: str) -> str:
    """Return where the number of tokens comes from, if it was not given."""
    from dovetail.cli.plan_recipe import TOKENS_PER_WEIGHT, is_recipe

    if tokens or any(word.startswith(("tokens=", "steps=")) for word in overrides):
        return ""
    return "the recipe's" if is_recipe(what) else f"{TOKENS_PER_WEIGHT} for each weight; --tokens for yours"


def _settings(what: str, overrides: list[str], accelerator, batch: str, seq: int, tokens: str, remat: str):
    """The recipe with what the options say; a batch of tokens becomes rows that the accelerator can share."""
    from dovetail.cli.plan_recipe import settings_of
    from dovetail.core.recipe import read_count
    from dovetail.plan.train_plan import rows_of

    words = [*overrides, *([f"remat={remat}"] if remat else [])]
    count = read_count(tokens, "--tokens") if tokens else 0
    settings = settings_of(what, words, count, length=seq)
    if not batch:
        return settings
    wanted = read_count(batch, "--batch")
    if wanted < settings.length:
        raise UserError(f"--batch is the tokens of a step, {settings.length:,} or more (one row); got {wanted:,}")
    return settings_of(what, words, count, rows_of(wanted, settings.length, accelerator), seq)
