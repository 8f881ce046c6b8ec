"""EnvironmentFactory: create the environment of each episode, seeded by the run's seed, and the prompts they add to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from dovetail.core.errors import RecipeError, UserError
from dovetail.core.imported import ImportedFunction
from dovetail.data.example_encoder import example_encoder
from dovetail.data.examples import ChatExample, TextExample
from dovetail.io.images.processor import ImageProcessor
from dovetail.io.tokenizer import Tokenizer
from dovetail.tune.rl.environment import Environment, Observation
from dovetail.tune.rl.episode import EpisodeId
from dovetail.tune.rl.settings import Rl
from dovetail.tune.rl.tools import tools_of
from dovetail.tune.rl.turns import TurnEncoder, with_observation

CreateEnvironment = Callable[[Mapping[str, Any], np.random.Generator], Environment]


@dataclass(frozen=True)
class EnvironmentFactory:
    """Create environments.

    Attributes:
        create: A class, or a function of (columns, random).
        seed: The run's seed.
        encoder: Of prompts and observations.
    """

    create: CreateEnvironment
    seed: int
    encoder: TurnEncoder

    @classmethod
    def from_settings(
        cls, environment: Any, settings: Rl, tokenizer: Tokenizer, processor: ImageProcessor | None = None
    ) -> EnvironmentFactory:
        """Return a factory of `environment`: a class, a function that returns one, or its location as text."""
        encoder = TurnEncoder(example_encoder(settings.data, tokenizer, processor=processor))
        return cls(_environment_class(environment), settings.seed, encoder)

    def environment(
        self, prompt_index: int, columns: Mapping[str, Any], id: EpisodeId
    ) -> tuple[Environment, Observation]:
        """Return an environment at its start and its first observation.

        They depend only on the run's seed, the prompt and the episode's id, so an episode that a killed run had not
        finished is repeated exactly.
        """
        environment = self.create(columns, np.random.default_rng((self.seed, prompt_index, *id)))
        if not isinstance(environment, Environment):
            raise RecipeError(
                f"environment must create a dovetail.tune.rl.environment.Environment; got {environment!r}: derive from "
                "it",
                param="environment",
            )
        return environment, environment.reset(np.random.default_rng((self.seed, prompt_index)))

    def prompt(
        self, example: ChatExample | TextExample, prompt_index: int, columns: Mapping[str, Any]
    ) -> ChatExample | TextExample:
        """Return a prompt with the environment's tools and first observation."""
        environment, observation = self.environment(prompt_index, columns, EpisodeId(0, 0))
        tools = [tool.schema for tool in tools_of(environment)]
        if isinstance(example, ChatExample) and example.tools:
            raise UserError(
                "a record must have no tools if there is an environment, whose functions are the tools: remove them "
                "from the record",
                param="tools",
            )
        if tools and isinstance(example, TextExample):
            raise UserError(
                "an environment with tools requires prompts of messages, for a chat template to show the tools; got "
                "plain text",
                param="prompt",
            )
        example = with_observation(example, observation)
        return replace(example, tools=tools) if tools and isinstance(example, ChatExample) else example


def _environment_class(given: Any) -> CreateEnvironment:
    if isinstance(given, str):
        try:
            return cast(CreateEnvironment, ImportedFunction.parse(given).function)
        except UserError as error:
            raise RecipeError(f"environment: {error}", param="environment") from None
    if callable(given):
        return cast(CreateEnvironment, given)
    raise RecipeError(
        f"environment must be a class, a function of (columns, random) that returns one, or 'file.py:Class'; got "
        f"{given!r}",
        param="environment",
    )
