"""The stage: where the episodes of agents are played, each in an environment of its own (a episode_runner.Reply).

When the policy's turn is over, its tokens are read as the server would read them, the environment answers, and what it
says goes back as tokens. An environment that fails ends its episode, which then has no reward; the others go on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dovetail.core.errors import UserError
from dovetail.data.examples import ChatExample
from dovetail.data.messages import Messages
from dovetail.io.chat import checked_messages
from dovetail.io.tokenizer import Tokenizer
from dovetail.io.tool_formats.events import ToolCall
from dovetail.tune.rl.answer import Answer
from dovetail.tune.rl.environment import Environment, Said, Step
from dovetail.tune.rl.episode import Episode, EpisodeId
from dovetail.tune.rl.failures import Failures, traceback_of
from dovetail.tune.rl.prompts import PromptRecord
from dovetail.tune.rl.reward_assigner import ENVIRONMENT
from dovetail.tune.rl.scene import Scene
from dovetail.tune.rl.script import said_messages, said_text, stand_in
from dovetail.tune.rl.settings import Rl
from dovetail.tune.rl.tools import tools_of


@dataclass
class _Playing:
    """An episode on the stage."""

    episode: Episode  # kept, so that no other has its id meanwhile
    environment: Environment
    tools: list[dict[str, Any]]
    messages: Messages | None  # what the template is shown: stand-ins for what the policy wrote; None: plain text
    read: int  # tokens that have been read
    turns: int = 0
    reward: float = 0.0


class Stage:
    def __init__(self, scene: Scene, tasks: Iterable[PromptRecord], room: int, failures: Failures):
        """`room`: tokens that an episode may have after its prompt."""
        self._scene, self._script, self._room, self._failures = scene, scene.script, room, failures
        self._tasks = {task.index: task for task in tasks}
        # Several threads reply, each for an episode of its own, and a dict's single operations are atomic.
        self._playing: dict[int, _Playing] = {}
        self._check()

    @classmethod
    def of(
        cls,
        made: Any,
        settings: Rl,
        tokenizer: Tokenizer,
        tasks: Iterable[PromptRecord],
        failures: Failures | None = None,
    ) -> Stage:
        """`made`: see Scene.of. ValueError where the chat template does not let an environment speak."""
        return cls(Scene.of(made, settings, tokenizer), tasks, settings.max_completion_length, failures or Failures())

    def reply(self, episode: Episode) -> list[int] | None:
        """What the environment says, as tokens; None: the episode is over, and has its reward."""
        try:
            playing = self._playing.get(id(episode)) or self._begin(episode)
            said = self._answered(playing)
        except Exception as error:  # a user's code, which may raise anything
            episode.rewards[ENVIRONMENT], episode.finish, said = None, "error", None
            episode.problems[ENVIRONMENT] = message = f"{type(error).__name__}: {error}"
            self._failures.add("the environment", type(error).__name__, message, traceback_of(error, __file__))
        if said is None:
            self._playing.pop(id(episode), None)
        return said

    # --- an episode ---------------------------------------------------------------------------------------------------

    def _begin(self, episode: Episode) -> _Playing:
        task = self._tasks[episode.prompt_index]
        environment, _ = self._scene.environment(task.index, task.columns, episode.id)
        tools = [tool.schema for tool in tools_of(environment)]
        messages = None if isinstance(task.prompt, str) else list(task.prompt)
        episode.messages = None if messages is None else []
        playing = _Playing(episode, environment, tools, messages, episode.prompt_length)
        self._playing[id(episode)] = playing
        return playing

    def _answered(self, playing: _Playing) -> list[int] | None:
        episode, environment = playing.episode, playing.environment
        answer = self._heard(playing)
        if episode.truncated:
            return self._over(playing, "length")
        step = environment.step(answer)
        if not isinstance(step, Step) or not math.isfinite(step.reward):
            raise UserError(f"step() must return a Step with a finite reward; got {step!r}")
        playing.reward += float(step.reward)
        is_last = step.done or playing.turns >= environment.turns
        said = self._said(playing, step.observation, is_last)
        if is_last:
            return self._over(playing, "done" if step.done else "turns")
        if len(episode.tokens) - episode.prompt_length + len(said) >= self._room:
            return self._over(playing, "length")
        playing.read = len(episode.tokens) + len(said)
        return said

    def _heard(self, playing: _Playing) -> Answer:
        """What the policy has just written."""
        episode = playing.episode
        listener = self._script.listener(playing.messages is not None, playing.tools)
        before, tokens = episode.tokens[: playing.read], episode.tokens[playing.read :]
        playing.turns += 1
        answer = listener.hear(before, tokens, playing.tools, playing.turns, episode.truncated)
        if playing.messages is not None and episode.messages is not None:
            playing.messages.append(stand_in(answer))
            episode.messages.append(answer.message)
        return answer

    def _said(self, playing: _Playing, said: Said, is_last: bool) -> list[int]:
        """What the environment says, as tokens. After the last answer nobody reads it: it is only recorded."""
        if not (said or is_last):
            raise UserError("step() must say something for the policy to answer, or be done; got neither")
        episode = playing.episode
        if playing.messages is None or episode.messages is None:
            return [] if is_last else self._script.text(said_text(said))
        told = checked_messages(said_messages(said)) if said else []
        episode.messages += told
        if is_last:
            return []
        ended = self._script.listener(True, playing.tools).ended(episode.tokens)
        tokens = self._script.after(playing.messages, told, playing.tools, ended)
        playing.messages += told
        return tokens

    def _over(self, playing: _Playing, finish: str) -> None:
        playing.episode.finish = finish
        playing.episode.rewards[ENVIRONMENT] = playing.reward

    # --- before the first ---------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """With the first prompt that has messages: the template must let every form of answer be told."""
        task = next((task for task in self._tasks.values() if not isinstance(task.prompt, str)), None)
        if task is None:
            return
        environment, _ = self._scene.environment(task.index, task.columns, EpisodeId(0, 0))
        tools = [tool.schema for tool in tools_of(environment)]
        forms = [Answer("", ""), *([Answer("", "", calls=(ToolCall("call00000", "f", "{}", True),))] if tools else [])]
        self._script.check(ChatExample(list(task.prompt), tools or None), forms)
