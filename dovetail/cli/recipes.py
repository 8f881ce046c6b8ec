"""`dovetail recipes`: list the shipped recipes, or show one and what is derived for given hardware.

The list is read from `recipes/sizes.json`, because computing it needs jax. A test compares that file with `sizes()`;
`python -m dovetail.cli.recipes` writes it.
"""

from typing import Any

import typer

from dovetail.core.units import format_count

FITS_ON = ("v5e", "v5p", "H100", "H200")
TITLES = {
    "pretrain": "pretraining", "sft": "supervised fine-tuning", "dpo": "preferences", "reward": "reward models",
    "distill": "distillation", "rl": "reinforcement learning", "draft": "drafters",
}  # fmt: skip
NAME, SIZE, TOKENS, ROWS, CHIPS = 23, 22, 8, 13, 5  # widths of the columns
SIZES = "sizes.json"


def recipes(
    name: str = typer.Argument(None, help="Name or file of a recipe to show, with what is derived from it."),
    overrides: list[str] = typer.Argument(None, metavar="[KEY=VALUE]...", help="Overrides, such as optimizer.lr=1e-3."),
    chip: str = typer.Option("H200", help="Chip to derive for: v5e, v5p, v6e, TPU7x, H100, H200, ... or cpu."),
    devices: int = typer.Option(8, min=1, help="Number of chips."),
    slices: int = typer.Option(1, min=1, help="Number of slices that the chips form."),
    training: str = typer.Option(
        "",
        help="Kind of training: pretrain, sft, dpo, reward, distill, rl or draft. Default: that of a shipped recipe, "
        "else pretrain.",
    ),
    check: bool = typer.Option(False, "--check", help="Only read the recipe and its overrides and report errors."),
) -> None:
    """List the shipped recipes and the hardware they fit; with NAME, show one."""
    from rich.console import Console

    from dovetail.core import recipe

    console = Console(highlight=False)
    if name is None:
        print_list(console)
        return
    training = training or recipe.training_of(name) or "pretrain"
    if check:
        from dovetail.cli.train import read_settings, settings_class

        read_settings(settings_class(training, name, overrides or []), name, overrides or [])
        return
    show(console, name, overrides or [], chip, devices, slices, training)


def print_list(console) -> None:
    """Print all shipped recipes by training: size, length, the smallest number of chips that holds them, purpose."""
    import json

    from rich.padding import Padding

    from dovetail.core import recipe

    rows = json.loads((recipe.SHIPPED / SIZES).read_text())
    for training in filter(recipe.shipped, recipe.TRAININGS):
        console.print(f"[bold]{TITLES[training]}[/bold]: dovetail {training} NAME")
        chips = "".join(f"{chip:>{CHIPS}}" for chip in FITS_ON)
        length = "tokens" if training == "pretrain" else "run"
        head = f"  {'':{NAME}}{'parameters':>{SIZE}}{length:>{TOKENS + 2}}{'batch x length':>{ROWS + 3}}{chips}"
        console.print(head, style="dim")
        for name in sorted(recipe.shipped(training), key=lambda name: rows[name]["parameters"]):
            console.print(f"  [cyan]{name:{NAME}}[/cyan]{_columns(rows[name])}", soft_wrap=True)
            console.print(Padding(purpose(name), (0, 0, 0, 4)))
        console.print()
    console.print(f"{', '.join(FITS_ON)}: estimated smallest number of chips, a power of two, that holds the training.")
    console.print("Show one recipe for given hardware: dovetail recipes NAME --chip H200 --devices 8")


def purpose(name: str) -> str:
    """Return the comment at the top of a recipe's file."""
    from itertools import takewhile

    from dovetail.core import recipe

    lines = takewhile(lambda line: line.startswith("#"), recipe.find(name).read_text().splitlines())
    return " ".join(line.lstrip("# ") for line in lines)


def _columns(row: dict[str, Any]) -> str:
    active = f" ({format_count(row['active'])} active)" if row["active"] else ""
    fits = "".join(f"{row['chips'][chip] or '-':>{CHIPS}}" for chip in FITS_ON)
    return (
        f"{format_count(row['parameters']) + active:>{SIZE}}{row['run']:>{TOKENS + 2}}{row['rows']:>{ROWS + 3}}{fits}"
    )


