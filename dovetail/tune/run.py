"""Run a fine-tuning from its settings to its end: data, columns, samples. All kinds of fine-tuning share it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

import jax

from dovetail.core import recipe as recipes
from dovetail.core.compute import compute_of
from dovetail.core.errors import CheckpointError
from dovetail.core.files import write_atomic
from dovetail.core.fingerprint import content_of
from dovetail.core.reporter import Reporter
from dovetail.core.training import TorchModel
from dovetail.core.types import Params
from dovetail.data.encoder import find_tokenizer
from dovetail.data.example_encoder import template_source
from dovetail.data.example_rows import ExampleLoader, open_examples
from dovetail.data.example_store import ExampleStats
from dovetail.io.adapter_folder import adapter_tokenizer
from dovetail.io.hub import resolve
from dovetail.io.images.processor import ImageProcessor
from dovetail.io.load import config_of, find_processor, open_checkpoint
from dovetail.io.tokenizer import Tokenizer
from dovetail.models.decoder import greedy
from dovetail.models.towers.vision import Vision
from dovetail.train.launch import Ended, launch
from dovetail.train.objective import Objective, step_context
from dovetail.train.prepare import Ready
from dovetail.train.pretrain import run_folder
from dovetail.train.rows import Opened, Sampled
from dovetail.train.step import compute_copy
from dovetail.tune.computed import computed_for, with_columns
from dovetail.tune.policy import policy_of, with_teacher_cfg
from dovetail.tune.settings import Tuning, rows_key

S = TypeVar("S", bound=Tuning)
Records = list[Any] | Callable[[S], list[Any]] | None
BAD = "bad_records.txt"


def tune(
    cls: type[S],
    objective: Callable[[S], Objective],
    recipe: str | Path | Tuning | None,
    data: Any,
    run_dir: str | Path,
    *,
    overrides: Mapping[str, Any],
    show: bool = True,
) -> Ended:
    """Train from a program's arguments: see dovetail.tune.api."""
    settings, records, folder = given_settings(cls, recipe, data, run_dir, overrides)
    return tune_settings(settings, folder, objective, records=records, reporter=Reporter(show))


def given_settings(
    cls: type[S], recipe: str | Path | Tuning | None, data: Any, run_dir: str | Path, overrides: Mapping[str, Any]
) -> tuple[S, list[Any] | None, Path]:
    """Return the settings of a program's arguments, its own records (None: files), and the folder of the run."""
    records, keys = _taken(data)
    given = {**keys, **overrides}
    if recipe is None:
        settings = recipes.create(cls, given)
        name = str(settings.model)
    elif isinstance(recipe, cls):
        settings, name = recipes.change(recipe, given), str(recipe.model)
    else:
        settings, name = recipes.load(str(recipe), given, cls), str(recipe)
    folder = Path(run_dir) if run_dir else run_folder(name, cls.__name__.lower())
    return settings, records, folder


def tune_settings(
    settings: S,
    folder: Path,
    objective: Callable[[S], Objective],
    *,
    records: Records[S] = None,
    settle: Callable[[S, ExampleLoader], S] = lambda settings, rows: settings,
    reporter: Reporter | None = None,
    **how: Any,
) -> Ended:
    """Run the settings in `folder`.

    Args:
        settings: The recipe.
        folder: The folder of the run.
        objective: Returns the objective of a recipe.
        records: A program's own records, or a function that returns them; None: those of the recipe's files.
        settle: Fills in keys that depend on the rows.
        reporter: Prints progress.
        how: Further arguments of train.launch.launch.
    """
    reporter = reporter or Reporter()
    data = _Data(records, reporter, settle)
    open_rows = partial(_open_rows, folder=folder, data=data, reporter=reporter)
    return launch(settings, folder, objective, open_rows, settle=data.settle, reporter=reporter, **how)


def _taken(data: Any) -> tuple[list[Any] | None, dict[str, Any]]:
    """Return a program's own records (None: files), and the keys of the recipe's `data` section."""
    if data is None:
        return None, {}
    if isinstance(data, Mapping):
        return None, {"data": dict(data)}
    if isinstance(data, str | Path):
        return None, {"data": {"path": str(data)}}
    records = list(data)
    digest = hashlib.sha256(json.dumps(records, sort_keys=True, default=content_of).encode()).hexdigest()[:12]
    return records, {"data": {"path": f"{len(records)} records of a program, {digest}"}}


class _Data:
    """The examples of a run, read once before its plan: they decide the length of rows and the steps of an epoch."""

    def __init__(self, records: Any, reporter: Reporter, settle: Callable[[Any, ExampleLoader], Any]):
        self._records, self._reporter, self._settle, self._read = records, reporter, settle, None

    def settle(self, settings: S) -> S:
        """Return the settings with the steps and the row length that the examples decide, and the teacher's config."""
        rows = self.read(settings)[0]
        if settings.tokens:  # counted without padding
            per_step = rows.tokens_per_epoch / rows.steps_per_epoch
            settings = replace(settings, tokens=0, steps=math.ceil(settings.tokens / per_step))
        if settings.takes_images:
            settings = replace(settings, image_patches=rows.examples.max_patches)
            settings = replace(settings, image_items=rows.max_items())
        settings = with_teacher_cfg(replace(settings.with_steps(rows.rows_per_epoch), length=rows.length))
        return self._settle(settings, rows)

    def read(self, settings: Tuning) -> tuple[ExampleLoader, ExampleLoader | None, ExampleStats]:
        """Return the rows of all processes, the held-out rows, and the counts of the records."""
        if self._read is None:
            records: Any = self._records(settings) if callable(self._records) else self._records
            with self._reporter.progress() as progress:
                self._read = open_examples(
                    settings.data, settings.length, settings.batch, tokenizer_of(settings), settings.examples,
                    columns=settings.columns, records=records, progress=progress, packing=settings.packing,
                    trained=settings.trained_tokens, vision=vision_of(settings),
                )  # fmt: skip
        return self._read


