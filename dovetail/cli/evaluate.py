"""`dovetail eval`: held-out loss, or tasks of lm-eval, which need the `eval` extra."""

from __future__ import annotations

import json as json_module
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import typer

from dovetail.cli.options import takes_engine_options
from dovetail.core.errors import MissingFileError, MissingPackageError, UserError

LOSS = "loss"


@dataclass(frozen=True)
class Result:
    """Hold one metric of one task."""

    task: str
    metric: str
    value: float | None
    error: float | None = None  # standard error
    count: int | None = None  # documents


@takes_engine_options()
def evaluate(
    engine: dict[str, Any],
    model: str = typer.Argument(help="Folder, run folder, .gguf file, hub id or catalogue name."),
    tasks: str = typer.Option(..., help="Comma-separated: loss, lm-eval tasks, or .yaml files of tasks."),
    data: str = typer.Option("", help="Text or .jsonl file for the task loss."),
    text_key: str = typer.Option("text", help="Field of a --data record that has the text."),
    limit: int = typer.Option(None, min=1, help="Maximum documents per task. Default: all."),
    num_fewshot: int = typer.Option(None, min=0, help="Few-shot examples. Default: the task's."),
    chat: bool = typer.Option(False, "--chat", help="Apply the model's chat template."),
    tokenizer: str = typer.Option("", help="bytes for a model of raw bytes. Default: the model's tokenizer."),
    json: str = typer.Option("", help="Also write the results to this file."),
) -> None:
    """Evaluate a model: held-out loss, or tasks of lm-eval."""
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    _check(names, data, tokenizer)
    eval_model = _load(model, tokenizer, engine)
    rows: list[Result] = []
    if LOSS in names:
        rows += held_out(eval_model, documents(data, text_key, limit))
    if others := [name for name in names if name != LOSS]:
        rows += run_tasks(eval_model, others, model, limit=limit, num_fewshot=num_fewshot, chat=chat)
    _show(model, rows)
    if json:
        from dovetail.core.files import write_atomic

        write_atomic(
            json, json_module.dumps({"model": model, "results": [asdict(row) for row in rows]}, indent=1) + "\n"
        )


def _check(names: list[str], data: str, tokenizer: str) -> None:
    """Check the arguments before the model is loaded."""
    if not names:
        raise UserError("--tasks must name loss, an lm-eval task or a .yaml file of a task", param="--tasks")
    if (LOSS in names) != bool(data):
        raise UserError("the task loss and --data must be given together", param="--data")
    if tokenizer not in ("", "bytes"):
        raise UserError(f"--tokenizer must be bytes or left out, got {tokenizer!r}", param="--tokenizer")
    for name in names:
        if name.endswith((".yaml", ".yml")) and not Path(name).is_file():
            raise MissingFileError(f"there is no task file {name}", param="--tasks")
    if names != [LOSS]:
        _lm_eval()


def _load(model: str, tokenizer: str, engine: dict[str, Any]):
    from dovetail.cli.eval_model import Bytes, EvalModel
    from dovetail.core.reporter import bar
    from dovetail.engine.llm import LLM
    from dovetail.engine.options import EngineOptions

    with bar() as progress:
        llm = LLM.from_options(newest_export(model), EngineOptions(**engine), progress=progress)
    return EvalModel(llm, Bytes() if tokenizer else None)


def newest_export(model: str) -> str:
    """Return the last export of a run's folder; return anything else unchanged."""
    folder = Path(model)
    if not folder.is_dir() or (folder / "config.json").exists():
        return model
    steps = {}
    for path in folder.glob("export/step_*"):
        if path.name.removeprefix("step_").isdigit() and (path / "config.json").exists():
            steps[int(path.name.removeprefix("step_"))] = path
    if steps:
        return str(steps[max(steps)])
    if (folder / "metrics.jsonl").exists() or (folder / "checkpoints").is_dir():
        raise UserError(f"the run {folder} has no export to evaluate: train with --export-hf STEPS")
    return model


# --- held-out loss ----------------------------------------------------------------------------------------------------


def documents(path: str, text_key: str, limit: int | None) -> list[str]:
    """Return the texts of a file, at most `limit`."""
    found = list(islice((text for text in _documents(Path(path), text_key) if text), limit))
    if not found:
        raise UserError(f"{path} has no text", param="--data")
    return found


def _documents(path: Path, text_key: str) -> Iterator[str]:
    if path.suffix != ".jsonl":
        yield path.read_text(encoding="utf-8")
        return
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                text = json_module.loads(line)[text_key]
            except (ValueError, KeyError, TypeError):
                raise UserError(
                    f"line {number} of {path} must be a record with the field {text_key!r}: set --text-key",
                    param="--text-key",
                ) from None
            if not isinstance(text, str):
                raise UserError(f"line {number} of {path}: {text_key} is not text", param="--text-key")
            yield text


