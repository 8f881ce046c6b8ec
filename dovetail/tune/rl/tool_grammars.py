"""ToolGrammars: constrain an agent's turns to calls of its tools, and give the trainer the allowed tokens.

A constrained turn is sampled among the tokens that the server's grammar allows at each position, and the sampler's
log-probabilities are over these tokens alone. The trainer must know them. They are not stored with an episode: the same
grammar, fed with the same tokens, computes them again when a batch is built.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from dovetail.core.errors import RecipeError
from dovetail.data.example_encoder import example_encoder
from dovetail.engine.grammar import compile as compile_grammar
from dovetail.engine.grammar import masks as grammar_masks
from dovetail.engine.request.params import StructuredOutputsParams
from dovetail.io.tokenizer import Tokenizer
from dovetail.models.config import ModelConfig
from dovetail.tune.rl.episode import Episode
from dovetail.tune.rl.layout import Layout
from dovetail.tune.rl.prompts import PromptRecord
from dovetail.tune.rl.sections import Sampling
from dovetail.tune.rl.settings import Rl
from dovetail.tune.rl.turns import TurnEncoder

ALL = 0xFFFFFFFF  # a 32-bit word of a mask that allows every token


class ToolGrammars:
    """The grammars of an agent's turns (a episode_runner.Grammar), and their masks as columns of a batch.

    Args:
        sampling: With a `tool_choice`.
        encoder: Of the turns.
        tokenizer: The policy's tokenizer.
        cfg: The policy's config.
        prompts: The prompts.

    Raises:
        RecipeError: No grammar constrains the turns of these prompts.
    """

    def __init__(
        self,
        sampling: Sampling,
        encoder: TurnEncoder,
        tokenizer: Tokenizer,
        cfg: ModelConfig,
        prompts: Iterable[PromptRecord],
    ):
        self._choice, self._parallel = sampling.tool_choice, sampling.parallel_tool_calls
        self._encoder, self._tokenizer, self._vocab = encoder, tokenizer, cfg.vocab
        self._eos_ids = tuple(dict.fromkeys((*cfg.eos_ids, *tokenizer.eos_ids)))  # as in the engine
        self._tools = {record.index: [_closed(tool) for tool in record.tools] for record in prompts}
        self._entries = 1  # of a row's table so far: a smaller table would compile the step again
        self._check()

    @classmethod
    def from_settings(
        cls, settings: Rl, tokenizer: Tokenizer, cfg: ModelConfig, prompts: Iterable[PromptRecord]
    ) -> ToolGrammars | None:
        """Return the grammars of `sampling.tool_choice`; None if it is not set."""
        if not settings.sampling.tool_choice:
            return None
        return cls(settings.sampling, TurnEncoder(example_encoder(settings.data, tokenizer)), tokenizer, cfg, prompts)

    def grammar(self, episode: Episode) -> StructuredOutputsParams | None:
        """Return the grammar of the turn that begins now; None if its prompt shows no tools."""
        return self._grammar(episode.prompt_index, episode.tokens)

    def _grammar(self, record: int, before: np.ndarray) -> StructuredOutputsParams | None:
        tools = self._tools[record]
        if not tools:
            return None
        parser = self._encoder.parser(True, tools)
        return StructuredOutputsParams(grammar=parser.grammar(before, tools, self._choice, self._parallel))

    def columns(self, layout: Layout, episodes: Sequence[Episode]) -> dict[str, np.ndarray]:
        """Return the masks of a batch: `masks` [R, M, W] uint32 and `mask` [R, T] int32.

        `masks` holds the distinct masks of each row, one bit per token of the vocabulary; the first allows every token.
        `mask` is the index of the mask that each position's target was sampled with.
        """
        tables = [{b"": 0} for _ in range(layout.rows)]  # for each row: mask -> its index
        indices = []
        for (row, _, _), episode in zip(layout.at, episodes, strict=True):
            own, table = np.zeros(len(episode.tokens), np.int32), tables[row]
            for position, bits in self._masks(episode):
                own[position] = table.setdefault(bits.tobytes(), len(table))
            indices.append(own)
        self._entries = max(self._entries, *(1 << (len(table) - 1).bit_length() for table in tables))
        masks = np.full((layout.rows, self._entries, -(-self._vocab // 32)), ALL, np.uint32)
        for row, table in enumerate(tables):
            for bits, index in table.items():
                if index:
                    masks[row, index] = np.frombuffer(bits, np.uint32)
        return {"masks": masks, "mask": layout.put(indices, np.int32)}

    def _masks(self, episode: Episode) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the position and the mask of each token that was sampled with a grammar."""
        edges = np.flatnonzero(np.diff(episode.sampled, prepend=False, append=False))
        for first, end in edges.reshape(-1, 2):  # each turn of the policy
            if structured := self._grammar(episode.prompt_index, episode.tokens[:first]):
                turn = episode.tokens[first:end].tolist()
                bits = grammar_masks(structured, self._tokenizer, turn, self._vocab, self._eos_ids)
                yield from zip(range(first, end), bits, strict=True)

    def _check(self) -> None:
        """Compile every grammar before anything is sampled."""
        if not any(self._tools.values()):
            raise self._refusal("requires tools, and no prompt shows any: give an environment with tools, or remove it")
        if self._choice == "required" and not all(self._tools.values()):
            raise self._refusal("requires tools in every prompt, and some show none: add tools to them, or set auto")
        distinct: dict[str, Any] = {json.dumps(tools): record for record, tools in self._tools.items()}
        for record in distinct.values():
            try:
                if structured := self._grammar(record, np.zeros(0, np.int32)):
                    compile_grammar(structured, self._tokenizer)
            except ValueError as error:
                raise self._refusal(f"has no grammar for these tools: {error}") from None

    def _refusal(self, problem: str) -> RecipeError:
        return RecipeError(f"sampling.tool_choice={self._choice} {problem}", param="sampling.tool_choice")


def _closed(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool that takes no undeclared arguments, unless its schema allows them explicitly.

    JSON Schema allows any, and a Python function takes none.
    """
    function = tool.get("function", tool)
    schema = {"additionalProperties": False, **(function.get("parameters") or {"type": "object", "properties": {}})}
    return {"type": "function", "function": {**function, "parameters": schema}}
