"""An environment: the world in which an agent's episode happens, and what gives its reward.

    class Guess(Environment):
        def reset(self, random):
            self.number = int(random.integers(1, 9))
            return "I think of a number from 1 to 8."

        def step(self, answer):
            if answer.content.strip() == str(self.number):
                return Step(reward=1.0, done=True)
            return Step("No. Try again.")

    dt.rl(model=..., data=[{"messages": [...]}, ...], environment=Guess)

Each episode has an object of its own. A run that is resumed plays the same episodes, so chance must come from the two
generators that an environment is given, and from nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from dovetail.core.errors import UserError
from dovetail.tune.rl.answer import Answer
from dovetail.tune.rl.rewards.imported import Imported

Said = str | list[dict[str, Any]] | None  # text (of a chat, what the user says), or messages


@dataclass(frozen=True)
class Step:
    """What came of an answer. An episode's reward is the sum of its steps'."""

    observation: Said = None
    reward: float = 0.0
    done: bool = False


class Environment:
    """`columns`: what the task's record holds beside the prompt. `random`: of this episode alone."""

    turns = 8  # answers of an episode, at most
    tools: Sequence[Callable[..., Any]] = ()  # typed functions that the chat template shows: see tune.rl.tools

    def __init__(self, columns: Mapping[str, Any], random: np.random.Generator):
        self.columns, self.random = columns, random

    def reset(self, random: np.random.Generator) -> Said:
        """The start, once for each object. `random` is the task's: a group is compared, so its episodes start alike.
        What is returned is said after the prompt, in every episode of the task.
        """
        return None

    def step(self, answer: Answer) -> Step:
        raise NotImplementedError(f"{type(self).__name__} must say what comes of an answer: write its step()")


Maker = Callable[[Mapping[str, Any], np.random.Generator], Environment]


def maker_of(made: Any) -> Maker:
    """Of a class, a function that makes one, or where a recipe says that it lies."""
    if isinstance(made, str):
        try:
            return cast(Maker, Imported.of(made).function)
        except ValueError as error:
            raise UserError(f"environment: {error}") from None
    if callable(made):
        return cast(Maker, made)
    raise UserError(
        f"environment must be a class, a function of (columns, random) that makes one, or 'file.py:Class'; got {made!r}"
    )