def held_out(eval_model, texts: list[str]) -> list[Result]:
    """Return the loss as training measures it, perplexity and bits per byte.

    The end token is predicted too. A document's first token is scored only if the tokenizer adds BOS. Bits per byte
    count the text's own tokens.
    """
    pairs, size, special = [], 0, {eval_model.tokenizer.bos_id, eval_model.tokenizer.eos_id}
    for text in texts:
        ids = eval_model.document(text)
        pairs += eval_model.windows(ids)
        size += len(text.encode()) - (0 if ids[0] in special else len(eval_model.tokenizer.token_bytes(ids[0])))
    entries = [entry for each in eval_model.entries(pairs) for entry in each]
    if not entries:
        raise UserError("every text has one token: there is nothing to predict")
    loss = -math.fsum(entry.logprob for entry in entries) / len(entries)
    nats = -math.fsum(entry.logprob for entry in entries if entry.token not in special)
    values = [("loss", loss), ("perplexity", math.exp(min(loss, 700.0)))]
    values += [("bits_per_byte", nats / size / math.log(2))] if size else []
    return [Result(LOSS, name, value, None, len(texts)) for name, value in [*values, ("tokens", float(len(entries)))]]


# --- lm-eval ----------------------------------------------------------------------------------------------------------


def _lm_eval(module: str = "lm_eval") -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingPackageError(
            f"tasks other than {LOSS} need lm-eval, which is not installed ({error}): pip install 'dovetail[eval]'"
        ) from None


def run_tasks(
    eval_model,
    names: list[str],
    model: str,
    *,
    limit: int | None = None,
    num_fewshot: int | None = None,
    chat: bool = False,
) -> list[Result]:
    """Return the metrics of lm-eval's tasks, given by name or file."""
    from dovetail.cli.eval_model import lm_eval_model

    lm_eval = _lm_eval()
    loaded = load_tasks(names)
    for task in loaded["tasks"].values():
        _settle(task, num_fewshot)
    # Not simple_evaluate, which imports torch.
    found = lm_eval.evaluate(
        lm_eval_model(eval_model, Path(model).name), loaded, limit=limit, bootstrap_iters=1000, log_samples=False,
        apply_chat_template=chat, fewshot_as_multiturn=chat,
    )  # fmt: skip
    assert found is not None  # None is for processes other than the first
    counts = found.get("n-samples", {})
    return [
        row
        for task, values in {**found["results"], **found.get("groups", {})}.items()
        for row in _rows(task, values, counts.get(task, {}).get("effective"))
    ]


def _settle(task, num_fewshot: int | None) -> None:
    """Set the number of few-shot examples, unless the task requires 0, and their seed."""
    own = task.get_config("num_fewshot")
    if own is None or (num_fewshot is not None and own != 0):
        task.set_config(key="num_fewshot", value=num_fewshot or 0)
    task.set_fewshot_seed(seed=1234)  # lm-eval's default, for comparable numbers


def _rows(task: str, values: dict[str, Any], count: int | None) -> list[Result]:
    """Return the rows of a task; lm-eval names a metric `acc,none` or `exact_match,FILTER`."""
    rows = []
    for key, value in values.items():
        metric, _, kind = key.partition(",")
        if isinstance(value, int | float) and kind and not metric.endswith("_stderr"):
            error = values.get(f"{metric}_stderr,{kind}")
            named = metric if kind == "none" else f"{metric} ({kind})"
            rows.append(Result(task, named, float(value), error if isinstance(error, float) else None, count))
    return rows


def load_tasks(names: list[str]) -> Any:
    """Return lm-eval's tasks; a file's data is looked up beside it, then in the working directory."""
    files = [name for name in names if name.endswith((".yaml", ".yml"))]
    # Only names need lm-eval's own tasks, whose thousands of files take long to read.
    manager = _lm_eval("lm_eval.tasks").TaskManager(include_defaults=len(files) < len(names))
    found: list[Any] = []
    for name in names:
        if name in files:
            found += _from_file(manager, Path(name).resolve())
        elif name in manager.all_tasks:
            found.append(name)
        else:
            raise UserError(f"lm-eval has no task {name!r}: `lm-eval ls tasks` lists them, or give a .yaml file")
    return manager.load(found)


def _from_file(manager, path: Path) -> list[Any]:
    from contextlib import chdir

    def load() -> list[Any]:
        made = manager.load([str(path)])
        return list(made["groups"].values()) or list(made["tasks"].values())

    try:
        with chdir(path.parent):
            return load()
    except FileNotFoundError:
        return load()


# --- output -----------------------------------------------------------------------------------------------------------


def _show(model: str, rows: list[Result]) -> None:
    from rich.console import Console

    from dovetail.cli.tables import framed

    table = framed(model)
    table.add_column("task", style="cyan")
    table.add_column("metric")
    for name in ("value", "±", "documents"):
        table.add_column(name, justify="right")
    for row in rows:
        value = "–" if row.value is None else f"{row.value:,.0f}" if row.metric == "tokens" else f"{row.value:,.4f}"
        error = "" if row.error is None else f"{row.error:.4f}"
        table.add_row(row.task, row.metric, value, error, "" if row.count is None else f"{row.count:,}")
    Console(highlight=False).print(table)
