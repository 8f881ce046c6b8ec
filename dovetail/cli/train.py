"""`dovetail pretrain`, `sft`, `dpo`, `distill`, `reward`, `rl` and `draft`: train from a recipe or from options."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import typer

from dovetail.core.errors import UserError

RECIPE = typer.Argument(
    None,
    metavar="[RECIPE]",
    help="Name of a shipped recipe (`dovetail recipes` lists them) or YAML file. Not needed with --model and --data.",
)
OVERRIDES = typer.Argument(
    None, metavar="[KEY=VALUE]...", help="Overrides, such as optimizer.lr=2e-4 steps=500 lora.r=16."
)
MODEL = typer.Option(
    "", "--model", help="Model to train: folder, .gguf file, hub id or catalogue name; short for model=."
)
DATA = typer.Option("", "--data", help="Training data: file, folder or dataset of the hub; short for data.path=.")
RUN_DIR = typer.Option("", "--run-dir", help="Folder of the run. Default: runs/RECIPE or runs/MODEL.")
EXPORT = typer.Option(None, "--export-hf", min=1, help="Steps between exports to a Hugging Face folder.")
SHOW_CONFIG = typer.Option(
    False, "--show-config", help="Print every key with its value, default and meaning, and exit."
)
QUIET = typer.Option(False, "--quiet", help="Do not show progress.")
NO_RECIPE = "-"  # in the spec of a job that gives overrides alone
HEAD = ("key", "value", "default", "meaning")
WIDEST = 32  # columns; a longer value shifts only its own line


def _command(name: str, help: str) -> Callable[..., None]:
    """Return the command of one kind of training; all take the same options."""

    def command(
        recipe: str = RECIPE,
        overrides: list[str] = OVERRIDES,
        model: str = MODEL,
        data: str = DATA,
        run_dir: str = RUN_DIR,
        export_hf: int = EXPORT,
        show_config: bool = SHOW_CONFIG,
        quiet: bool = QUIET,
    ) -> None:
        found, words = _words(name, recipe, overrides, model, data)
        words += [f"checkpoint.export_hf={export_hf}"] if export_hf else []
        if show_config:
            cls = settings_class(name, found, words)
            print_config(cls, read_settings(cls, found, words) if found or words else None)
            return
        from dovetail.core.host import process_age

        code = run(name, found, words, run_dir, show=not quiet, age=process_age())
        if code:
            raise typer.Exit(code)

    command.__name__, command.__doc__ = (
        name,
        f"{help}\n\n    Run the same command again to continue an interrupted run.",
    )
    return command


pretrain = _command("pretrain", "Pretrain a model from random or given weights.")
sft = _command("sft", "Fine-tune a model on conversations or completions.")
dpo = _command("dpo", "Train on preferences: DPO, IPO, KTO, ORPO, SimPO.")
distill = _command("distill", "Distill a larger model into a smaller one.")
reward = _command("reward", "Train a reward model on preference pairs.")
rl = _command("rl", "Train with rewards on sampled completions: GRPO, DAPO, GSPO, RLOO, PPO.")


def draft(
    model: str = typer.Argument(
        None,
        metavar="[MODEL]",
        help="Model to draft for: folder, hub id or catalogue name; or a recipe: name of a shipped one or YAML file.",
    ),
    overrides: list[str] = OVERRIDES,
    data: str = typer.Option("", "--data", help="Prompts: file, folder or dataset of the hub; short for data.path=."),
    kind: str = typer.Option(
        "", "--kind", help="dspark (default), dflash, dflash2, eagle3 or mtp; short for drafter.kind=."
    ),
    out: str = typer.Option("", "--out", help="New folder for the finished drafter."),
    run_dir: str = RUN_DIR,
    export_hf: int = EXPORT,
    show_config: bool = SHOW_CONFIG,
    quiet: bool = QUIET,
) -> None:
    """Train a drafter for speculative decoding.

    The model answers the prompts, the drafter learns from the answers, and the tokens per step on held-out prompts are
    reported.

    Run the same command again to continue an interrupted run.
    """
    is_recipe = bool(model) and (Path(model).is_file() or "=" in model or _is_shipped(model, "draft"))
    words = [*(overrides or []), *([f"drafter.kind={kind}"] if kind else [])]
    found, words = _words("draft", model if is_recipe else None, words, "" if is_recipe else model or "", data)
    words += [f"checkpoint.export_hf={export_hf}"] if export_hf else []
    if show_config:
        cls = settings_class("draft")
        print_config(cls, read_settings(cls, found, words) if found or words else None)
        return
    from dovetail.core.host import process_age

    if code := run("draft", found, words, run_dir, show=not quiet, age=process_age(), out=out):
        raise typer.Exit(code)


def _is_shipped(name: str, training: str) -> bool:
    from dovetail.core.recipe import shipped

    return name in shipped(training)


def _words(name: str, recipe: str | None, overrides: list[str] | None, model: str, data: str) -> tuple[str, list[str]]:
    """Return the recipe, or '', and all overrides. A first word with an = is an override, not a recipe."""
    words = list(overrides or [])
    if recipe and "=" in recipe and not Path(recipe).is_file():
        recipe, words = None, [recipe, *words]
    words += [f"model={model}"] if model else []
    found = "" if recipe in (None, NO_RECIPE) else recipe
    if data:
        has_sources = name == "pretrain" and "sources" in _fields_of_data(found, words)
        words.append(f"data.sources=[{{path: {data}}}]" if has_sources else f"data.path={data}")
    return found, words


def _fields_of_data(recipe: str, words: list[str]) -> list[str]:
    """Return the keys of the `data` section of pretraining, which depend on whether it is on text or on images."""
    from typing import get_type_hints

    return list(get_type_hints(get_type_hints(settings_class("pretrain", recipe, words))["data"]))


def settings_class(training: str, recipe: str = "", overrides: list[str] | tuple[str, ...] = ()) -> Any:
    """Return the settings class of a kind of training; that of pretraining depends on the recipe and its overrides."""
    from dovetail.core.choice import one_of
    from dovetail.core.recipe import TRAININGS

    one_of("--training", training, TRAININGS)
    return _kind(training, recipe, overrides)[0]


def read_settings(cls: Any, recipe: str, overrides: list[str]) -> Any:
    """Return the settings of a recipe with overrides; without a recipe, of the overrides alone."""
    from dovetail.core import recipe as recipes

    return recipes.create(cls, overrides) if recipe in ("", NO_RECIPE) else recipes.load(recipe, overrides, cls)


def _kind(name: str, recipe: str = "", overrides: list[str] | tuple[str, ...] = ()) -> tuple[Any, Any]:
    """Return the settings class of a training and the function that runs it."""
    if name == "pretrain":
        from dovetail.train.pretrain import pretrain_class, pretrain_settings

        return pretrain_class("" if recipe == NO_RECIPE else recipe, overrides), pretrain_settings
    if name == "rl":
        from dovetail.tune.rl.rl import rl_settings
        from dovetail.tune.rl.settings import Rl

        return Rl, rl_settings
    if name == "draft":
        from dovetail.tune.draft.draft import draft_settings
        from dovetail.tune.settings import Draft

        return Draft, draft_settings
    from dovetail.tune import settings
    from dovetail.tune.api import OBJECTIVES
    from dovetail.tune.run import tune_settings

    return getattr(settings, name.capitalize()), partial(tune_settings, objective=OBJECTIVES[name])


def run(
    name: str,
    recipe: str,
    overrides: list[str],
    run_dir: str = "",
    show: bool = True,
    age: float = 0.0,
    **more: Any,
) -> int:
    """Train and return the exit code.

    Args:
        name: The kind of training.
        recipe: The recipe; "" for none.
        overrides: Overrides.
        run_dir: The folder of the run.
        show: Whether to show progress.
        age: The seconds that the process has spent on this run already.
        more: Further arguments of the function that runs the training.
    """
    import time

    from dovetail.core.reporter import Reporter
    from dovetail.train.guard.stop import Stop
    from dovetail.train.pretrain import run_folder

    if not recipe and not overrides:
        raise UserError(
            f"expected a recipe or a model to train: dovetail {name} RECIPE, or dovetail {name} --model MODEL --data "
            "FILE; `dovetail recipes` lists the recipes and --show-config the keys"
        )
    since = time.monotonic() - age
    reporter = Reporter(show)
    with Stop(ends_process=True) as stop:
        cls, train = _kind(name, recipe, overrides)
        settings = read_settings(cls, recipe, overrides)
        folder = Path(run_dir) if run_dir else run_folder(recipe or settings.model, name)
        ended = train(settings, folder, stop=stop, since=since, reporter=reporter, **more)
    if reporter.show:
        _print_end(reporter.console, ended)
    return ended.code


def _print_end(console, ended) -> None:
    """Print how a training ended."""
    from dovetail.cli.tables import pairs
    from dovetail.train.guard.exits import meaning
    from dovetail.train.report.summary import read, summary

    if ended.code:
        console.print(meaning(ended.code), style="bold")
    elif not ended.trained:
        console.print(
            f"nothing to train: the run in {ended.folder} has finished its {ended.step:,} steps. Raise steps or epochs "
            "to continue it, or set another --run-dir for a new run",
            style="bold", markup=False, soft_wrap=True,
        )  # fmt: skip
    page = ended.folder / "report.html"
    if page.exists():
        found = read(ended.folder)
        console.print(pairs(found.name, summary(found)))
        console.print(f"report with curves, lost time and recipe: {page}", markup=False, soft_wrap=True)


def print_config(cls: type, settings: Any) -> None:
    """Print the keys of a settings class with the values of `settings`, or the defaults; highlight changed ones."""
    from rich.console import Console
    from rich.text import Text

    from dovetail.core.explain import explained

    keys = explained(cls, settings)
    rows: list[tuple[Any, ...]] = [HEAD, *((key.name, key.value, key.default, key.meaning) for key in keys)]
    wide = [max(min(len(row[column]), WIDEST) for row in rows) for column in range(3)]
    styles = ["bold", *("bold cyan" if key.is_set else "" for key in keys)]
    console = Console(highlight=False)
    for (*cells, meaning), style in zip(rows, styles, strict=True):
        padded = "  ".join(cell.ljust(width) for cell, width in zip(cells, wide, strict=True))
        console.print(Text(f"{padded}  {meaning}".rstrip(), style), soft_wrap=True)
