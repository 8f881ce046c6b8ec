"""`dovetail sft`, `dpo`, `distill`, `reward`, `rl`, `merge`: a model's later schooling, on whatever machine this is."""

from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

RECIPE = typer.Argument(
    ..., help="A YAML file, or `-` for none: then model=, data.path= and steps= or epochs= must be given."
)
OVERRIDES = typer.Argument(None, help="Keys to change, such as lora.rank=16 optimizer.lr=2e-4 steps=500.")
RUN_DIR = typer.Option("", "--run-dir", help="Where the run is kept; default runs/RECIPE.")
QUIET = typer.Option(False, help="No live line.")


def sft(recipe: str = RECIPE, overrides: list[str] = OVERRIDES, run_dir: str = RUN_DIR, quiet: bool = QUIET) -> None:
    """Fine-tune on conversations; started again, it goes on where it stopped."""
    _tune("sft", recipe, overrides, run_dir, quiet)


def dpo(recipe: str = RECIPE, overrides: list[str] = OVERRIDES, run_dir: str = RUN_DIR, quiet: bool = QUIET) -> None:
    """Learn from preferences: DPO, IPO, KTO, ORPO, SimPO."""
    _tune("dpo", recipe, overrides, run_dir, quiet)


def distill(
    recipe: str = RECIPE, overrides: list[str] = OVERRIDES, run_dir: str = RUN_DIR, quiet: bool = QUIET
) -> None:
    """Learn from a larger model."""
    _tune("distill", recipe, overrides, run_dir, quiet)


def reward(recipe: str = RECIPE, overrides: list[str] = OVERRIDES, run_dir: str = RUN_DIR, quiet: bool = QUIET) -> None:
    """Train a reward model: scores of answers, learnt from pairs."""
    _tune("reward", recipe, overrides, run_dir, quiet)


def rl(recipe: str = RECIPE, overrides: list[str] = OVERRIDES, run_dir: str = RUN_DIR, quiet: bool = QUIET) -> None:
    """Learn from rewards of its own answers: GRPO, DAPO, GSPO, RLOO, PPO."""
    _tune("rl", recipe, overrides, run_dir, quiet)


def merge(
    model: str = typer.Argument(..., help="The adapter's base: a folder, a hub id, a name."),
    adapter: str = typer.Argument(..., help="A folder in PEFT's format."),
    to: str = typer.Argument(..., help="A new folder."),
    dtype: str = typer.Option(None, help="bf16, f32 or f16; the model's own unless given."),
) -> None:
    """Write an adapter into its model's weights: a Hugging Face folder."""
    from dovetail.cli.progress import bar
    from dovetail.tune.merge import merge as run

    with bar() as progress:
        run(model, adapter, to, dtype, progress)
    typer.echo(f"merged into {to}: serve it with `dovetail serve {to}`")


def settings_class(training: str) -> Any:
    """Of pretraining too."""
    from dovetail.core.choice import one_of
    from dovetail.train.settings import Pretrain

    one_of("--training", training, ("pretrain", *_OBJECTIVES, "rl"))
    return Pretrain if training == "pretrain" else _kind(training)[0]


def read_settings(cls: Any, recipe: str, overrides: list[str]) -> Any:
    """Read a recipe with its overrides; `-` is no recipe, and the overrides alone."""
    from dovetail.core import recipe as recipes

    return recipes.create(cls, overrides) if recipe == "-" else recipes.load(recipe, overrides, cls)


def _kind(name: str) -> tuple[Any, Any]:
    """(the class of its settings, what runs them)."""
    if name == "rl":
        from dovetail.tune.rl.rl import rl_settings
        from dovetail.tune.rl.settings import Rl

        return Rl, rl_settings
    from dovetail.tune import settings
    from dovetail.tune.run import tune_settings

    cls, (home, objective) = getattr(settings, name.capitalize()), _OBJECTIVES[name]
    return cls, partial(tune_settings, objective=getattr(import_module(f"dovetail.tune.{home}"), objective))


_OBJECTIVES = {
    "sft": ("sft", "sft_objective"), "dpo": ("dpo", "dpo_objective"), "distill": ("distillation", "objective"),
    "reward": ("reward_model", "reward_objective"),
}  # fmt: skip


def _tune(name: str, recipe: str, overrides: list[str] | None, run_dir: str, quiet: bool) -> None:
    import time

    from rich.console import Console

    from dovetail.cli.errors import last_words
    from dovetail.cli.pretrain import say_end
    from dovetail.cli.progress import bar
    from dovetail.core.host import process_age
    from dovetail.train.guard.stop import Stop

    since = time.monotonic() - process_age()
    console = Console(stderr=True, highlight=False)
    with Stop(ends_process=True) as stop:
        cls, run = _kind(name)
        settings = read_settings(cls, recipe, overrides or [])
        stem = Path(settings.model if recipe == "-" else recipe).stem
        ended = run(
            settings, Path(run_dir) if run_dir else Path("runs") / f"{stem}-{name}", stop=stop, since=since,
            show=not quiet, bar=None if quiet else bar, last_words=last_words,
            explain=lambda lines: quiet or console.print("\n".join(lines), style="dim", soft_wrap=True),
            told=lambda line: quiet or console.print(line, style="dim", soft_wrap=True),
        )  # fmt: skip
    if not quiet:
        say_end(console, ended)
    if ended.code:
        raise typer.Exit(ended.code)
