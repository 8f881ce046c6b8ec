"""EnvironmentRunner: run the environments of agents' episodes, one for each episode (a episode_runner.Reply).

After each turn of the policy its tokens are parsed as the server parses a completion, the environment steps, and its
observation is returned as tokens. An environment that fails ends its own episode without a reward; the others go on.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.core.errors import UserError
from dovetail.data.examples import ChatExample
from dovetail.data.messages import Messages
from dovetail.data.pictures import Picture
from dovetail.io.chat import checked_messages
from dovetail.io.images.processor import ImageProcessor
from dovetail.io.tokenizer import Tokenizer
from dovetail.io.tool_formats.events import ToolCall
from dovetail.tune.rl.environment import Environment, Observation, Step
from dovetail.tune.rl.environment_factory import EnvironmentFactory
from dovetail.tune.rl.episode import Episode, EpisodeId
from dovetail.tune.rl.failures import Failures, traceback_of
from dovetail.tune.rl.images import max_patches
from dovetail.tune.rl.prompts import PromptRecord
from dovetail.tune.rl.reward_assigner import ENVIRONMENT
from dovetail.tune.rl.settings import Rl
from dovetail.tune.rl.tools import tools_of
from dovetail.tune.rl.turns import PolicyTurn, observation_messages, observation_text


@dataclass
class _EpisodeState:
    """An episode in progress and its environment."""

    episode: Episode  # held, so that no other episode gets its id meanwhile
    environment: Environment
    tools: list[dict[str, Any]]
    messages: Messages | None  # the conversation, with placeholders for the policy's turns; None: plain text
    parsed: int  # tokens that have been parsed
    turns: int = 0
    reward: float = 0.0
    images: tuple[Picture, ...] = ()  # of the last observation


class EnvironmentRunner:
    """Run an environment for each episode.

    Args:
        factory: Creates the environments.
        prompts: The prompts.
        max_tokens: The most tokens of an episode after its prompt.
        failures: Records the exceptions of environments.

    Raises:
        RecipeError: The chat template does not allow messages between the policy's turns.
    """

    def __init__(
        self, factory: EnvironmentFactory, prompts: Iterable[PromptRecord], max_tokens: int, failures: Failures
    ):
        self._factory, self._encoder = factory, factory.encoder
        self._max_tokens, self._failures = max_tokens, failures
        self._prompts = {record.index: record for record in prompts}
        self._max_patches = max_patches(self._prompts.values())
        # Several threads reply, each for an episode of its own, and a dict's single operations are atomic.
        self._states: dict[int, _EpisodeState] = {}
        self._check_template()

    @classmethod
    def from_settings(
        cls,
        environment: Any,
        settings: Rl,
        tokenizer: Tokenizer,
        prompts: Iterable[PromptRecord],
        failures: Failures | None = None,
        processor: ImageProcessor | None = None,
    ) -> EnvironmentRunner:
        """Return a runner of `environment`: see EnvironmentFactory.from_settings."""
        factory = EnvironmentFactory.from_settings(environment, settings, tokenizer, processor)
        return cls(factory, prompts, settings.max_completion_length, failures or Failures())

    def reply(self, episode: Episode) -> list[int] | None:
        """Return the observation after a policy's turn as tokens; None if the episode is over and has its reward."""
        try:
            state = self._states.get(id(episode)) or self._begin(episode)
            tokens = self._step(state)
        except Exception as error:  # the user's code may raise anything
            message = f"{type(error).__name__}: {error}"
            episode.rewards[ENVIRONMENT], episode.finish, tokens = None, "error", None
            episode.problems[ENVIRONMENT] = message
            self._failures.add("the environment", type(error).__name__, message, traceback_of(error, __file__))
        if tokens is None:
            self._states.pop(id(episode), None)
        return tokens

    # --- an episode ---------------------------------------------------------------------------------------------------

    def _begin(self, episode: Episode) -> _EpisodeState:
        record = self._prompts[episode.prompt_index]
        environment, _ = self._factory.environment(record.index, record.columns, episode.id)
        tools = [tool.schema for tool in tools_of(environment)]
        messages = None if isinstance(record.prompt, str) else list(record.prompt)
        episode.messages = None if messages is None else []
        state = _EpisodeState(episode, environment, tools, messages, episode.prompt_length)
        self._states[id(episode)] = state
        return state

    def _step(self, state: _EpisodeState) -> list[int] | None:
        episode, environment = state.episode, state.environment
        turn = self._parse(state)
        if episode.truncated:
            return self._end(state, "length")
        step = environment.step(turn)
        if not isinstance(step, Step) or not math.isfinite(step.reward):
            raise UserError(f"step() must return a Step with a finite reward; got {step!r}")
        state.reward += float(step.reward)
        is_last = step.done or state.turns >= environment.turns
        tokens = self._encode(state, step.observation, is_last)
        if is_last:
            return self._end(state, "done" if step.done else "turns")
        if len(episode.tokens) - episode.prompt_length + len(tokens) >= self._max_tokens:
            return self._end(state, "length")
        state.parsed = len(episode.tokens) + len(tokens)
        episode.images += [base64.b64encode(image.file).decode() for image in state.images]
        return tokens

    def _parse(self, state: _EpisodeState) -> PolicyTurn:
        """Return the policy's last turn, and record it as a message."""
        episode = state.episode
        parser = self._encoder.parser(state.messages is not None, state.tools)
        before, tokens = episode.tokens[: state.parsed], episode.tokens[state.parsed :]
        state.turns += 1
        turn = parser.parse(before, tokens, state.tools, state.turns, episode.truncated)
        if state.messages is not None and episode.messages is not None:
            state.messages.append(turn.placeholder)
            episode.messages.append(turn.message)
        return turn

    def _encode(self, state: _EpisodeState, observation: Observation, is_last: bool) -> list[int]:
        """Return the observation as tokens. After the last turn it is only recorded as messages."""
        if not (observation or is_last):
            raise UserError("step() must return a Step with an observation or with done=True; got neither")
        episode = state.episode
        if state.messages is None or episode.messages is None:
            return [] if is_last else self._encoder.text(observation_text(observation))
        messages, state.images = self._encoder.with_pictures(observation_messages(observation))
        messages = checked_messages(messages) if messages else []
        episode.messages += messages
        if is_last:
            return []
        self._check_images(state.images)
        has_end = self._encoder.parser(True, state.tools).has_end(episode.tokens)
        tokens = self._encoder.between(state.messages, messages, state.tools, has_end, state.images)
        state.messages += messages
        return tokens

    def _check_images(self, images: Sequence[Picture]) -> None:
        """Refuse an image that the training step has no room for, which is compiled for the images of the prompts."""
        largest = max((image.patches for image in images), default=0)
        if largest > self._max_patches:
            raise UserError(
                f"an image of an observation must have at most {self._max_patches} patches, as the largest image of "
                f"the prompts has, got {largest}: shrink it, or give a prompt a larger image",
                param="observation",
            )

    def _end(self, state: _EpisodeState, finish: str) -> None:
        state.episode.finish = finish
        state.episode.rewards[ENVIRONMENT] = state.reward

    # --- before the first episode -------------------------------------------------------------------------------------

    def _check_template(self) -> None:
        """Check the chat template with the first prompt of messages and each form of a turn."""
        record = next((record for record in self._prompts.values() if not isinstance(record.prompt, str)), None)
        if record is None:
            return
        environment, _ = self._factory.environment(record.index, record.columns, EpisodeId(0, 0))
        tools = [tool.schema for tool in tools_of(environment)]
        turns = [PolicyTurn("", "")]
        if tools:
            turns.append(PolicyTurn("", "", calls=(ToolCall("call00000", "f", "{}", True),)))
        self._encoder.check(ChatExample(list(record.prompt), tools or None), turns)
