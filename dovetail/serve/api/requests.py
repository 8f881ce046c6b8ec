"""Body, the base of every request body, and GenerationRequest, the fields that several routes share.

An unknown field is refused with a suggestion. A field that changes answers elsewhere and is not supported here is
refused with the reason. A field that changes no answer is ignored, and the log says so once.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict, model_validator
from pydantic_core import PydanticCustomError

from dovetail.core.errors import RequestError, UserError
from dovetail.engine.request.params import MAX_LOGPROBS, SamplingParams, StructuredOutputsParams

log = logging.getLogger(__name__)
_logged: set[str] = set()  # ignored fields that the log has named

# JSON's own types: "5" is not a number, and 1 is not a flag. Integers of 64 bits fit in a message to the engine.
Int = Annotated[int, Strict(), Field(ge=-(2**63), le=2**63 - 1)]
Num = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Flag = Annotated[bool, Strict()]
Token = Annotated[int, Strict(), Field(ge=0, le=2**31 - 1)]
TopLogprobs = Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)]
Tokens = Annotated[list[Token], Field(max_length=65536)]
PromptField = (
    str
    | Annotated[list[str], Field(min_length=1, max_length=2048)]
    | Tokens
    | Annotated[list[Tokens], Field(min_length=1, max_length=2048)]
)


def prompt_list(value: Any, name: str) -> list[Any]:
    """Return one prompt or several, each of them text or token ids, as a list; `name` is the request's field."""
    many = [value] if isinstance(value, str) or (value and isinstance(value[0], int)) else value
    if not all(many) or not many:
        raise RequestError(f"`{name}` must not be empty: give at least one token", param=name)
    return many


def _at_most(count: int, size: int) -> Callable[[str | list[str]], str | list[str]]:
    """Return a validator of one text or several: at most `count`, each of at most `size` characters."""

    def check(given: str | list[str]) -> str | list[str]:
        texts = [given] if isinstance(given, str) else given
        if len(texts) > count:
            raise UserError(f"expected at most {count} strings, got {len(texts)}")
        if (longest := max(map(len, texts), default=0)) > size:
            raise UserError(f"expected strings of at most {size} characters, got one of {longest}")
        return given

    return check


# Each stop string is compared with each new token's text, and each bad word is tokenized and compared at each step.
Stops = Annotated[str | list[str], AfterValidator(_at_most(16, 256))]
StopList = Annotated[list[str], AfterValidator(_at_most(16, 256))]
Words = Annotated[str | list[str], AfterValidator(_at_most(64, 256))]


class RefusedField(NamedTuple):
    """A known field that is not supported here."""

    why: str
    accepted: tuple[Any, ...] = ()  # values that ask for nothing, and are accepted


