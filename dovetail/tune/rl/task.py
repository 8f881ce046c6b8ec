"""Tasks: prompts to answer, with what a reward needs to know of each, in an order that a seed decides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dovetail.core.errors import UserError
from dovetail.core.reporter import Progress
from dovetail.data.example_encoder import example_encoder
from dovetail.data.examples import ChatExample, TextExample, example
from dovetail.data.records import BadRecords, open_records
from dovetail.data.settings import TuningData
from dovetail.io.tokenizer import Tokenizer
from dovetail.tune.rl.environment_factory import EnvironmentFactory


@dataclass(frozen=True)
class Task:
    number: int
    prompt: Any  # text, or messages
    tokens: tuple[int, ...]  # of the prompt, as the policy is given it
    columns: dict[str, Any]  # of its record: all but the prompt
    tools: Sequence[dict[str, Any]] = ()  # that the prompt shows, in OpenAI's shape


@dataclass(frozen=True)
class Tasks:
    """Those to learn from; a step's are drawn without repeating until all were given once."""

    tasks: Sequence[Task]
    seed: int

    def of(self, rollout: int, count: int, turn: int = 0) -> list[Task]:
        """The prompts of a rollout. A later `turn` draws others in the place of those that taught nothing."""
        if turn:
            drawn = np.random.default_rng((self.seed, rollout, turn)).integers(len(self.tasks), size=count)
            return [self.tasks[i] for i in drawn]
        places = range(rollout * count, (rollout + 1) * count)
        return [self.tasks[self._order(place // len(self.tasks))[place % len(self.tasks)]] for place in places]

    def _order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng((self.seed, epoch)).permutation(len(self.tasks))


def open_tasks(
    settings: TuningData,
    tokenizer: Tokenizer,
    most: int,
    records: Iterable[Any] | None = None,
    progress: Progress | None = None,
    scene: EnvironmentFactory | None = None,
) -> tuple[Tasks, list[Task], int]:
    """(to learn from, held out, how many prompts of more than `most` tokens were left out). `scene`: of agents, whose
    environment adds to the prompts.
    """
    encoder, found, long = example_encoder(settings, tokenizer), [], 0
    for name, keys, each in open_records(settings, records, progress):
        bad = BadRecords(settings.skip_bad_records, name)
        for record in each:
            read = bad.read(lambda record=record, keys=keys: example(record, "prompts", settings.format, keys))
            if read is None:
                continue
            given = {keys.prompt or "prompt", keys.messages or "messages"}
            columns = {name: value for name, value in record.fields.items() if name not in given}
            side = read.sides[0]
            if scene:
                side, ids = scene.prompt(side, len(found), columns)
            else:
                ids = encoder.prompt(side)
            if len(ids) > most:
                long += 1
                continue
            tools = side.tools or () if isinstance(side, ChatExample) else ()
            found.append(Task(len(found), _asked(side), tuple(int(token) for token in ids), columns, tools))
        bad.check()
    held = _held_out(settings, len(found))
    if len(found) - held < 1:
        raise UserError(
            f"expected prompts of at most max_prompt={most} tokens to learn from, and of {len(found) + long} none is "
            f"left ({long} are longer, {held} held out): raise max_prompt, or name another path"
        )
    apart = set(np.random.default_rng(settings.seed).permutation(len(found))[:held].tolist())
    rest = [task for task in found if task.number not in apart]
    return Tasks(rest, settings.seed), [task for task in found if task.number in apart], long


def _asked(side: ChatExample | TextExample) -> Any:
    return side.prompt if isinstance(side, TextExample) else side.messages


def _held_out(settings: TuningData, count: int) -> int:
    return int(settings.held_out if settings.held_out >= 1 else np.ceil(settings.held_out * count))
