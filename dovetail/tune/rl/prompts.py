"""Prompts: records with a prompt and the columns that rewards read, in an order that a seed decides."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.core.errors import RecipeError, UserError
from dovetail.core.reporter import Progress
from dovetail.data.example_encoder import ExampleEncoder, example_encoder
from dovetail.data.example_store import folder_of
from dovetail.data.examples import ChatExample, TextExample, example
from dovetail.data.pictures import Picture
from dovetail.data.records import BadRecords, Record, open_records
from dovetail.data.settings import Keys, TuningData
from dovetail.io.images.processor import ImageProcessor
from dovetail.io.tokenizer import Tokenizer
from dovetail.tune.rl.environment_factory import EnvironmentFactory


@dataclass(frozen=True)
class PromptRecord:
    """A prompt with its tokens and the other columns of its record."""

    index: int
    prompt: Any  # text, or messages
    tokens: tuple[int, ...]  # the prompt as the policy is given it
    columns: dict[str, Any]  # the record without the prompt
    tools: Sequence[dict[str, Any]] = ()  # tools that the prompt shows, in OpenAI's format
    images: tuple[Picture, ...] = ()  # of the prompt's image parts, in order


@dataclass(frozen=True)
class PromptSet:
    """The prompts to train on. Each is drawn once per epoch."""

    records: Sequence[PromptRecord]
    seed: int

    def draw(self, rollout: int, count: int, draw: int = 0) -> list[PromptRecord]:
        """Return the prompts of a rollout; draws after the first choose random prompts in place of some groups."""
        if draw:
            drawn = np.random.default_rng((self.seed, rollout, draw)).integers(len(self.records), size=count)
            return [self.records[i] for i in drawn]
        positions = range(rollout * count, (rollout + 1) * count)
        return [self.records[self._order(i // len(self.records))[i % len(self.records)]] for i in positions]

    def _order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng((self.seed, epoch)).permutation(len(self.records))


def open_prompts(
    settings: TuningData,
    tokenizer: Tokenizer,
    max_prompt_length: int,
    records: Iterable[Any] | None = None,
    progress: Progress | None = None,
    environments: EnvironmentFactory | None = None,
    processor: ImageProcessor | None = None,
) -> tuple[PromptSet, list[PromptRecord], int]:
    """Read the prompts of a run.

    Args:
        settings: The recipe's data.
        tokenizer: The policy's.
        max_prompt_length: Longer prompts are left out.
        records: Records of a program, in place of the recipe's sources.
        progress: Shows how far the reading is.
        environments: For agents: the environment adds to the prompts.
        processor: The policy's image processor; None: prompts with images are refused.

    Returns:
        The prompts to train on, those held out, and how many were left out as too long.

    Raises:
        RecipeError: No prompt is left to train on.
    """
    encoder, found, too_long = example_encoder(settings, tokenizer, processor=processor), [], 0
    for name, keys, each in open_records(settings, records, progress):
        bad, folder = BadRecords(settings.skip_bad_records, name), folder_of(name)

        for record in each:
            side = bad.read(functools.partial(_read, record, settings, keys, encoder, folder))
            if side is None:
                continue
            given = {keys.prompt or "prompt", keys.messages or "messages"}
            columns = {name: value for name, value in record.fields.items() if name not in given}
            if environments:
                side = encoder.pictured(environments.prompt(side, len(found), columns), folder)
            ids = environments.encoder.prompt(side) if environments else encoder.prompt(side)
            if len(ids) > max_prompt_length:
                too_long += 1
            else:
                found.append(_prompt_record(len(found), side, ids, columns))
        bad.check()
    train, held_out = _split(found, settings)
    if not train:
        raise RecipeError(
            f"max_prompt_length={max_prompt_length} leaves no prompt to train on: of {len(found) + too_long} prompts "
            f"{too_long} are longer and {len(held_out)} held out. Raise max_prompt_length, or set another data.path",
            param="max_prompt_length",
        )
    return PromptSet(train, settings.seed), held_out, too_long


def _read(
    record: Record, settings: TuningData, keys: Keys, encoder: ExampleEncoder, folder: Path
) -> ChatExample | TextExample:
    """Return the prompt of a record with its images read; a UserError names the record."""
    found = example(record, "prompts", settings.format, keys)
    assert found is not None, "a prompt is never left out for having no answer"
    try:
        side = encoder.pictured(found.sides[0], folder)
        if encoder.image_id >= 0:
            encoder.prompt(side)  # refuses a text that spells image tokens
        return side
    except UserError as error:
        raise UserError(f"{record.where()}: {error}", param=error.param, code=error.code) from error


def _prompt_record(
    index: int, side: ChatExample | TextExample, ids: Iterable[int], columns: dict[str, Any]
) -> PromptRecord:
    tokens = tuple(int(token) for token in ids)
    if isinstance(side, TextExample):
        return PromptRecord(index, side.prompt, tokens, columns)
    return PromptRecord(index, side.messages, tokens, columns, side.tools or (), side.images)


def _split(found: list[PromptRecord], settings: TuningData) -> tuple[list[PromptRecord], list[PromptRecord]]:
    """Return the prompts to train on and those held out."""
    share = settings.held_out
    count = int(share if share >= 1 else np.ceil(share * len(found)))
    held_out = set(np.random.default_rng(settings.seed).permutation(len(found))[:count].tolist())
    train = [record for record in found if record.index not in held_out]
    return train, [record for record in found if record.index in held_out]
