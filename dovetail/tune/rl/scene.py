"""The scene: environments for the episodes of tasks, each with its chance from the run's seed, and their prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dovetail.core.errors import UserError
from dovetail.data.example_encoder import example_encoder
from dovetail.data.examples import ChatExample, TextExample
from dovetail.io.tokenizer import Tokenizer
from dovetail.tune.rl.environment import Environment, Maker, Said, maker_of
from dovetail.tune.rl.episode import EpisodeId
from dovetail.tune.rl.script import Script, with_said
from dovetail.tune.rl.settings import Rl
from dovetail.tune.rl.tools import tools_of


@dataclass(frozen=True)
class Scene:
    make: Maker
    seed: int
    script: Script

    @classmethod
    def of(cls, made: Any, settings: Rl, tokenizer: Tokenizer) -> Scene:
        """`made`: a class, a function that makes one, or where a recipe says that it lies."""
        return cls(maker_of(made), settings.seed, Script(example_encoder(settings.data, tokenizer)))

    def environment(self, task: int, columns: Mapping[str, Any], place: EpisodeId) -> tuple[Environment, Said]:
        """At its start, and what it says there. It depends on the run's seed, the task and the episode's place alone,
        so an episode that a killed run had not ended is played again as it would have been.
        """
        made = self.make(columns, np.random.default_rng((self.seed, task, *place)))
        if not isinstance(made, Environment):
            raise UserError(
                f"environment must make a tune.rl.environment.Environment; it made {made!r}: derive from it"
            )
        return made, made.reset(np.random.default_rng((self.seed, task)))

    def prompt(
        self, side: ChatExample | TextExample, task: int, columns: Mapping[str, Any]
    ) -> tuple[ChatExample | TextExample, list[int]]:
        """A task's prompt with the environment's tools and what it says first, and its tokens."""
        environment, said = self.environment(task, columns, EpisodeId(0, 0))
        tools = [tool.schema for tool in tools_of(environment)]
        if isinstance(side, ChatExample) and side.tools:
            raise UserError(
                "with an environment the tools are its own functions, and a record names tools beside them: leave the "
                "record's out"
            )
        if tools and isinstance(side, TextExample):
            raise UserError(
                "an environment with tools needs a chat template to show them, and a prompt is plain text: give it as "
                "messages"
            )
        side = with_said(side, said)
        side = replace(side, tools=tools) if tools and isinstance(side, ChatExample) else side
        return side, self.script.prompt(side)