def sizes() -> dict[str, dict[str, Any]]:
    """Compute the rows of all shipped recipes."""
    from dovetail.core import recipe

    return {name: _sizes(name, training) for training in recipe.TRAININGS for name in recipe.shipped(training)}


def _sizes(name: str, training: str) -> dict[str, Any]:
    from dovetail.cli.train import settings_class
    from dovetail.core import recipe
    from dovetail.core.chips import CHIPS as KNOWN
    from dovetail.core.spec import matmul_flops, num_params
    from dovetail.models.spec import spec, text_spec
    from dovetail.plan.plans import num_experts
    from dovetail.plan.refusal import smallest

    settings = recipe.load(name, (), settings_class(training, name))
    cfg = _model_of(settings)
    planned = _planned(settings, training)
    return {
        "parameters": num_params(spec(cfg)),
        "active": int(matmul_flops(text_spec(cfg)) / 2) if num_experts(cfg) > 1 else 0,
        "run": _run_length(planned if training == "pretrain" else settings),
        "rows": f"{planned.batch} x {planned.length}",
        "chips": {chip: smallest(cfg, planned, KNOWN[chip]) for chip in FITS_ON},
    }


def _run_length(settings) -> str:
    """Return how long a recipe trains: tokens (or patches) for pretraining, else steps or epochs."""
    if getattr(settings, "epochs", 0):
        return f"{settings.epochs:g} epoch" + ("s" if settings.epochs != 1 else "")
    if hasattr(settings, "epochs") and not hasattr(settings, "objective"):
        return f"{settings.steps} steps"
    return format_count(settings.total_steps * settings.tokens_per_step)


def show(console, name: str, overrides: list[str], chip: str, devices: int, slices: int, training: str) -> None:
    """Print the recipe's file, then what is derived for the hardware."""
    from rich.syntax import Syntax

    from dovetail.cli.train import settings_class
    from dovetail.core import recipe
    from dovetail.core.chips import chip_named
    from dovetail.plan.derive import derive

    settings = recipe.load(name, overrides, settings_class(training, name, overrides))
    kind = None if chip.lower() == "cpu" else chip_named(chip)
    console.print(Syntax(recipe.find(name).read_text().rstrip(), "yaml", background_color="default", word_wrap=True))
    if overrides:
        console.print("with " + " ".join(overrides), markup=False)
    console.print()
    cfg, settings = _model_of(settings), _planned(settings, training, devices)
    beside = _checked(cfg, settings, training, kind.device_hbm if kind else None)
    devices -= settings.spare_devices if training == "rl" else 0
    for line in derive(cfg, settings, kind, devices, slices, beside=beside).explain():
        console.print(line, markup=False)


def _planned(settings, training: str, devices: int = 1):
    """Return the settings with what the planner needs: the rows of RL, a teacher's config, an image's patches."""
    if training == "pretrain":
        return settings.for_model(_model_of(settings)) if hasattr(settings, "for_model") else settings
    from dovetail.tune.policy import with_teacher_cfg

    return with_teacher_cfg(settings.filled(devices) if training == "rl" else settings)


def _checked(cfg, settings, training: str, hbm: int | None) -> dict[str, int]:
    """Refuse a model that the recipe cannot train; return the bytes of other things on the device."""
    if training == "pretrain":
        from dovetail.train.settings import Pretrain, check_pretrain

        if isinstance(settings, Pretrain):  # _planned has checked a model of images
            check_pretrain(settings.loss, cfg)
        return {}
    from dovetail.tune.policy import beside_adapters, check_model

    check_model(settings, cfg)
    if training != "rl":
        return beside_adapters(settings, cfg)
    from dovetail.tune.rl.settings import beside_policy, check_rl_model

    check_rl_model(settings, cfg)
    return beside_policy(settings, cfg, hbm)


def _model_of(settings):
    from dovetail.io.load import config_of
    from dovetail.models.config import scored

    cfg = config_of(settings.model)
    return scored(cfg) if settings.scores else cfg


def _write_sizes() -> None:
    import json

    from dovetail.core.recipe import SHIPPED

    (SHIPPED / SIZES).write_text(json.dumps(sizes(), indent=1) + "\n")


if __name__ == "__main__":
    _write_sizes()
