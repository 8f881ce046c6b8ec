"""`dovetail recipes`: the recipes that ship with the package, or one of them with what it becomes on given hardware."""

import typer

FITS_ON = ("v5e", "v5p", "H100", "H200")


def recipes(
    name: str = typer.Argument(None, help="A recipe's name or file: show it, and what is derived."),
    overrides: list[str] = typer.Argument(None, metavar="[KEY=VALUE]...", help="Such as optimizer.lr=1e-3."),
    chip: str = typer.Option("H200", help="What it would run on: v5e, v5p, v6e, TPU7x, H100, H200, ... or cpu."),
    devices: int = typer.Option(8, min=1, help="How many of them."),
    slices: int = typer.Option(1, min=1, help="In how many slices."),
    training: str = typer.Option("pretrain", help="Which training the recipe is of: pretrain, sft, dpo, rl, ..."),
    check: bool = typer.Option(False, "--check", help="Only read it with its overrides, and say what is wrong."),
) -> None:
    """List the recipes with size, tokens and the hardware they fit; with NAME, show one."""
    from rich.console import Console

    console = Console(highlight=False)
    if name is None:
        console.print(table())
        console.print(f"{', '.join(FITS_ON)}: the fewest chips (a power of two) that hold it, as estimated.")
        console.print("One recipe and what it becomes: dovetail recipes NAME --chip H200 --devices 8")
        return
    if check:
        from dovetail.cli.tune import read_settings, settings_class

        read_settings(settings_class(training), name, overrides or [])
        return
    show(console, name, overrides or [], chip, devices, slices, training)


def table():
    """All shipped recipes: parameters, tokens, batch, and the fewest chips of some kinds that hold them."""
    from rich import box
    from rich.table import Table

    from dovetail.core import recipe

    out = Table(title="recipes", title_justify="left", title_style="bold", box=box.ROUNDED)
    out.add_column("name", style="cyan", no_wrap=True)
    for column in ("parameters", "tokens", "batch x length", *FITS_ON):
        out.add_column(column, justify="right", no_wrap=True)
    for row in sorted((_row(name) for name in recipe.shipped()), key=lambda row: row[0]):
        out.add_row(*row[1:])
    return out


def _row(name: str) -> tuple:
    """(parameters as a number, to sort by, and the cells)."""
    from dovetail.core import recipe
    from dovetail.core.chips import CHIPS
    from dovetail.core.spec import matmul_flops, num_params
    from dovetail.io.outline import config_of
    from dovetail.models.spec import spec
    from dovetail.plan.derive import smallest
    from dovetail.plan.plans import num_experts
    from dovetail.train.settings import Pretrain

    settings = recipe.load(name, (), Pretrain)
    cfg = config_of(settings.model)
    size = num_params(spec(cfg))
    active = f" ({human(matmul_flops(spec(cfg)) / 2)} active)" if num_experts(cfg) > 1 else ""
    tokens = settings.total_steps * settings.tokens_per_step
    counts = [smallest(cfg, settings, CHIPS[chip]) for chip in FITS_ON]
    fits = [str(count) if count else "-" for count in counts]
    return size, name, human(size) + active, human(tokens), f"{settings.batch} x {settings.length}", *fits


def show(console, name: str, overrides: list[str], chip: str, devices: int, slices: int, training: str) -> None:
    """The file as it is written, then the derivation."""
    from rich.syntax import Syntax

    from dovetail.cli.tune import settings_class
    from dovetail.core import recipe
    from dovetail.core.chips import chip_named
    from dovetail.plan.derive import derive

    settings = recipe.load(name, overrides, settings_class(training))
    kind = None if chip.lower() == "cpu" else chip_named(chip)
    console.print(Syntax(recipe.find(name).read_text().rstrip(), "yaml", background_color="default", word_wrap=True))
    if overrides:
        console.print("with " + " ".join(overrides), markup=False)
    console.print()
    cfg, settings = _model_of(settings), settings.filled(devices) if training == "rl" else settings
    for line in derive(cfg, settings, kind, devices - settings.spare_devices, slices).explain():
        console.print(line, markup=False)


def _model_of(settings):
    from dovetail.io.outline import config_of
    from dovetail.models.score import scored

    cfg = config_of(settings.model)
    return scored(cfg) if settings.scores else cfg


def human(count: float) -> str:
    """1235814400 -> 1.24B: three figures and the words people use."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g}{unit}" if count < 1000 * size else f"{count / size:,.0f}{unit}"
    return f"{count:.0f}"
