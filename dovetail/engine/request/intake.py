"""Intake: check what a user asks for and turn it into a Request.

It shares no state with steps, so any thread may use it: tokenizing a long prompt or compiling a grammar does not delay
the engine's thread.
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

from dovetail.core.errors import RequestError
from dovetail.engine.device.adapters import Adapters
from dovetail.engine.device.sampler import Sampler
from dovetail.engine.request.params import SamplingParams
from dovetail.engine.request.sequence import Request
from dovetail.engine.schedule.scheduler import SchedulerConfig
from dovetail.io.images.item import ImageItem, ImagePrompt, ImageSpan
from dovetail.io.tokenizer import Tokenizer
from dovetail.models.towers.vision import Vision
from dovetail.ops.rope import spatial_positions

Prompt = str | Many[int] | ImagePrompt
Conversation = Many[Mapping[str, Any]]  # its messages


class Intake:
    """Check requests.

    Args:
        config: The scheduler's limits.
        sampler: Prepares masks and grammars.
        tokenizer: The model's, if it has one.
        seed: Seed of the seeds that requests without one get, in the order they come; None: random at each start.
        adapters: The loaded LoRA adapters.
        generates: Whether the model generates tokens. A reward model does not, and every request is refused.
        vision: How the model sees images; None: images are refused.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        sampler: Sampler,
        tokenizer: Tokenizer | None,
        seed: int | None,
        adapters: Adapters,
        generates: bool = True,
        vision: Vision | None = None,
    ):
        self._config, self._sampler, self._tokenizer, self._adapters = config, sampler, tokenizer, adapters
        self._rng, self._generates, self._vision = np.random.default_rng(seed), generates, vision

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
        """Return a checked request.

        Args:
            id: The request's id.
            prompt: Text, token ids, or token ids with images.
            params: The sampling parameters.
            priority: The lowest goes first, if the engine schedules by priority.
            adapter: The name of a loaded adapter; None: the base model.
            cache_salt: Cached prefixes are shared only among requests with the same salt.
            arrival: When the request arrived, from time.monotonic; by default now.
            text: Whether the engine detokenizes (see Request).

        Raises:
            RequestError: If this model or engine cannot run the request; `param` names the field.
        """
        if not self._generates:
            raise RequestError("a reward model does not generate text: use LLM.score or the server's /score")
        self._check_call(id, priority, cache_salt, arrival)
        spans = prompt.spans if isinstance(prompt, ImagePrompt) else ()
        tokens = self.encode(prompt.tokens if isinstance(prompt, ImagePrompt) else prompt)
        self.check_tokens(tokens)
        self._check_images(tokens, spans)
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"`sampling_params` must be SamplingParams(...), got {params!r}", param="sampling_params"
            )
        self._check_params(params, len(tokens), text)
        sampling = self._sampler.prepare(params)
        if params.prompt_logprobs is not None:
            cache_salt = f"scored:{id}"  # every prompt token must be computed, so none is looked up
        seed = params.seed if params.seed is not None else int(self._rng.integers(2**63))
        arrival = time.monotonic() if arrival is None else arrival
        found = None if adapter is None else self._adapters.find(adapter)
        return Request(
            id, tuple(tokens), params, arrival, priority, found, cache_salt, seed, text, sampling, spans,
            offsets=self._offsets(len(tokens), spans),
        )  # fmt: skip

    def _check_call(self, id: str, priority: int, cache_salt: str | None, arrival: float | None) -> None:
        if not isinstance(id, str):
            raise RequestError(f"`request_id` must be a string, got {id!r}", param="request_id")
        if cache_salt is not None and not isinstance(cache_salt, str):
            raise RequestError(f"`cache_salt` must be a string, got {cache_salt!r}", param="cache_salt")
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise RequestError(
                f"`priority` must be an integer (the lowest goes first), got {priority!r}", param="priority"
            )
        if arrival is not None and (not isinstance(arrival, int | float) or not math.isfinite(arrival)):
            raise RequestError(f"`arrival` must be seconds of time.monotonic, got {arrival!r}", param="arrival")
        if priority and self._config.policy != "priority":
            raise RequestError(
                f"`priority` must be 0 with scheduling_policy='fcfs', got {priority}: start the engine with "
                "scheduling_policy='priority' (dovetail serve --scheduling-policy priority)",
                param="priority",
            )

    def _check_images(self, tokens: list[int], spans: tuple[ImageSpan, ...]) -> None:
        if self._vision is None:
            if spans:
                raise RequestError("the model does not see images: use one with a vision tower", param="images")
            return
        token, end = self._vision.image_token, 0
        for span in spans:
            self._check_item(span.item, span.count)
            if span.start < end or tokens[span.start : span.end] != [token] * span.count:
                raise RequestError(
                    f"`images` must have spans in order, each with image tokens ({token}) alone, got one from "
                    f"{span.start} to {span.end}",
                    param="images",
                )
            end = span.end
        count, wanted = tokens.count(token), sum(span.count for span in spans)
        if count != wanted:
            raise RequestError(
                f"`prompt` must have one image token ({token}) for each of the {wanted} features of its images, got "
                f"{count}",
                param="images",
            )

    def _offsets(self, length: int, spans: tuple[ImageSpan, ...]) -> np.ndarray | None:
        """Return the rotary positions of a prompt minus its positions (see Request.offsets); None if they are equal."""
        if not spans or self._vision is None or not self._vision.mrope:
            return None
        images = [(span.start, *span.item.grid) for span in spans]
        return spatial_positions(length + 1, images) - np.arange(length + 1, dtype=np.int32)[:, None]

    def _check_item(self, item: ImageItem, count: int) -> None:
        assert self._vision is not None
        tower, shape = self._vision.tower, item.patches.shape
        fits = len(shape) == 2 and shape[1] == tower.patch_dim and item.positions.shape == (shape[0], 2)
        if not fits or shape[0] > tower.max_patches or shape[0] // tower.patches_per_feature != count:
            raise RequestError(
                f"an item of `images` must have at most {tower.max_patches} patches of {tower.patch_dim} numbers, "
                f"{tower.patches_per_feature} for each image token, got {list(shape)} for {count} tokens",
                param="images",
            )

    def _check_params(self, params: SamplingParams, prompt: int, text: bool) -> None:
        if prompt + params.min_tokens > self._config.max_model_len:
            raise RequestError(
                f"`min_tokens` must be at most {self._config.max_model_len - prompt} after a prompt of {prompt} tokens "
                f"with max_model_len={self._config.max_model_len}, got {params.min_tokens}",
                param="min_tokens",
            )
        if self._tokenizer is None and params.stop and text:
            raise RequestError("`stop` requires a tokenizer, and the model has none: use stop_token_ids", param="stop")

    def encode(self, prompt: Prompt) -> list[int]:
        """Return a prompt without images as token ids."""
        if isinstance(prompt, ImagePrompt):
            raise RequestError("only requests that generate text take images", param="images")
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise RequestError("the model has no tokenizer: give the prompt as token ids", param="prompt")
            return self._tokenizer.encode(prompt)
        if isinstance(prompt, bytes):
            raise RequestError(
                "`prompt` must be text or a list of token ids, got bytes: decode them first", param="prompt"
            )
        try:
            return list(map(operator.index, prompt))
        except TypeError:
            raise RequestError(
                f"`prompt` must be text or a list of token ids, got {repr(prompt)[:80]}", param="prompt"
            ) from None

    def check_tokens(self, tokens: list[int]) -> None:
        """Check that a prompt is not empty, fits the context and has only tokens of the vocabulary."""
        limit, vocab = self._config.max_model_len, self._sampler.vocab
        if not tokens:
            raise RequestError("`prompt` must have at least one token, got none", param="prompt")
        if len(tokens) >= limit:
            raise RequestError(
                f"`prompt` must have at most {limit - 1} tokens with max_model_len={limit}, got {len(tokens)}",
                param="prompt",
                code="context_length_exceeded",
            )
        if min(tokens) < 0 or max(tokens) >= vocab:
            bad = next(token for token in tokens if not 0 <= token < vocab)
            raise RequestError(f"`prompt` must have token ids from 0 to {vocab - 1}, got {bad}", param="prompt")


