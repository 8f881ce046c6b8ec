"""Generate the target's answers to prompts, once, and keep them in the run's folder."""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from dovetail.core.errors import UnsupportedError, UserError
from dovetail.core.files import write_atomic
from dovetail.core.fingerprint import fingerprint
from dovetail.core.recipe import dump
from dovetail.core.reporter import Reporter
from dovetail.data.examples import ChatExample, TextExample, example, kind_of
from dovetail.data.pictures import NO_IMAGES
from dovetail.data.records import BadRecords, open_records
from dovetail.data.settings import Keys
from dovetail.engine.llm import LLM
from dovetail.engine.request.params import SamplingParams
from dovetail.train.external import model_config
from dovetail.tune.settings import Draft

FILE = "answers.jsonl"
Rows = list[dict[str, Any]]


def answered(settings: Draft, folder: Path, records: Sequence[Any] | None, reporter: Reporter) -> Rows:
    """Return a record with the target's answer for each prompt, from the run's folder or generated now.

    Raises:
        UnsupportedError: The run has several processes.
        UserError: A record has no prompt.
    """
    if jax.process_count() > 1:
        raise UnsupportedError(
            f"dovetail draft runs in one process with all of its devices, got {jax.process_count()} processes: start "
            "one process"
        )
    prompts = _prompts(settings, records)
    key = fingerprint(json.dumps(prompts), dump(settings.answers), settings.weights, settings.length, settings.seed)
    found = _kept(folder / FILE, key)
    if found is None:
        found = _generated(settings, prompts, reporter)
        lines = [{"key": key}, *found]
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / FILE, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    return found


def _prompts(settings: Draft, records: Sequence[Any] | None) -> Rows:
    """Return for each record its `messages` (and `tools`), or its `prompt`; with a kept answer the whole example."""
    found: Rows = []
    for name, keys, each in open_records(settings.data, records):
        bad = BadRecords(settings.data.skip_bad_records, name)
        for record in each:
            row = bad.read(lambda record=record, keys=keys: _prompt(settings, record, keys))
            if row is not None:
                found.append(row)
        bad.check()
    if not found:
        raise UserError("`data.path` must have at least one prompt, got none", param="data.path")
    return found


def _prompt(settings: Draft, record: Any, keys: Keys) -> dict[str, Any]:
    form = settings.data.format
    if settings.answers.keep and not record.error and kind_of(record, keys) == "sft":
        whole = example(record, "sft", form, keys)
        if whole is not None:
            return _row(whole.sides[0], answered=True)
    read = example(record, "prompts", form, keys)
    assert read is not None, "a prompt is read or refused"
    return _row(read.sides[0], answered=False)


def _row(side: ChatExample | TextExample, answered: bool) -> dict[str, Any]:
    if isinstance(side, TextExample):
        return {"prompt": side.prompt} | ({"completion": side.completion} if answered else {})
    if side.images:
        raise UserError(f"the record has images: {NO_IMAGES}", param="data.path", code="no_images")
    return {"messages": side.messages, "answered": answered} | ({"tools": side.tools} if side.tools else {})


def _generated(settings: Draft, prompts: Rows, reporter: Reporter) -> Rows:
    asked = [row for row in prompts if "completion" not in row and not row.get("answered")]
    if asked:
        reporter.line(f"generating {len(asked):,} answers of {settings.weights}")
    texts = iter(_texts(settings, asked) if asked else [])
    found: Rows = []
    for row in prompts:
        given = {name: value for name, value in row.items() if name != "answered"}
        if "prompt" in row and "completion" not in row:
            given["completion"] = next(texts)
        elif row.get("answered") is False:
            given["messages"] = [*row["messages"], {"role": "assistant", "content": next(texts)}]
        found.append(given)
    kept = [row for row in found if (row.get("completion") or row["messages"][-1]["content"]).strip()]
    if len(kept) < len(found):
        reporter.line(f"{len(found) - len(kept):,} empty answers left out")
    if not kept:
        raise UserError(f"all answers of {settings.weights} are empty: use other prompts", param="data.path")
    return kept


def _texts(settings: Draft, asked: Rows) -> list[str]:
    """Return the target's answers, and free the engine."""
    wanted = settings.answers
    params = SamplingParams(temperature=wanted.temperature, max_tokens=wanted.max_tokens, seed=settings.seed)
    longest = min(settings.length + wanted.max_tokens, model_config(settings.model).max_len)
    llm = LLM(settings.weights, max_model_len=longest)
    chats = [row for row in asked if "messages" in row]
    tools = {json.dumps(row.get("tools")) for row in chats}
    texts = {}
    for each in sorted(tools):  # a call of `chat` has one list of tools
        rows = [row for row in chats if json.dumps(row.get("tools")) == each]
        outputs = llm.chat([row["messages"] for row in rows], params, tools=json.loads(each))
        texts |= {id(row): output.outputs[0].text for row, output in zip(rows, outputs, strict=True)}
    plain = [row for row in asked if "prompt" in row]
    if plain:
        outputs = llm.generate([row["prompt"] for row in plain], params)
        texts |= {id(row): output.outputs[0].text for row, output in zip(plain, outputs, strict=True)}
    del llm
    gc.collect()
    return [texts[id(row)] for row in asked]


def _kept(path: Path, key: str) -> Rows | None:
    """Return the answers of an earlier start to the same prompts; None where there are none."""
    if not path.exists():
        return None
    first, *rows = [json.loads(line) for line in path.read_text().splitlines()]
    return rows if first["key"] == key else None
