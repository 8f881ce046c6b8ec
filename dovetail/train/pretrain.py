"""Pretraining, for a program (`dt.pretrain`) and for the command: a recipe, its rows and its objective."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.core import recipe as recipes
from dovetail.core.errors import UserError
from dovetail.train.launch import Ended, launch
from dovetail.train.settings import Pretrain

if TYPE_CHECKING:
    from dovetail.io.hub import Progress
    from dovetail.io.tokenizer import Tokenizer
    from dovetail.train.objective import Objective
    from dovetail.train.prepare import Ready
    from dovetail.train.rows import Opened

Bar = Callable[[], AbstractContextManager["Progress"]]


def pretrain(recipe: str | Path | Pretrain, *, run_dir: str | Path = "", show: bool = True, **overrides: Any) -> Ended:
    """Train a model from a recipe; called again with the same folder, it goes on where it stopped.

        ended = dt.pretrain("tiny", steps=20, optimizer={"lr": 1e-3}, run_dir="runs/first")
        ended.code, ended.metrics["loss"], ended.folder / "report.html"

    recipe: a shipped recipe's name (`dovetail recipes` lists them), a YAML file, or settings.
    run_dir: where the run is kept; runs/NAME unless given.
    show: the live line, on stderr.
    overrides: a recipe's keys; nested ones as a dict or dotted, `**{"optimizer.lr": 1e-3}`.

    A first SIGTERM or ctrl-C lets the step under way end and saves the run (`code` says so); before the first step it
    raises SystemExit. Where the environment says that several processes train together, each must call this, and one
    that fails ends them all.
    """
    if isinstance(recipe, Pretrain):
        settings, name = recipes.change(recipe, overrides), recipe.model
    else:
        settings, name = recipes.load(str(recipe), overrides, Pretrain), str(recipe)
    return pretrain_settings(settings, Path(run_dir) if run_dir else run_folder(name), show=show)


def run_folder(name: str, training: str = "") -> Path:
    """Return where a run is kept unless it is said otherwise. `name`: of its recipe or its model; `training`: if it is
    not pretraining."""
    path = Path(name)
    stem = path.stem if path.suffix in (".yaml", ".yml", ".gguf", ".json") else path.name  # Qwen3-0.6B has no suffix
    is_named = not training or stem.endswith(f"-{training}")
    return Path("runs") / (stem if is_named else f"{stem}-{training}")


def pretrain_settings(settings: Pretrain, folder: Path, *, bar: Bar | None = None, **how: Any) -> Ended:
    """`bar` shows the progress of tokenising, in the first process; for `how`, see train.launch."""
    return launch(settings, folder, _objective, partial(_open_rows, bar=bar), **how)


def _objective(settings: Pretrain) -> Objective:
    from dovetail.train.next_token import next_token  # here and below: launch says when jax may be imported

    return next_token(settings)


def _open_rows(settings: Pretrain, ready: Ready, bar: Bar | None) -> Opened:
    import jax

    from dovetail.data.encoder import beside_model
    from dovetail.data.loader import open_data
    from dovetail.train.rows import Opened

    tokenizer = beside_model(settings.model, settings.init)
    index, count = ready.rows_here()
    with bar() if bar and jax.process_index() == 0 else nullcontext() as progress:
        rows, held_out = open_data(
            settings.data, settings.length, settings.batch, tokenizer, host_index=index, host_count=count,
            progress=progress,
        )  # fmt: skip
    if rows.vocab_size > ready.cfg.vocab:
        raise UserError(
            f"the tokenizer has {rows.vocab_size:,} ids and the model's vocabulary {ready.cfg.vocab:,}: set "
            "data.tokenizer to the model's own, or vocab_size in the model's config.json"
        )
    return Opened(rows, held_out, _tokenizer(settings, tokenizer), inputs=rows.fingerprints)


def _tokenizer(settings: Pretrain, beside: Tokenizer | None) -> Tokenizer | None:
    if settings.data.tokenizer == "bytes":
        from dovetail.io.bytes_tokenizer import byte_tokenizer

        return byte_tokenizer()
    if not settings.data.tokenizer:
        return beside
    from dovetail.data.encoder import find_tokenizer

    return find_tokenizer(settings.data.tokenizer)
