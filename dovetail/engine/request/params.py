"""SamplingParams: how the completions of a request are sampled. Every field is applied, or the request is refused."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from dovetail.core.choice import did_you_mean
from dovetail.core.errors import RequestError

MAX_LOGPROBS = 20


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """Constrain a completion; exactly one field is given.

    Args:
        json: A JSON schema as a dict or as text; `{}` or "object" for any JSON object.
        regex: A regular expression that the whole completion matches.
        choice: Texts, of which the completion is one.
        grammar: A grammar in Lark's notation.

    Raises:
        RequestError: If none or several are given, or one has the wrong type.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None

    def __post_init__(self):
        given = [name for name, value in vars(self).items() if value is not None]
        if len(given) != 1:
            raise _bad_structure(f"must have exactly one of json, regex, choice, grammar, got {given or 'none'}")
        for name in ("regex", "grammar"):
            if not isinstance(getattr(self, name), str | None):
                raise _bad_structure(f"`{name}` must be a string, got {getattr(self, name)!r}")
        if not isinstance(self.json, str | Mapping | None):
            raise _bad_structure(f"`json` must be a schema as a dict or as text, got {self.json!r}")
        if self.choice is not None:
            object.__setattr__(self, "choice", _texts("choice", self.choice, "structured_outputs"))
            if not self.choice:
                raise _bad_structure("`choice` must have at least one text, got none")

    @classmethod
    def of(cls, value: Any) -> StructuredOutputsParams | None:
        """Return a value as it is, or made from a dict of the fields.

        Raises:
            RequestError: If the value is neither, or the dict has other keys.
        """
        if value is None or isinstance(value, cls):
            return value
        names = [each.name for each in fields(cls)]
        if not isinstance(value, Mapping):
            raise _bad_structure(
                f"must be a StructuredOutputsParams or a dict with one of {', '.join(names)}, got {value!r}"
            )
        unknown = [name for name in value if name not in names]
        if unknown:
            raise _bad_structure(f"must have one of {', '.join(names)}, got {', '.join(map(repr, unknown))}")
        return cls(**value)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Set how the completions of a request are sampled; names and meanings are vLLM's.

    Args:
        n: Number of completions.
        max_tokens: Most tokens of a completion; None: up to the end of the context.
        min_tokens: EOS and stop tokens cannot be sampled before this many tokens.
        temperature: Scale of the randomness; 0 takes the most probable token.
        top_k: Sample from the k most probable tokens; -1 (or 0) for all.
        top_p: Sample from the smallest set of tokens whose probabilities reach this sum.
        min_p: Sample from tokens at least this fraction as probable as the most probable one.
        presence_penalty: Subtracted from the logit of each token that the completion already has.
        frequency_penalty: Subtracted once per occurrence in the completion.
        repetition_penalty: Divides the logits of tokens in the prompt or the completion; above 1 discourages them.
        logit_bias: Token id to a number from -100 to 100 that is added to its logit.
        allowed_token_ids: The only token ids that may be sampled.
        bad_words: Texts that must not appear.
        stop: Strings that end a completion.
        stop_token_ids: Token ids that end a completion.
        include_stop_str_in_output: Whether the text ends with the stop string.
        ignore_eos: Whether to continue after an EOS token.
        seed: Seed of this request; None: the engine draws one.
        logprobs: Return the log-probability of each token and of this many most probable tokens beside it.
        prompt_logprobs: The same for the tokens of the prompt. The first token and image tokens have none (None).
        structured_outputs: A StructuredOutputsParams or a dict of its fields, such as `{"regex": "[0-9]+"}`.
        speculation: False: no draft tokens for this request; the output is the same.

    Raises:
        RequestError: If a value is out of range or has the wrong type, with the field's name as `param`.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = -1
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
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    speculation: bool = True

    def __post_init__(self):
        for name in ("stop", "bad_words"):
            object.__setattr__(self, name, _texts(name, getattr(self, name)))
        object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
        object.__setattr__(self, "structured_outputs", StructuredOutputsParams.of(self.structured_outputs))
        for name in ("include_stop_str_in_output", "ignore_eos", "speculation"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"`{name}` must be True or False, got {getattr(self, name)!r}", param=name)
        for name, low, high in _RANGES:
            _check_range(name, getattr(self, name), low, high)
        self._check_bias()
        self._check_together()

    def _check_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(
                f"`logit_bias` must be a dict of token id to bias, got {self.logit_bias!r}", param="logit_bias"
            )
        _token_ids("logit_bias", self.logit_bias)
        for token, bias in self.logit_bias.items():
            _check_range("logit_bias", bias, -100.0, 100.0, f"logit_bias[{token}]")

    def _check_together(self) -> None:
        """Check the fields that depend on each other."""
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"`min_tokens` must be at most max_tokens={self.max_tokens}, got {self.min_tokens}", param="min_tokens"
            )
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise RequestError(
                    "`allowed_token_ids` must have at least one token id, got none", param="allowed_token_ids"
                )
            if self.structured_outputs:
                raise RequestError(
                    "`structured_outputs` and `allowed_token_ids` exclude each other: give one of them",
                    param="structured_outputs",
                )

    @property
    def greedy(self) -> bool:
        """Return whether the most probable token is always taken."""
        return self.temperature == 0

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise renamed_attribute(self, name, _RENAMED)


