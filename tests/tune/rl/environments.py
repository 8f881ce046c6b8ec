"""Helpers of the tests of agents: tokenizers of several families, an environment runner, and a scripted policy."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from data.test_example_encoder import SPECIAL, TEMPLATES, sentencepiece
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from dovetail.io.tokenizer import Tokenizer
from dovetail.tune.rl.environment_factory import EnvironmentFactory
from dovetail.tune.rl.environment_runner import EnvironmentRunner
from dovetail.tune.rl.episode import Episode, EpisodeId, new_episode
from dovetail.tune.rl.failures import Failures
from dovetail.tune.rl.prompts import PromptRecord, open_prompts
from dovetail.tune.rl.settings import Rl

SETTINGS = Rl(model="none", max_completion_length=2000, seed=7, steps=1)
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go."}]


def bytes_tokenizer(special: list[str], template: str, **more) -> Tokenizer:
    """Return a tokenizer of bytes without merges: a character always has the same token."""
    backend = Backend(
        models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    return Tokenizer(backend, bos=special[0], eos=special[-1], chat_template=template, **more)


@functools.cache
def family(name: str) -> Tokenizer:
    template = re.sub(r"\{%-? (end)?generation -?%\}", "", (TEMPLATES / f"{name}.jinja").read_text())
    if name != "gemma":
        first, *rest = SPECIAL[name]
        # by which the format of Llama's calls is detected: this template does not describe it
        return bytes_tokenizer([first, *(["<|python_tag|>"] if name == "llama3" else []), *rest], template)
    backend = sentencepiece()
    backend.add_special_tokens(SPECIAL[name])
    return Tokenizer(backend, bos="<bos>", eos="<end_of_turn>", chat_template=template)


def runner_of(
    environment: Any,
    tokenizer: Tokenizer,
    records: list[dict] | None = None,
    settings: Rl = SETTINGS,
    failures: Failures | None = None,
) -> tuple[EnvironmentRunner, Sequence[PromptRecord]]:
    """Return an environment runner and its tasks."""
    factory = EnvironmentFactory.from_settings(environment, settings, tokenizer)
    records = records or [{"messages": ASKED}]
    tasks = open_prompts(settings.data, tokenizer, 4000, records, environments=factory)[0].records
    return EnvironmentRunner.from_settings(environment, settings, tokenizer, tasks, failures), tasks


def begin(task: PromptRecord, member: int = 0, turn: int = 0) -> Episode:
    return new_episode(EpisodeId(turn, 0, member), task.index, task.tokens, 0)


def write(episode: Episode, tokenizer: Tokenizer, text: str, finish: str = "stop") -> None:
    """Extend an episode by a turn of the policy."""
    ids = tokenizer.encode(text, add_special=False)
    episode.extend(ids, np.full(len(ids), -1.0, np.float32))
    episode.text += text.removesuffix(tokenizer.eos or "")
    episode.finish = finish


def play(runner: EnvironmentRunner, episode: Episode, tokenizer: Tokenizer, *turns: str) -> list[list[int]]:
    """Return the observation after each turn of the policy, up to the end of the episode."""
    observations = []
    for turn in turns:
        write(episode, tokenizer, turn)
        observation = runner.reply(episode)
        if observation is None:
            break
        observations.append(observation)
        episode.extend(observation)
    return observations