# --- one prompt or conversation, or many of them ----------------------------------------------------------------------


def as_many(prompts: Prompt | Mapping[str, Any] | Many[Prompt | Mapping[str, Any]]) -> list[Any]:
    """Return one prompt (text, token ids, an ImagePrompt or a dict with images), or many, as a list."""
    if isinstance(prompts, str | bytes | ImagePrompt | Mapping):
        return [prompts]
    if not isinstance(prompts, Many) and not hasattr(prompts, "__array__"):
        raise RequestError(
            f"`prompts` must be text or token ids, or a list of them, got {repr(prompts)[:80]}", param="prompts"
        )
    return [prompts] if len(prompts) > 0 and isinstance(prompts[0], Integral) else list(prompts)


def holds_messages(prompts: Any) -> bool:
    """Return whether these are messages, of one conversation or of several, and not prompts."""
    first = _first(prompts)
    return isinstance(first, Mapping) or isinstance(_first(first), Mapping)


def is_conversation(messages: Conversation | Many[Conversation]) -> bool:
    """Return whether these are the messages of one conversation, and not several conversations."""
    many = list(messages) if _is_list(messages) else []
    if many and all(isinstance(each, Mapping) for each in many):
        return True
    if many and all(map(_is_list, many)):
        return False
    raise RequestError(
        "`messages` must be a list of messages (dicts with role and content) or a list of such lists, got "
        f"{repr(messages)[:80]}",
        param="messages",
    )


def _first(value: Any) -> Any:
    return value[0] if _is_list(value) and len(value) else None


def _is_list(value: Any) -> bool:
    return isinstance(value, Many) and not isinstance(value, str | bytes)