# old and foreign names -> ours
_RENAMED = {
    "structured": "structured_outputs", "guided_decoding": "structured_outputs", "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens", "num_return_sequences": "n", "stop_strings": "stop",
}  # fmt: skip
# (field, least, greatest); None is allowed where it is the default
_RANGES = (
    ("n", 1, 1024), ("max_tokens", 1, None), ("min_tokens", 0, None), ("temperature", 0.0, 100.0),
    ("top_k", -1, None), ("top_p", 1e-9, 1.0), ("min_p", 0.0, 1.0), ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0), ("repetition_penalty", 1e-9, 100.0), ("seed", -(2**63), 2**64 - 1),
    ("logprobs", 0, MAX_LOGPROBS), ("prompt_logprobs", 0, MAX_LOGPROBS),
)  # fmt: skip
_OPTIONAL = {"max_tokens", "seed", "logprobs", "prompt_logprobs"}
_INTEGERS = {"n", "max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs"}


def _check_keywords(init: Callable[..., None]) -> Callable[..., None]:
    """Return SamplingParams.__init__ that refuses an unknown keyword with the right one."""
    known = [each.name for each in fields(SamplingParams)]

    @functools.wraps(init)
    def checked(self: SamplingParams, **given: Any) -> None:
        for name in given:
            if name not in known:
                hint = f": use {_RENAMED[name]!r}" if name in _RENAMED else f".{did_you_mean(name, known)}"
                raise RequestError(f"SamplingParams has no parameter {name!r}{hint}", param=name)
        init(self, **given)

    return checked


SamplingParams.__init__ = _check_keywords(SamplingParams.__init__)


def renamed_attribute(owner: object, name: str, names: Mapping[str, str]) -> AttributeError:
    """Return the error for an attribute that `owner` does not have; `names` maps old names to current ones."""
    hint = f": use {names[name]!r}" if name in names else ""
    return AttributeError(f"{type(owner).__name__} has no attribute {name!r}{hint}")


def check_room(name: str, max_tokens: int | None, prompt: int, context: int) -> None:
    """Check that `max_tokens` fit into the context after a prompt of `prompt` tokens.

    A server and a chat call this; `LLM.generate` instead ends a completion at the context with finish_reason length.

    Args:
        name: The caller's name of `max_tokens`, for the error.
        max_tokens: The requested length; None is not checked.
        prompt: Tokens of the prompt.
        context: Most tokens of prompt and completion.

    Raises:
        RequestError: With code `context_length_exceeded`.
    """
    if max_tokens is not None and prompt + max_tokens > context:
        raise RequestError(
            f"`{name}` must be at most {max(0, context - prompt)} after a prompt of {prompt} tokens with a context of "
            f"{context}, got {max_tokens}",
            param=name,
            code="context_length_exceeded",
        )


def _bad_structure(message: str) -> RequestError:
    return RequestError(f"structured_outputs: {message}", param="structured_outputs")


def _texts(name: str, value: Any, param: str | None = None) -> tuple[str, ...]:
    """Return one string or several as a tuple, none of them empty."""
    texts = (value,) if isinstance(value, str) else _listed(name, value, param)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise RequestError(f"`{name}` must be a list of non-empty strings, got {text!r} in it", param=param or name)
    return texts


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    ids = _listed(name, value)
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise RequestError(f"`{name}` must have token ids, integers from 0 on, got {token!r}", param=name)
    return ids


def _listed(name: str, value: Any, param: str | None = None) -> tuple:
    if not isinstance(value, Iterable):
        raise RequestError(f"`{name}` must be a list, got {value!r}", param=param or name)
    return tuple(value)


def _check_range(name: str, value: Any, low: float | None, high: float | None, shown: str | None = None) -> None:
    if value is None and name in _OPTIONAL:
        return
    shown, kind = shown or name, int if name in _INTEGERS else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind) or (isinstance(value, float) and math.isnan(value)):
        raise RequestError(
            f"`{shown}` must be {'an integer' if kind is int else 'a number'}, got {value!r}", param=name
        )
    if (low is not None and value < low) or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise RequestError(f"`{shown}` must be {bounds}, got {value!r}", param=name)
