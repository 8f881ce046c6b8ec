"""Calls: an agent's turns kept to its tools by the server's grammars, and what these left of the vocabulary.

A turn that follows a grammar is drawn among the words that the grammar allows before each of its tokens, and the
sampler's log-probabilities are of these words alone. The trainer must know them. They are not kept with an episode: the
same grammar, fed with the same tokens, says them again when rows are made.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from dovetail.core.errors import UserError
from dovetail.data.example_encoder import example_encoder
from dovetail.engine.grammar import compile as compile_grammar
from dovetail.engine.grammar import masks
from dovetail.engine.request.params import StructuredOutputsParams
from dovetail.io.tokenizer import Tokenizer
from dovetail.models.config import ModelConfig
from dovetail.tune.rl.episode import Episode
from dovetail.tune.rl.layout import Layout
from dovetail.tune.rl.prompts import PromptRecord
from dovetail.tune.rl.script import Script
from dovetail.tune.rl.sections import Sampling
from dovetail.tune.rl.settings import Rl

ALL = 0xFFFFFFFF  # a word of a mask that allows everything


class Calls:
    def __init__(
        self, wanted: Sampling, script: Script, tokenizer: Tokenizer, cfg: ModelConfig, tasks: Iterable[PromptRecord]
    ):
        self._choice, self._parallel = wanted.tool_choice, wanted.parallel_tool_calls
        self._script, self._tokenizer, self._vocab = script, tokenizer, cfg.vocab
        self._eos_ids = tuple(dict.fromkeys((*cfg.eos_ids, *tokenizer.eos_ids)))  # as the engine's
        self._tools = {task.index: [_closed(tool) for tool in task.tools] for task in tasks}
        self._most = 1  # entries of a row's table so far: a smaller one would have the step compiled once more
        self._check()

    @classmethod
    def of(cls, settings: Rl, tokenizer: Tokenizer, cfg: ModelConfig, tasks: Iterable[PromptRecord]) -> Calls | None:
        """ValueError where no grammar keeps these tasks' answers to their tools."""
        if not settings.sampling.tool_choice:
            return None
        return cls(settings.sampling, Script(example_encoder(settings.data, tokenizer)), tokenizer, cfg, tasks)

    def grammar(self, episode: Episode) -> StructuredOutputsParams | None:
        """Of the turn that begins now (a episode_runner.Grammar); None: it may be anything, for there are no tools."""
        return self._grammar(episode.prompt_index, episode.tokens)

    def _grammar(self, task: int, before: np.ndarray) -> StructuredOutputsParams | None:
        tools = self._tools[task]
        if not tools:
            return None
        listener = self._script.listener(True, tools)
        return StructuredOutputsParams(grammar=listener.grammar(before, tools, self._choice, self._parallel))

    def columns(self, layout: Layout, episodes: Sequence[Episode]) -> dict[str, np.ndarray]:
        """`masks` [R, M, W] uint32, the different ones of each row, and `mask` [R, T] int32, which of them a place's
        target was drawn from; the first allows all words.
        """
        found = [{b"": 0} for _ in range(layout.rows)]  # of each row: a mask and its number
        numbers = []
        for (row, _, _), episode in zip(layout.at, episodes, strict=True):
            own, known = np.zeros(len(episode.tokens), np.int32), found[row]
            for place, bits in self._masks(episode):
                own[place] = known.setdefault(bits.tobytes(), len(known))
            numbers.append(own)
        self._most = max(self._most, *(1 << (len(known) - 1).bit_length() for known in found))
        table = np.full((layout.rows, self._most, -(-self._vocab // 32)), ALL, np.uint32)
        for row, known in enumerate(found):
            for bits, number in known.items():
                if number:
                    table[row, number] = np.frombuffer(bits, np.uint32)
        return {"masks": table, "mask": layout.put(numbers, np.int32)}

    def _masks(self, episode: Episode) -> Iterator[tuple[int, np.ndarray]]:
        """Of each token that a grammar kept, where it is and what was allowed there."""
        edges = np.flatnonzero(np.diff(episode.sampled, prepend=False, append=False))
        for first, end in edges.reshape(-1, 2):  # of each turn of the policy's
            if structured := self._grammar(episode.prompt_index, episode.tokens[:first]):
                turn = episode.tokens[first:end].tolist()
                bits = masks(structured, self._tokenizer, turn, self._vocab, self._eos_ids)
                yield from zip(range(first, end), bits, strict=True)

    def _check(self) -> None:
        """Before anything is sampled: a grammar that cannot be made would end the run there."""
        if not any(self._tools.values()):
            raise UserError(
                f"sampling.tool_choice={self._choice} says how tools are called, and no prompt shows any: give an "
                "environment with tools, or leave it out"
            )
        if self._choice == "required" and not all(self._tools.values()):
            raise UserError(
                "sampling.tool_choice=required needs tools to choose from in every prompt, and some show none: give "
                "these their tools, or set auto"
            )
        told: dict[str, Any] = {json.dumps(tools): task for task, tools in self._tools.items()}
        for task in told.values():
            try:
                if structured := self._grammar(task, np.zeros(0, np.int32)):
                    compile_grammar(structured, self._tokenizer)
            except ValueError as error:
                raise UserError(f"sampling.tool_choice={self._choice} cannot be kept to: {error}") from None


def _closed(tool: dict[str, Any]) -> dict[str, Any]:
    """With no arguments but those that it declares, unless it says otherwise: JSON Schema would allow any, and a Python
    function takes no other.
    """
    function = tool.get("function", tool)
    wanted = {"additionalProperties": False, **(function.get("parameters") or {"type": "object", "properties": {}})}
    return {"type": "function", "function": {**function, "parameters": wanted}}