def _open_rows(settings: Tuning, ready: Ready, *, folder: Path, data: _Data, reporter: Reporter) -> Opened:
    tokenizer = tokenizer_of(settings)
    whole, apart, stats = data.read(settings)
    rows, held_out = (each and each.of_host(*ready.rows_here()) for each in (whole, apart))
    assert rows is not None
    if tokenizer.vocab_size > ready.cfg.vocab:
        raise CheckpointError(
            f"the tokenizer has {tokenizer.vocab_size:,} ids and the model's vocabulary only {ready.cfg.vocab:,}: use "
            "the model's own tokenizer"
        )
    if jax.process_index() == 0:
        reporter.line(f"{stats}\n{_pass(settings, whole)}")
        if stats.bad:
            _list_bad(stats.bad, folder / BAD, reporter)
    if (wanted := computed_for(settings, ready)) is not None:
        rows, held_out = with_columns(wanted, rows, held_out, settings, ready, folder)
    samples = PromptSampler.of(settings, ready, tokenizer)
    return Opened(rows, held_out, tokenizer, samples, inputs=rows.fingerprints, rows_key=rows_key)


def _list_bad(bad: Sequence[str], path: Path, reporter: Reporter) -> None:
    """Write the rejected records into a file, and report the first few."""
    write_atomic(path, "".join(f"{line}\n" for line in bad))
    shown = "".join(f"\n  {line}" for line in bad[:5])
    reporter.line(f"left out{shown}\n  all {len(bad):,} are listed in {path}")


def _pass(settings: Tuning, rows: ExampleLoader) -> str:
    """Return a line with the examples of a step and the steps of a pass over the data."""
    unit = "pairs" if settings.examples == "preference" else "examples"
    steps, total = rows.steps_per_epoch, rows.examples_per_epoch
    number = f"about {total / steps:,.0f} {unit}" if settings.packing else f"{min(settings.batch, total):,} {unit}"
    padding = 1 - rows.tokens_per_epoch / (steps * settings.batch * rows.length)
    return (
        f"{number} per step, in {settings.batch:,} rows of {rows.length:,} tokens ({padding:.0%} padding); "
        f"{steps:,} {'step is' if steps == 1 else 'steps are'} one pass over the {total:,} {unit}"
    )


def tokenizer_of(settings: Tuning) -> Tokenizer:
    """Return the tokenizer of examples, samples and exports.

    Its chat template is that of `data.template`, of the adapter in `from_adapter`, or of the model.
    """
    model = settings.model
    if isinstance(model, TorchModel):
        found = find_tokenizer(model.tokenizer) if model.tokenizer else None
    else:
        found = open_checkpoint(resolve(settings.weights))[2]
    if settings.from_adapter:
        found = adapter_tokenizer(settings.from_adapter, found)
    if found is None:
        raise CheckpointError(
            f"{settings.weights} has no tokenizer.json, which fine-tuning needs: add it to the folder"
            if isinstance(model, str)
            else "model.tokenizer must name a tokenizer for a torch module: a folder, a name or a hub id",
            param="model" if isinstance(model, str) else "model.tokenizer",
        )
    template = template_source(settings.data)
    return found if template is None else found.with_templates(template)


def vision_of(settings: Tuning) -> tuple[ImageProcessor, Vision] | None:
    """Return the model's image processor and how it sees images; None where images are not trained on."""
    model = settings.model
    vision = config_of(model).vision if settings.takes_images and isinstance(model, str) else None
    processor = find_processor(settings.weights, tokenizer_of(settings)) if vision else None
    return (processor, vision) if vision and processor else None


@dataclass(frozen=True)
class PromptSampler:
    """Generate greedy answers to `samples.prompts` with the current weights."""

    every: int  # steps
    settings: Tuning
    ready: Ready
    tokenizer: Tokenizer

    @classmethod
    def of(cls, settings: Tuning, ready: Ready, tokenizer: Tokenizer) -> PromptSampler | None:
        """Return a sampler; None where `samples.every` is 0, or several processes share the weights."""
        if not settings.samples.every or jax.process_count() > 1:
            return None
        return cls(settings.samples.every, settings, ready, tokenizer)

    def __call__(self, params: Params, step: int) -> Sampled:
        """Return an answer to each prompt."""
        settings, ready = self.settings, self.ready
        compute = compute_of(settings.precision.compute)
        ctx = replace(step_context(ready.settings, ready.placement, ready.platform), frozen=ready.frozen)
        own = compute_copy(params, ready.specs, compute)
        model: Any = jax.jit(lambda own, frozen: policy_of(settings).params(own, replace(ctx, frozen=frozen)))(
            own, ready.frozen
        )
        asked = settings.samples.prompts
        return Sampled([{"prompt": prompt, "answer": self._answer(model, prompt, compute)} for prompt in asked])

    def _answer(self, model: Params, prompt: str, compute: Any) -> str:
        ends = {*self.tokenizer.eos_ids, *self.ready.cfg.eos_ids}
        found = greedy(model, self.ready.cfg, self._ids(prompt), self.settings.samples.tokens, compute)
        return self.tokenizer.decode(takewhile(lambda token: token not in ends, found))

    def _ids(self, prompt: str) -> list[int]:
        if self.tokenizer.chat_template is None:
            return self.tokenizer.encode(prompt)
        return self.tokenizer.encode_chat([{"role": "user", "content": prompt}])
