"""Environment: the world of an agent's episode, which answers the policy's turns and gives the reward.

    class Guess(Environment):
        def reset(self, random):
            self.number = int(random.integers(1, 9))
            return "I think of a number from 1 to 8."

        def step(self, turn):
            if turn.content.strip() == str(self.number):
                return Step(reward=1.0, done=True)
            return Step("No. Try again.")

    dt.rl(model=..., data=[{"messages": [...]}, ...], environment=Guess)

Each episode has an environment object of its own. A resumed run repeats the same episodes, so randomness must come only
from the two generators that an environment is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dovetail.tune.rl.tools import call_tools, tools_of
from dovetail.tune.rl.turns import PolicyTurn

Observation = str | list[dict[str, Any]] | None  # text (in a chat a user message), or messages


@dataclass(frozen=True)
class Step:
    """The result of a policy's turn. An episode's reward is the sum of its steps' rewards.

    Attributes:
        observation: Text or messages for the policy.
        reward: The reward of this step.
        done: Whether the episode is over.
    """

    observation: Observation = None
    reward: float = 0.0
    done: bool = False


class Environment:
    """The base class of environments.

    Args:
        columns: The columns of the record besides its prompt.
        random: The generator of this episode.

    Attributes:
        turns: The most turns of the policy in an episode.
        tools: Typed functions that the chat template shows to the policy: see tune.rl.tools.
    """

    turns = 8
    tools: Sequence[Callable[..., Any]] = ()

    def __init__(self, columns: Mapping[str, Any], random: np.random.Generator):
        self.columns, self.random = columns, random

    def reset(self, random: np.random.Generator) -> Observation:
        """Start the episode; called once for each object.

        Args:
            random: The generator of the prompt, not of the episode: the episodes of a group are compared, so they start
                alike.

        Returns:
            Text or messages that follow the prompt in every episode of the prompt.
        """
        return None

    def step(self, turn: PolicyTurn) -> Step:
        """Return the result of a policy's turn."""
        raise NotImplementedError(f"{type(self).__name__} must define step(self, turn)")


class ToolEnvironment(Environment):
    """An environment that runs tool calls and returns their results; a turn without a call ends the episode."""

    def score(self, turn: PolicyTurn) -> float:
        """Return the reward of the last turn; 0 where only the recipe's rewards count."""
        return 0.0

    def step(self, turn: PolicyTurn) -> Step:
        """Run the calls of a turn, or end the episode with its score."""
        if turn.calls:
            return Step(call_tools(turn.calls, tools_of(self)))
        return Step(reward=self.score(turn), done=True)