class Body(BaseModel):
    """Base of every request body and its parts."""

    model_config = ConfigDict(extra="forbid", populate_by_name=False)
    refused: ClassVar[Mapping[str, RefusedField]] = {}
    ignored: ClassVar[Mapping[str, str]] = {}  # with the reason why no answer depends on it

    def need(self, name: str, where: str) -> Any:
        """Return a field that is required for this kind of body; `where` is the path of the body."""
        value = getattr(self, name)
        if value is None:
            path = f"{where}.{name}"
            raise RequestError(f"{path} is missing", param=path, code="missing_required_parameter")
        return value

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = {field.alias or name for name, field in cls.model_fields.items()}
        return {name: value for name, value in data.items() if cls._is_given(name, value, known)}

    @classmethod
    def _is_given(cls, name: Any, value: Any, known: set[str]) -> bool:
        if name in known:
            return value is not None or name in cls._required()  # null asks for the default
        if name in cls.ignored:
            if value is not None:
                _log_ignored(name, cls.ignored[name])
            return False
        if name in cls.refused:
            why, accepted = cls.refused[name]
            if value is None or any(value == each and type(value) is type(each) for each in accepted):
                return False
            raise PydanticCustomError("refused_field", "{name} is not supported: {why}", {"name": name, "why": why})
        close = difflib.get_close_matches(str(name), [*known, *cls.refused, *cls.ignored], n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        shown = str(name)[:64].encode("utf-8", "replace").decode()
        raise PydanticCustomError("unknown_field", "unknown field {name}{hint}", {"name": shown, "hint": hint})

    @classmethod
    def _required(cls) -> set[str]:
        return {field.alias or name for name, field in cls.model_fields.items() if field.is_required()}


def _log_ignored(name: str, why: str) -> None:
    if name not in _logged:
        _logged.add(name)
        log.warning("request field %r is ignored, because %s (logged once)", name, why)


class StructuredOutputs(Body):
    """Exactly one of these is given."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    refused: ClassVar = {
        "json_object": RefusedField('send {"json": {}}', (False,)),
        "structural_tag": RefusedField("send a grammar, or tools with tool_choice"),
    }

    def structured(self) -> StructuredOutputsParams:
        """Return the engine's parameter."""
        try:
            choice = None if self.choice is None else tuple(self.choice)
            return StructuredOutputsParams(json=self.json_, regex=self.regex, choice=choice, grammar=self.grammar)
        except UserError as error:
            raise RequestError(str(error), param="structured_outputs") from None


class JsonSchema(Body):
    """A JSON schema of `response_format`, which is always enforced."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: Flag | None = None


class ResponseFormat(Body):
    """The format of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    refused: ClassVar = {"grammar": RefusedField("send structured_outputs with a grammar")}

    def structured(self) -> StructuredOutputsParams | None:
        """Return the engine's parameter; None for plain text."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return StructuredOutputsParams(json="object")
        return StructuredOutputsParams(json=self.need("json_schema", "response_format").schema_ or "object")


class StreamOptions(Body):
    """Options of a streamed answer."""

    include_usage: Flag = False
    refused: ClassVar = {
        "continuous_usage_stats": RefusedField("usage comes once, at the end: include_usage", (False,)),
    }
    ignored: ClassVar = {"include_obfuscation": "events are not padded"}


# Fields that clients send to every server, and on which no answer depends.
LABELS = {
    "user": "it names the caller",
    "safety_identifier": "it names the caller",
    "metadata": "answers are not stored",
    "store": "answers are not stored",
    "request_id": "the server makes an id for each answer",
    "service_tier": "there is one tier",
    "prompt_cache_key": "every prefix is cached, under its own tokens",
    "prompt_cache_retention": "prefixes stay cached while there is room",
    "prompt_cache_options": "every prefix is cached, under its own tokens",
}
_STRUCTURED = "send structured_outputs {json, regex, choice or grammar}"
NO_MEDIA = RefusedField("text and images are the only inputs")
ImageDetail = Literal["auto", "low", "high", "original"]


class GenerationRequest(Body):
    """The fields that the chat and completions routes share."""

    model: str | None = None
    n: Int = 1
    best_of: Int | None = None  # all samples are returned, so it can only be n
    temperature: Num | None = None
    top_p: Num | None = None
    top_k: Int | None = None
    min_p: Num | None = None
    presence_penalty: Num | None = None
    frequency_penalty: Num | None = None
    repetition_penalty: Num | None = None
    logit_bias: dict[str, Num] | None = None
    seed: Int | None = None
    stop: Stops | None = None
    stop_token_ids: Tokens | None = None
    include_stop_str_in_output: Flag | None = None
    ignore_eos: Flag | None = None
    min_tokens: Int | None = None
    allowed_token_ids: Tokens | None = None
    bad_words: Words | None = None
    prompt_logprobs: Int | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: Int = 0  # the lowest goes first; requires a server with the priority scheduling policy
    cache_salt: str | None = None
    speculation: Flag | None = None  # false: no draft tokens for this request; the answer is the same
    skip_special_tokens: Flag = True
    return_token_ids: Flag = False
    stream: Flag = False
    stream_options: StreamOptions | None = None

    refused: ClassVar = {
        "use_beam_search": RefusedField("there is no beam search; use n samples", (False,)),
        "length_penalty": RefusedField("it belongs to beam search", (1.0, 1)),
        "truncate_prompt_tokens": RefusedField("shorten the prompt before it is sent"),
        "logits_processors": RefusedField("requests cannot bring code"),
        "spaces_between_special_tokens": RefusedField("text is as the tokenizer decodes it", (True,)),
        "kv_transfer_params": RefusedField("there is one engine"),
        "lora_request": RefusedField("the model field names the adapter"),
        "thinking_token_budget": RefusedField("reasoning is not counted separately; use max_tokens"),
        "return_tokens_as_token_ids": RefusedField("send return_token_ids", (False,)),
        **{f"guided_{name}": RefusedField(_STRUCTURED) for name in ("json", "regex", "choice", "grammar")},
    }

    ignored: ClassVar = LABELS

    def sampling(self, defaults: Mapping[str, Any], max_tokens: int | None, **more: Any) -> SamplingParams:
        """Return the engine's parameters.

        Args:
            defaults: The model's own, for fields that the request leaves out.
            max_tokens: The limit of the answer; None for no limit.
            more: Further parameters; None for those that are not given.
        """
        if self.best_of is not None and self.best_of != self.n:
            message = f"`best_of` must be n={self.n}, got {self.best_of}: all n samples are returned"
            raise RequestError(message, param="best_of")
        values: dict[str, Any] = {"max_tokens": None, **defaults}
        if max_tokens is not None:
            values["max_tokens"] = max_tokens
        values |= {name: getattr(self, name) for name in _SAME_NAMES if getattr(self, name) is not None}
        if self.logit_bias:
            values["logit_bias"] = _by_id(self.logit_bias)
        if self.structured_outputs is not None:
            if more.get("structured_outputs") is not None:
                message = "`structured_outputs` cannot be combined with `response_format`: send one of them"
                raise RequestError(message, param="structured_outputs")
            values["structured_outputs"] = self.structured_outputs.structured()
        return SamplingParams(**values | {name: value for name, value in more.items() if value is not None})

    def check_stream(self) -> None:
        """Refuse options of a stream without a stream."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("`stream_options` requires stream: true", param="stream_options")

    @property
    def with_usage(self) -> bool:
        """Return whether a stream ends with its token usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def prompt_options(self) -> dict[str, Any]:
        """The fields of PromptRequest besides its prompt and parameters."""
        return {
            "priority": self.priority, "cache_salt": self.cache_salt, "skip_special": self.skip_special_tokens,
            "limit": next((name for name in LIMITS if getattr(self, name, None) is not None), None),
        }  # fmt: skip


LIMITS = ("max_completion_tokens", "max_tokens")  # the fields that limit an answer's tokens
# Names that mean the same here and in SamplingParams.
_SAME_NAMES = (
    "n temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty seed stop stop_token_ids "
    "include_stop_str_in_output ignore_eos min_tokens allowed_token_ids bad_words prompt_logprobs speculation"
).split()


def _by_id(bias: dict[str, float]) -> dict[int, float]:
    """Return the biases with integers as keys: in JSON they are strings."""
    if not all(key.isascii() and key.isdigit() and len(key) < 10 for key in bias):
        raise RequestError("`logit_bias` must have token ids as its keys", param="logit_bias")
    return {int(key): value for key, value in bias.items()}
