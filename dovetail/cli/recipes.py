"""`dovetail recipes`: the recipes that ship with the package, or one of them with what it becomes on given hardware."""

import typer

FITS_ON = ("v5e", "v5p", "H100", "H200")
TITLES = {
    "pretrain": "pretraining", "sft": "supervised fine-tuning", "dpo": "preferences", "reward": "reward models",
    "distill": "distillation", "rl": "reinforcement learning",
}  # fmt: skip
NAME, SIZE, TOKENS, ROWS, CHIPS = 23, 22, 8, 13, 5  # widths of the columns


def recipes(
    name: str = typer.Argument(None, help="A recipe's name or file: show it, and what is derived."),
    overrides: list[str] = typer.Argument(None, metavar="[KEY=VALUE]...", help="Such as optimizer.lr=1e-3."),
    chip: str = typer.Option("H200", help="What it would run on: v5e, v5p, v6e, TPU7x, H100, H200, ... or cpu."),
    devices: int = typer.Option(8, min=1, help="How many of them."),
    slices: int = typer.Option(1, min=1, help="In how many slices."),
    training: str = typer.Option(
        "",
        help="Which training the recipe is for: pretrain, sft, dpo, reward, distill or rl. Default: a shipped "
        "recipe's own, else pretrain.",
    ),
    check: bool = typer.Option(False, "--check", help="Only read it with its overrides, and say what is wrong."),
) -> None:
    """List the recipes and the hardware they fit; with NAME, show one."""
    from rich.console import Console

    from dovetail.core import recipe

    console = Console(highlight=False)
    if name is None:
        print_list(console)
        return
    training = training or recipe.training_of(name) or "pretrain"
    if check:
        from dovetail.cli.tune import read_settings, settings_class

        read_settings(settings_class(training), name, overrides or [])
        return
    show(console, name, overrides or [], chip, devices, slices, training)


def print_list(console) -> None:
    """Print all shipped recipes by training: size, length, the fewest chips of some kinds that hold them, purpose."""
    from rich.padding import Padding

    from dovetail.core import recipe

    for training in recipe.TRAININGS:
        console.print(f"[bold]{TITLES[training]}[/bold]: dovetail {training} NAME")
        chips = "".join(f"{chip:>{CHIPS}}" for chip in FITS_ON)
        length = "tokens" if training == "pretrain" else "run"
        head = f"  {'':{NAME}}{'parameters':>{SIZE}}{length:>{TOKENS + 2}}{'batch x length':>{ROWS + 3}}{chips}"
        console.print(head, style="dim")
        for row in sorted((_row(name, training) for name in recipe.shipped(training)), key=lambda row: row[0]):
            console.print(f"  [cyan]{row[1]:{NAME}}[/cyan]{row[2]}", soft_wrap=True)
            console.print(Padding(row[3], (0, 0, 0, 4)))
        console.print()
    console.print(f"{', '.join(FITS_ON)}: the fewest chips (a power of two) that hold it, as estimated.")
    console.print("One recipe and what it becomes: dovetail recipes NAME --chip H200 --devices 8")


def purpose(name: str) -> str:
    """Return what a recipe is for: the comment that its file begins with."""
    from itertools import takewhile

    from dovetail.core import recipe

    lines = takewhile(lambda line: line.startswith("#"), recipe.find(name).read_text().splitlines())
    return " ".join(line.lstrip("# ") for line in lines)


def _row(name: str, training: str) -> tuple:
    """Return (parameters as a number, to sort by; name; columns; purpose)."""
    from dovetail.cli.tune import settings_class
    from dovetail.core import recipe
    from dovetail.core.chips import CHIPS as KNOWN
    from dovetail.core.spec import matmul_flops, num_params
    from dovetail.models.spec import spec
    from dovetail.plan.derive import smallest
    from dovetail.plan.plans import num_experts

    settings = recipe.load(name, (), settings_class(training))
    cfg = _model_of(settings)
    size = num_params(spec(cfg))
    active = f" ({human(matmul_flops(spec(cfg)) / 2)} active)" if num_experts(cfg) > 1 else ""
    planned = settings.filled() if training == "rl" else settings
    counts = [smallest(cfg, planned, KNOWN[chip]) for chip in FITS_ON]
    fits = "".join(f"{str(count) if count else '-':>{CHIPS}}" for count in counts)
    rows = f"{planned.batch} x {planned.length}"
    columns = f"{human(size) + active:>{SIZE}}{_long(settings):>{TOKENS + 2}}{rows:>{ROWS + 3}}{fits}"
    return size, name, columns, purpose(name)


def _long(settings) -> str:
    """Return how long a recipe trains: tokens of pretraining, else steps or passes over the data."""
    if getattr(settings, "epochs", 0):
        return f"{settings.epochs:g} epoch" + ("s" if settings.epochs != 1 else "")
    if hasattr(settings, "epochs"):
        return f"{settings.steps} steps"
    return human(settings.total_steps * settings.tokens_per_step)


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
