"""Intake: from what a user asks to a checked Request, or a ValueError that says what is wrong with it.

It shares nothing that steps change, so any thread may use it: tokenizing a long prompt or compiling a grammar need not
hold up the engine's.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Mapping
from collections.abc import Sequence as Many
from numbers import Integral
from typing import Any

import numpy as np

from dovetail.core.errors import UserError
from dovetail.engine.device.adapters import Adapters
from dovetail.engine.device.sampler import Sampler
from dovetail.engine.request.params import SamplingParams
from dovetail.engine.request.sequence import Request
from dovetail.engine.schedule.scheduler import SchedulerConfig
from dovetail.io.tokenizer import Tokenizer

Prompt = str | Many[int]


class Intake:
    def __init__(
        self,
        config: SchedulerConfig,
        sampler: Sampler,
        tokenizer: Tokenizer | None,
        seed: int | None,
        adapters: Adapters,
        writes: bool = True,
    ):
        """`seed`: of the seeds that requests without one get, in the order they come; None: others at each start.
        `writes`: whether the model has words to answer with; else every request is refused."""
        self._config, self._sampler, self._tokenizer, self._adapters = config, sampler, tokenizer, adapters
        self._rng, self._writes = np.random.default_rng(seed), writes

    def request(
        self,
        id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        adapter: str | None = None,
        cache_salt: str | None = None,
        arrival: float | None = None,
        text: bool = True,
    ) -> Request:
        """`priority`: the lowest goes first. `adapter`: the name of one that is loaded. `cache_salt`: its prefixes are
        shared with requests of the same salt only. `arrival`: when it came, in seconds of time.monotonic, if that is
        not now. `text`: see Request."""
        if not self._writes:
            raise UserError(
                "the model gives texts a score and writes none: ask for scores, by LLM.score or a server's /score"
            )
        self._check_call(id, priority, cache_salt, arrival)
        tokens = self.encode(prompt)
        self.check_tokens(tokens)
        if not isinstance(params, SamplingParams):
            raise UserError(f"sampling parameters are SamplingParams(...); got {params!r}")
        if len(tokens) + params.min_tokens > self._config.max_model_len:
            raise UserError(
                f"min_tokens={params.min_tokens} after a prompt of {len(tokens)} tokens is more than "
                f"max_model_len={self._config.max_model_len} holds"
            )
        sampling = self._sampler.prepare(params)
        if self._tokenizer is None and params.stop and text:
            raise UserError("stop strings need a tokenizer, and the model has none: use stop_token_ids")
        if params.prompt_logprobs is not None:
            cache_salt = f"scored:{id}"  # every prompt token must be computed, so none is looked up
        seed = params.seed if params.seed is not None else int(self._rng.integers(2**63))
        arrival = time.monotonic() if arrival is None else arrival
        found = None if adapter is None else self._adapters.find(adapter)
        return Request(id, tuple(tokens), params, arrival, priority, found, cache_salt, seed, text, sampling)

    def _check_call(self, id: str, priority: int, cache_salt: str | None, arrival: float | None) -> None:
        if not isinstance(id, str):
            raise UserError(f"a request's id is a string; got {id!r}")
        if cache_salt is not None and not isinstance(cache_salt, str):
            raise UserError(f"cache_salt is a string; got {cache_salt!r}")
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise UserError(f"priority is an integer, the lowest goes first; got {priority!r}")
        if arrival is not None and (not isinstance(arrival, int | float) or not math.isfinite(arrival)):
            raise UserError(f"arrival is a moment of time.monotonic, in seconds; got {arrival!r}")
        if priority and self._config.policy != "priority":
            raise UserError(
                f"priority={priority} needs an engine that was started with scheduling_policy='priority' "
                f"(dovetail serve --scheduling-policy priority), got {self._config.policy!r}"
            )

    def encode(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            if isinstance(prompt, bytes):
                raise UserError("a prompt is text or a list of token ids; got bytes: decode them first")
            try:
                return list(map(operator.index, prompt))
            except TypeError:
                raise UserError(f"a prompt is text or a list of token ids; got {repr(prompt)[:80]}") from None
        if self._tokenizer is None:
            raise UserError("the model has no tokenizer: give the prompt as token ids")
        return self._tokenizer.encode(prompt)

    def check_tokens(self, tokens: list[int]) -> None:
        limit, vocab = self._config.max_model_len, self._sampler.vocab
        if not tokens:
            raise UserError("the prompt is empty: give at least one token")
        if len(tokens) >= limit:
            raise UserError(f"the prompt has {len(tokens)} tokens; with max_model_len={limit} at most {limit - 1} fit")
        if min(tokens) < 0 or max(tokens) >= vocab:
            bad = next(token for token in tokens if not 0 <= token < vocab)
            raise UserError(f"prompt: token id {bad} is outside the vocabulary of {vocab}")


Conversation = Many[Mapping[str, Any]]  # its messages


def as_many(prompts: Prompt | Many[Prompt]) -> list[Any]:
    """One prompt (text, or ids) or many of them, as a list."""
    if isinstance(prompts, str | bytes):
        return [prompts]
    if not isinstance(prompts, Many) and not hasattr(prompts, "__array__"):
        raise UserError(f"prompts are text or lists of token ids, one or a list of them; got {repr(prompts)[:80]}")
    return [prompts] if len(prompts) > 0 and isinstance(prompts[0], Integral) else list(prompts)


def holds_messages(prompts: Any) -> bool:
    """Whether these are messages, of one conversation or of several; else they are prompts."""
    first = _first(prompts)
    return isinstance(first, Mapping) or isinstance(_first(first), Mapping)


def is_conversation(messages: Conversation | Many[Conversation]) -> bool:
    """Whether these are the messages of one; else they are several conversations."""
    many = list(messages) if _is_list(messages) else []
    if many and all(isinstance(each, Mapping) for each in many):
        return True
    if many and all(map(_is_list, many)):
        return False
    got = repr(messages)[:80]
    raise UserError(f"chat takes a list of messages (dicts with role and content), or a list of such lists; got {got}")


def _first(value: Any) -> Any:
    return value[0] if _is_list(value) and len(value) else None


def _is_list(value: Any) -> bool:
    return isinstance(value, Many) and not isinstance(value, str | bytes)
