"""Prompts: from a conversation to the engine's prompt and to the parser that reads its answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dovetail.core.errors import RequestError, UserError
from dovetail.engine.request.params import SamplingParams, StructuredOutputsParams
from dovetail.io.chat import ChatTemplate
from dovetail.io.images.item import ImagePrompt, ProcessedImage
from dovetail.io.images.prompt import expand, locate
from dovetail.io.tokenizer import LiteralText, Tokenizer
from dovetail.io.tokenizer_files import read_templates
from dovetail.io.tool_formats.formats import ReasoningFormat, ToolFormat, format_for, reasoning_for, special_ids
from dovetail.io.tool_formats.grammar import grammar_for
from dovetail.io.tool_formats.stream import StreamParser
from dovetail.io.tool_formats.tools import spell
from dovetail.serve.config import ServerConfig
from dovetail.serve.media.loader import ImagePlaceholder
from dovetail.serve.media.source import ImageReference
from dovetail.serve.remote.client import EngineClient
from dovetail.serve.talk.answer import PromptRequest
from dovetail.serve.talk.request_templates import RequestTemplates

MAX_TEXT = 4 * 2**20  # characters of a text to tokenize, or more if the model's context is longer
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_OWN_FIELDS = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template")


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Hold what the chat, responses and messages routes share; messages and tools are in OpenAI's format."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    choice: str = "auto"  # none, auto, required, or named
    named: str | None = None  # the function, if choice is "named"
    parallel: bool = True
    template: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    effort: str | None = None  # reasoning effort
    thinking: bool | None = None  # whether to reason; None: the model's default
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False  # templates write their own
    adapter: str | None = None  # its chat template is used, if it has one

    @property
    def images(self) -> list[ImageReference]:
        """Return the images of all messages, in order."""
        parts = [part for each in self.messages if isinstance(each["content"], list) for part in each["content"]]
        return [part["image"] for part in parts if part["type"] == "image"]


def message_content(parts: Sequence[str | ImageReference]) -> str | list[dict[str, Any]]:
    """Return the content of a message for a Conversation: a list of parts if it has images, else one text.

    The texts are lines of one text, because few templates of text models take parts.
    """
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) == len(parts):
        return "\n".join(texts)
    return [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": p} for p in parts]


class Prompts:
    """Render conversations and tokenize texts for the engine."""

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        config: ServerConfig,
        image: ImagePlaceholder | None = None,
    ):
        self._engine, self._tokenizer, self._config, self._image = engine, tokenizer, config, image
        self._max_len = engine.info.max_model_len
        self.max_tokens = min(self._max_len - 1, config.limits.max_prompt_tokens or self._max_len)  # of a prompt
        self._request_templates = RequestTemplates()
        self._adapter_tokenizers: dict[tuple[str, int], Tokenizer] = {}  # by an adapter's path and version
        self._literal = None if config.special_tokens_in_text else LiteralText(tokenizer)
        source = "\n".join(tokenizer.chat_templates.values())
        names = [tokenizer.token(token) for token in tokenizer.special_ids]
        self.tool_format: ToolFormat | None = format_for(source, names, name=config.tool_call_parser)
        self.reasoning_format: ReasoningFormat | None = reasoning_for(source, names, name=config.reasoning_parser)

    def request(
        self, talk: Conversation, params: SamplingParams, images: Sequence[ProcessedImage], **more: Any
    ) -> PromptRequest:
        """Return the request for a conversation. Call it in a thread: templates and tokenizing take time.

        Args:
            talk: The conversation.
            params: Its sampling parameters; a grammar is added if a tool call is required.
            images: Its images, in order.
            more: Further fields of PromptRequest.
        """
        talk = replace(talk, adapter=more.get("adapter"))
        text = self.text(talk)
        made = self._encode_rendered(talk, text, images, self.max_tokens)
        prompt: dict[str, Any] = {"prompt": list(made.tokens), "images": made.spans}
        tool_format = self._tool_format(talk, params)
        # A grammar allows no reasoning before the answer, so the text is the answer from its first character.
        reasoning = None if params.structured_outputs else self.reasoning_format
        inside = _starts_inside(reasoning, text)
        special = special_ids(self._tokenizer, tool_format, reasoning)
        strict = any(tool["function"].get("strict") for tool in talk.tools)
        if tool_format is not None and (talk.choice != "auto" or strict):
            grammar = grammar_for(
                tool_format, talk.tools, {"name": talk.named} if talk.choice == "named" else talk.choice, talk.parallel,
                special=special, reasoning=reasoning, in_reasoning=bool(inside),
            )  # fmt: skip
            params = replace(params, structured_outputs=StructuredOutputsParams(grammar=grammar))
        only_calls = tool_format is not None and talk.choice != "auto"
        if tool_format is None and reasoning is None:
            return PromptRequest(**prompt, params=params, **more)

        def new_parser() -> StreamParser:
            return StreamParser(tool_format, reasoning, tools=talk.tools, in_reasoning=inside, only_calls=only_calls)

        return PromptRequest(
            **prompt, params=params, keep=frozenset(special.values()), new_parser=new_parser,
            one_call=tool_format is not None and not talk.parallel, **more,
        )  # fmt: skip

    def tokens(self, talk: Conversation, images: Sequence[ProcessedImage]) -> ImagePrompt:
        """Return the tokens of a conversation. Call it in a thread."""
        return self._encode_rendered(talk, self.text(talk), images)

    def _encode_rendered(
        self, talk: Conversation, text: str, images: Sequence[ProcessedImage], most: int | None = None
    ) -> ImagePrompt:
        image = self._image
        if image is not None:
            text = expand(text, images, image.placeholder, param="messages").text
        tokens = self.encode(text, talk.add_special_tokens, most, rendered=True)
        if image is None:
            return ImagePrompt(tuple(tokens))
        return locate(tokens, images, image.image_id, param="messages")

    def text(self, talk: Conversation) -> str:
        """Return the prompt's text, with a placeholder for each image."""
        kwargs, messages = self._template_kwargs(talk), self._messages(talk)
        tools = list(talk.tools) if talk.tools and talk.choice != "none" else None
        if self._literal is not None:
            kwargs, messages, tools = (self._mark(each) for each in (kwargs, messages, tools))
        source, names = self._source(talk), self._tokenizer.special_tokens
        if "tool" not in source and (tools or any("tool_calls" in message for message in messages)):
            if self.tool_format is None or self.tool_format.name != "hermes":
                raise RequestError("`tools` is not supported by the model's chat template", param="tools")
            messages, tools = spell(messages, tools or ()), None
        kwargs |= dict(
            add_generation_prompt=talk.add_generation_prompt, continue_final_message=talk.continue_final_message
        )
        if not self.is_own(talk.template):
            return self._request_templates.render(source, names, messages, tools, **kwargs)
        with _param("messages"):
            return ChatTemplate(source, names).render(messages, tools, **kwargs)

    def is_own(self, template: str | None) -> bool:
        """Return whether a request uses one of the model's templates, by its name or by default."""
        return template is None or template in self._tokenizer.chat_templates

    def close(self) -> None:
        """End the process that renders the templates of requests."""
        self._request_templates.close()

    def encode(self, text: str, add_special: bool = True, most: int | None = None, rendered: bool = False) -> list[int]:
        """Tokenize a text of a request.

        Args:
            text: The text.
            add_special: Whether to add the tokenizer's special tokens.
            most: A text that certainly has more tokens is refused before it is tokenized. Without it, only the text's
                length is bounded: tokenizing takes one or two seconds and up to 150 MB of memory per megabyte.
            rendered: Whether `text` has rendered it with a chat template.
        """
        longest = max(MAX_TEXT, 8 * self._max_len)
        if most is None and len(text) > longest:
            raise RequestError(f"the text must have at most {longest} characters, got {len(text)}: send it in parts")
        if most is not None and self._tokenizer.exceeds(text, most):
            message = f"the prompt must have at most {most} tokens on this server, got more"
            raise RequestError(message, code="context_length_exceeded")
        if self._literal is None:
            return self._tokenizer.encode(text, add_special)
        return self._literal.encode(text if rendered else self._literal.mark(text), add_special)

    def _mark(self, value: Any) -> Any:
        assert self._literal is not None
        with _param("messages"):
            return self._literal.mark(value)

    def _source(self, talk: Conversation) -> str:
        with _param("messages"):
            return self._tokenizer_of(talk.adapter).chat_source(list(talk.tools) or None, talk.template)

    def _tokenizer_of(self, adapter: str | None) -> Tokenizer:
        """Return the model's tokenizer with the adapter's chat templates, if it has any: it was trained with them."""
        loaded = self._engine.info.adapters.get(adapter) if adapter else None
        if loaded is None:
            return self._tokenizer
        key = loaded.path, loaded.version
        if key not in self._adapter_tokenizers:
            templates = read_templates(Path(loaded.path))
            found = self._tokenizer.with_templates(templates) if templates else self._tokenizer
            self._adapter_tokenizers[key] = found
        return self._adapter_tokenizers[key]

    def _messages(self, talk: Conversation) -> list[dict[str, Any]]:
        """Return the messages, with OpenAI's role `developer` as `system` for templates that do not know it."""
        roles = {} if "developer" in self._source(talk) else {"developer": "system"}
        return [{**_without_files(m), "role": roles.get(m["role"], m["role"])} for m in talk.messages]

    def _template_kwargs(self, talk: Conversation) -> dict[str, Any]:
        if talk.template is not None and not self._config.trust_request_chat_template:
            message = "`chat_template` is not supported: the server was started without --trust-request-chat-template"
            raise RequestError(message, param="chat_template")
        source = self._source(talk)
        for name in talk.template_kwargs:
            where = f"chat_template_kwargs.{name}"
            if name not in source:
                raise RequestError(f"{where} is not read by the model's template", param="chat_template_kwargs")
            if name in _OWN_FIELDS:
                raise RequestError(f"{where} is a field of the request: send it there", param="chat_template_kwargs")
        return {**talk.template_kwargs, **self._thinking(talk, source), **self._effort(talk, source)}

    def _thinking(self, talk: Conversation, source: str) -> dict[str, Any]:
        """Return the template's variable that turns reasoning on or off, if it is needed."""
        if talk.thinking is None or (self.reasoning_format is None and not talk.thinking):
            return {}
        if "enable_thinking" in source:
            return {"enable_thinking": talk.thinking}
        if self.reasoning_format is not None and talk.thinking:
            return {}
        state = "on" if talk.thinking else "off"
        raise RequestError(f"`thinking` cannot be turned {state} by the model's template", param="thinking")

    def _effort(self, talk: Conversation, source: str) -> dict[str, Any]:
        """Return the template's variable for the reasoning effort; refuse an effort that it does not support."""
        if talk.effort is None or (talk.effort == "none" and self.reasoning_format is None):
            return {}
        if "reasoning_effort" in source:
            return {"reasoning_effort": talk.effort}
        if "enable_thinking" in source and talk.effort == "none":
            return {"enable_thinking": False}
        message = f"`reasoning_effort` {talk.effort!r} is not supported by the model's template"
        raise RequestError(message, param="reasoning_effort")

    def _tool_format(self, talk: Conversation, params: SamplingParams) -> ToolFormat | None:
        """Return the format of the tool calls that the answer may hold; None if it may hold none."""
        if not talk.tools or talk.choice == "none":
            if talk.choice in ("required", "named"):
                raise RequestError(f"`tool_choice` {talk.choice!r} requires `tools`", param="tool_choice")
            return None
        if self.tool_format is None:
            raise RequestError("`tools` is not supported: the server has no tool call parser", param="tools")
        if params.structured_outputs is not None:
            raise RequestError("`tools` cannot be combined with an output format: send one of them", param="tools")
        return self.tool_format


def _without_files(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message for a template, which sees only where an image is."""
    content = message["content"]
    if isinstance(content, list):
        content = [part if part["type"] == "text" else {"type": "image"} for part in content]
    return {**message, "content": content}


@contextmanager
def _param(name: str) -> Iterator[None]:
    """Name the request field at fault in errors of the tokenizer and its templates."""
    try:
        yield
    except UserError as error:
        raise RequestError(str(error), param=name, code=error.code) from None


def _starts_inside(reasoning: ReasoningFormat | None, prompt: str) -> bool | None:
    """Return whether the prompt has opened the reasoning; None if it shows neither its beginning nor its end."""
    if reasoning is None:
        return False
    if reasoning.opened_by(prompt):
        return True
    return False if prompt.rstrip().endswith(reasoning.close) else None
