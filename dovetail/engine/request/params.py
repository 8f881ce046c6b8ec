"""SamplingParams: everything a request may ask of the sampler. Each field is honoured or the request is refused."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from dovetail.core.errors import UserError

MAX_LOGPROBS = 20


@dataclass(frozen=True, kw_only=True)
class Structured:
    """What the output must be: exactly one of these is given."""

    json: str | Mapping[str, Any] | None = None  # a JSON schema; {} or "object" for any JSON object
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None  # Lark

    def __post_init__(self):
        given = [name for name, value in vars(self).items() if value is not None]
        if len(given) != 1:
            raise UserError(
                f"structured output takes exactly one of json, regex, choice, grammar; got {given or 'none'}"
            )
        for name in ("regex", "grammar"):
            if not isinstance(getattr(self, name), str | None):
                raise UserError(f"structured output: {name} is text; got {getattr(self, name)!r}")
        if not isinstance(self.json, str | Mapping | None):
            raise UserError(f"structured output: json is a schema, as a dict or as text; got {self.json!r}")
        if self.choice is not None:
            object.__setattr__(self, "choice", _texts("choice", self.choice))
            if not self.choice:
                raise UserError("choice is empty: no output could be made")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    n: int = 1
    max_tokens: int | None = 16  # None: as far as the model goes
    min_tokens: int = 0  # until then the end tokens and stop ids cannot be sampled
    temperature: float = 1.0  # 0: the most probable token
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None  # of each sampled token, with this many of the most probable beside it
    prompt_logprobs: int | None = None
    structured: Structured | None = None  # or a dict of its fields: {"regex": "[0-9]+"}

    def __post_init__(self):
        for name in ("stop", "bad_words"):
            object.__setattr__(self, name, _texts(name, getattr(self, name)))
        object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
        for name in ("include_stop_str_in_output", "ignore_eos"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"{name} must be True or False; got {getattr(self, name)!r}")
        for name, low, high in _RANGES:
            _check_range(name, getattr(self, name), low, high)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise UserError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise UserError("allowed_token_ids is empty: no token could be sampled")
        object.__setattr__(self, "structured", _structured(self.structured))
        if self.structured and self.allowed_token_ids is not None:
            raise UserError("structured output and allowed_token_ids contradict each other: give one of them")
        if not isinstance(self.logit_bias, Mapping):
            raise UserError(f"logit_bias must be a dict of token id to bias; got {self.logit_bias!r}")
        _token_ids("logit_bias", self.logit_bias)
        for token, bias in self.logit_bias.items():
            _check_range(f"logit_bias[{token}]", bias, -100.0, 100.0)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


# (field, least, greatest); None is allowed where it is the default
_RANGES = (
    ("n", 1, 1024), ("max_tokens", 1, None), ("min_tokens", 0, None), ("temperature", 0.0, 100.0),
    ("top_k", 0, None), ("top_p", 1e-9, 1.0), ("min_p", 0.0, 1.0), ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0), ("repetition_penalty", 1e-9, 100.0), ("seed", -(2**63), 2**64 - 1),
    ("logprobs", 0, MAX_LOGPROBS), ("prompt_logprobs", 0, MAX_LOGPROBS),
)  # fmt: skip
_OPTIONAL = {"max_tokens", "seed", "logprobs", "prompt_logprobs"}
_INTEGERS = {"n", "max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs"}


def check_room(name: str, max_tokens: int | None, prompt: int, context: int) -> None:
    """ValueError if an answer of that length does not fit behind a prompt of so many tokens. `name`: what whoever asked
    calls max_tokens. For a server and a chat: `LLM.generate` ends at the context, with finish_reason length."""
    if max_tokens is not None and prompt + max_tokens > context:
        message = f"{name}={max_tokens} after a prompt of {prompt} tokens is more than the context of {context} holds"
        raise UserError(f"{message}; at most {max(0, context - prompt)} fit")


def _structured(value: Any) -> Structured | None:
    """As it was given, or made of a dict of its fields."""
    if value is None or isinstance(value, Structured):
        return value
    names = [each.name for each in fields(Structured)]
    if not isinstance(value, Mapping):
        raise UserError(f"structured is a Structured(...) or a dict with one of {', '.join(names)}; got {value!r}")
    unknown = [name for name in value if name not in names]
    if unknown:
        raise UserError(f"structured takes one of {', '.join(names)}; got {', '.join(map(repr, unknown))}")
    return Structured(**value)


def _texts(name: str, value: Any) -> tuple[str, ...]:
    """One string or several, none of them empty."""
    texts = (value,) if isinstance(value, str) else _listed(name, value)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise UserError(f"{name} takes strings that are not empty; got {text!r}")
    return texts


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    ids = _listed(name, value)
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise UserError(f"{name} takes token ids, integers from 0 on; got {token!r}")
    return ids


def _listed(name: str, value: Any) -> tuple:
    if not isinstance(value, Iterable):
        raise UserError(f"{name} must be a list; got {value!r}")
    return tuple(value)


def _check_range(name: str, value: Any, low: float | None, high: float | None) -> None:
    if value is None and name in _OPTIONAL:
        return
    kind = int if name in _INTEGERS else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind) or (isinstance(value, float) and math.isnan(value)):
        raise UserError(f"{name} must be {'an integer' if kind is int else 'a number'}; got {value!r}")
    if (low is not None and value < low) or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise UserError(f"{name} must be {bounds}; got {value!r}")
