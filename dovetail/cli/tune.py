"""`dovetail sft`, `dpo`, `distill`, `reward`, `rl`, `merge`: a model's later schooling, on whatever machine this is."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import typer

from dovetail.cli.show_config import OPTION
from dovetail.core.errors import UserError

RECIPE = typer.Argument(
    None,
    metavar="[RECIPE]",
    help="A shipped recipe's name (`dovetail recipes` lists them) or a YAML file. Without one (or with `-`), --model "
    "and --data, or model= and data=, say what to train.",
)
OVERRIDES = typer.Argument(
    None, metavar="[KEY=VALUE]...", help="Keys to change, such as lora.r=16 optimizer.lr=2e-4 steps=500."
)
MODEL = typer.Option("", "--model", help="The model to train: a folder, .gguf file, hub id or name. As model=.")
DATA = typer.Option("", "--data", help="The records: a file, a folder or a dataset of the hub. As data.path=.")
RUN_DIR = typer.Option("", "--run-dir", help="Where the run is kept; default runs/RECIPE or runs/MODEL.")
QUIET = typer.Option(False, help="No live line.")


def _command(name: str, help: str) -> Callable[..., None]:
    """Return the command of one kind of training: all take the same arguments."""

    def command(
        recipe: str = RECIPE,
        overrides: list[str] = OVERRIDES,
        model: str = MODEL,
        data: str = DATA,
        run_dir: str = RUN_DIR,
        show_config: bool = OPTION,
        quiet: bool = QUIET,
    ) -> None:
        recipe, words = _given(recipe, overrides, model, data)
        if show_config:
            from dovetail.cli.show_config import show_config as show

            cls = _kind(name)[0]
            show(cls, read_settings(cls, recipe, words) if recipe != "-" or words else None)
        else:
            _tune(name, recipe, words, run_dir, quiet)

    command.__name__, command.__doc__ = name, help
    return command


sft = _command("sft", "Fine-tune on conversations; started again, it goes on where it stopped.")
dpo = _command("dpo", "Learn from preferences: DPO, IPO, KTO, ORPO, SimPO.")
distill = _command("distill", "Learn from a larger model.")
reward = _command("reward", "Train a reward model: scores of answers, learnt from pairs.")
rl = _command("rl", "Learn from rewards of its own answers: GRPO, DAPO, GSPO, RLOO, PPO.")


def _given(recipe: str | None, overrides: list[str] | None, model: str, data: str) -> tuple[str, list[str]]:
    """Return the recipe (`-` for none) and all overrides. A first word with an = is an override, not a recipe."""
    words = list(overrides or [])
    if recipe and "=" in recipe and not Path(recipe).is_file():
        recipe, words = None, [recipe, *words]
    words += [f"model={model}"] if model else []
    words += [f"data.path={data}"] if data else []
    return recipe or "-", words


def merge(
    model: str = typer.Argument(..., help="The adapter's base: a folder, a hub id, a name."),
    adapter: str = typer.Argument(..., help="A folder in PEFT's format."),
    to: str = typer.Argument(..., help="A new folder."),
    dtype: str = typer.Option(None, help="bf16, f32 or f16; the model's own unless given."),
) -> None:
    """Write an adapter into its model's weights: a Hugging Face folder."""
    from dovetail.cli.progress import bar
    from dovetail.tune.api import merge as run

    with bar() as progress:
        run(model, adapter, to, dtype, progress)
    typer.echo(f"merged into {to}: serve it with `dovetail serve {to}`")


def settings_class(training: str) -> Any:
    """Of pretraining too."""
    from dovetail.core.choice import one_of
    from dovetail.core.recipe import TRAININGS
    from dovetail.train.settings import Pretrain

    one_of("--training", training, TRAININGS)
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
    from dovetail.tune.api import OBJECTIVES
    from dovetail.tune.run import tune_settings

    return getattr(settings, name.capitalize()), partial(tune_settings, objective=OBJECTIVES[name])


def _tune(name: str, recipe: str, overrides: list[str], run_dir: str, quiet: bool) -> None:
    import time

    from rich.console import Console

    from dovetail.cli.errors import last_words
    from dovetail.cli.pretrain import say_end
    from dovetail.cli.progress import bar
    from dovetail.core.host import process_age
    from dovetail.train.guard.stop import Stop
    from dovetail.train.pretrain import run_folder

    if recipe == "-" and not overrides:
        raise UserError(
            f"say what to train: dovetail {name} RECIPE, or dovetail {name} --model MODEL --data FILE; --show-config "
            "lists all keys"
        )
    since = time.monotonic() - process_age()
    console = Console(stderr=True, highlight=False)
    with Stop(ends_process=True) as stop:
        cls, run = _kind(name)
        settings = read_settings(cls, recipe, overrides)
        folder = Path(run_dir) if run_dir else run_folder(settings.model if recipe == "-" else recipe, name)
        ended = run(
            settings, folder, stop=stop, since=since,
            show=not quiet, bar=None if quiet else bar, last_words=last_words,
            explain=lambda lines: quiet or console.print("\n".join(lines), style="dim", soft_wrap=True),
            told=lambda line: quiet or console.print(line, style="dim", soft_wrap=True),
        )  # fmt: skip
    if not quiet:
        say_end(console, ended)
    if ended.code:
        raise typer.Exit(ended.code)
