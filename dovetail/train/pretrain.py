"""Pretrain from a recipe: `dt.pretrain` and `dovetail pretrain`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.core import recipe as recipes
from dovetail.core.errors import RecipeError
from dovetail.core.reporter import Reporter
from dovetail.core.training import TorchModel
from dovetail.train.image_pretrain import image_pretrain_settings
from dovetail.train.image_settings import ImagePretrain
from dovetail.train.launch import Ended, launch
from dovetail.train.settings import Pretrain, shape_key

if TYPE_CHECKING:
    from dovetail.io.tokenizer import Tokenizer
    from dovetail.train.objective import Objective
    from dovetail.train.prepare import Ready
    from dovetail.train.rows import Opened


def pretrain(
    recipe: str | Path | Pretrain | ImagePretrain, *, run_dir: str | Path = "", show: bool = True, **overrides: Any
) -> Ended:
    """Train a model from a recipe; a second call with the same folder continues the run.

        ended = dt.pretrain("tiny", steps=20, optimizer={"lr": 1e-3}, run_dir="runs/first")
        ended.code, ended.metrics["loss"], ended.folder / "report.html"

    A first SIGTERM or ctrl-C lets the current step end and saves the run (see `Ended.code`); before the first step it
    raises SystemExit. If the environment names several processes, each must call this, and a failure of one ends all.

    Args:
        recipe: A shipped recipe's name (`dovetail recipes` lists them), a YAML file, or settings.
        run_dir: The run's folder; default: runs/NAME.
        show: Whether to show the derived settings, progress and the live line on stderr.
        overrides: Recipe keys; nested ones as a dict or dotted, `**{"optimizer.lr": 1e-3}`.

    Returns:
        How the training ended.

    Raises:
        UserError: The recipe, the data or the devices do not fit together.
    """
    if isinstance(recipe, Pretrain | ImagePretrain):
        settings, name = recipes.change(recipe, overrides), str(recipe.model)
    else:
        settings, name = recipes.load(str(recipe), overrides, pretrain_class(str(recipe), overrides)), str(recipe)
    folder = Path(run_dir) if run_dir else run_folder(name)
    return pretrain_settings(settings, folder, reporter=Reporter(show))


def pretrain_class(recipe: str, overrides: Sequence[str] | Mapping[str, Any] = ()) -> Any:
    """Return the settings class of a recipe with overrides: ImagePretrain if it has the key `objective`."""
    given = overrides if isinstance(overrides, Mapping) else [word.partition("=")[0] for word in overrides]
    try:
        stored = recipes.raw(recipe) if recipe else {}
    except RecipeError:  # reading the recipe reports it
        stored = {}
    return ImagePretrain if "objective" in (*given, *stored) else Pretrain


def run_folder(name: str, training: str = "") -> Path:
    """Return the default folder of a run.

    Args:
        name: The recipe's or the model's name.
        training: The kind of training, if it is not pretraining.
    """
    path = Path(name)
    stem = path.stem if path.suffix in (".yaml", ".yml", ".gguf", ".json") else path.name  # Qwen3-0.6B has no suffix
    is_named = not training or stem.endswith(f"-{training}")
    return Path("runs") / (stem if is_named else f"{stem}-{training}")


def pretrain_settings(
    settings: Pretrain | ImagePretrain, folder: Path, *, reporter: Reporter | None = None, **how: Any
) -> Ended:
    """Run the settings in `folder`; for `how` see train.launch."""
    reporter = reporter or Reporter()
    if isinstance(settings, ImagePretrain):
        return image_pretrain_settings(settings, folder, reporter=reporter, **how)
    return launch(settings, folder, _objective, partial(_open_rows, reporter=reporter), reporter=reporter, **how)


def _objective(settings: Pretrain) -> Objective:
    from dovetail.train.external import external_objective  # here and below: launch decides when jax may be imported
    from dovetail.train.next_token import next_token

    return external_objective(settings) if isinstance(settings.model, TorchModel) else next_token(settings)


def _open_rows(settings: Pretrain, ready: Ready, reporter: Reporter) -> Opened:
    from dovetail.data.encoder import beside_model
    from dovetail.data.loader import open_data
    from dovetail.train.rows import Opened

    tokenizer = beside_model(settings.tokenizer_place, settings.init)
    index, count = ready.rows_here()
    with reporter.progress() as progress:
        rows, held_out = open_data(
            settings.data, settings.length, settings.batch, tokenizer, host_index=index, host_count=count,
            progress=progress,
        )  # fmt: skip
    if rows.vocab_size > ready.cfg.vocab:
        raise RecipeError(
            f"the tokenizer has {rows.vocab_size:,} ids and the model's vocabulary {ready.cfg.vocab:,}: set "
            "data.tokenizer to the model's own, or vocab_size in the model's config.json",
            param="data.tokenizer",
        )
    return Opened(rows, held_out, _tokenizer(settings, tokenizer), inputs=rows.fingerprints, rows_key=_rows_key)


def _rows_key(settings: Pretrain) -> dict[str, Any]:
    return {"data": recipes.dump(settings.data), **shape_key(settings)}


def _tokenizer(settings: Pretrain, beside: Tokenizer | None) -> Tokenizer | None:
    if settings.data.tokenizer == "bytes":
        from dovetail.io.tokenizer import byte_tokenizer

        return byte_tokenizer()
    if not settings.data.tokenizer:
        return beside
    from dovetail.data.encoder import find_tokenizer

    return find_tokenizer(settings.data.tokenizer)
