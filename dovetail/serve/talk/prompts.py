"""Prompts: from a conversation to the prompt for the engine, and to the parser that will read its answer.

Chat templates of adapters: requests for an adapter are written with the template that it was trained with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dovetail.core.errors import UserError
from dovetail.engine.request.params import SamplingParams, StructuredOutputsParams
from dovetail.io.chat import ChatTemplate
from dovetail.io.literal_text import LiteralText
from dovetail.io.tokenizer import Tokenizer
from dovetail.io.tokenizer_files import read_templates
from dovetail.io.tool_formats.formats import ReasoningFormat, ToolFormat, format_for, reasoning_for, special_ids
from dovetail.io.tool_formats.grammar import grammar_for
from dovetail.io.tool_formats.stream import StreamParser
from dovetail.io.tool_formats.tools import spell
from dovetail.serve.config import ServerConfig
from dovetail.serve.errors import bad, refused
from dovetail.serve.remote.client import EngineBackend
from dovetail.serve.talk.answer import Ask
from dovetail.serve.talk.request_templates import RequestTemplates

LONGEST = 4 * 2**20  # characters of a text to tokenize, or more where the model reads more
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """What the chat, responses and messages routes have in common. Messages and tools are in OpenAI's chat shape, and
    checked."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    choice: str = "auto"  # none, auto, required, or named
    named: str | None = None  # the function, if choice is "named"
    parallel: bool = True
    template: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    effort: str | None = None  # how long to think
    thinking: bool | None = None  # whether to think
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False  # templates write their own
    adapter: str | None = None  # whose chat template is used, where it has one


class Prompts:
    def __init__(self, tokenizer: Tokenizer, config: ServerConfig, max_len: int, templates: AdapterTemplates):
        self._tokenizer, self._config, self._max_len, self._templates = tokenizer, config, max_len, templates
        self.max_tokens = min(max_len - 1, config.limits.max_prompt_tokens or max_len)  # of a prompt
        self._request_templates = RequestTemplates()
        self._literal = None if config.special_tokens_in_text else LiteralText(tokenizer)
        source = "\n".join(tokenizer.chat_templates.values())
        names = [tokenizer.token(token) for token in tokenizer.special_ids]
        self.tool_format: ToolFormat | None = format_for(source, names, name=config.tool_call_parser)
        self.reasoning_format: ReasoningFormat | None = reasoning_for(source, names, name=config.reasoning_parser)

    def ask(self, talk: Conversation, params: SamplingParams, **more: Any) -> Ask:
        """`more`: further fields of Ask. Templates and tokenizing take a while: call it in a thread."""
        talk = replace(talk, adapter=more.get("adapter"))
        text = self.text(talk)
        prompt = self.encode(text, talk.add_special_tokens, self.max_tokens, rendered=True)
        tool_format = self._tool_format(talk, params)
        # A grammar allows no reasoning before the answer, so the text is the answer from its first character.
        reasoning = None if params.structured_outputs else self.reasoning_format
        inside = _starts_inside(reasoning, text)
        special = special_ids(self._tokenizer, tool_format, reasoning)
        strict = any(tool["function"].get("strict") for tool in talk.tools)
        if tool_format is not None and (talk.choice != "auto" or strict):
            grammar = self._grammar(talk, tool_format, special, reasoning, bool(inside))
            params = replace(params, structured_outputs=StructuredOutputsParams(grammar=grammar))
        only_calls = tool_format is not None and talk.choice != "auto"
        if tool_format is None and reasoning is None:
            return Ask(prompt=prompt, params=params, **more)

        def new_parser() -> StreamParser:
            return StreamParser(
                tool_format, reasoning, tools=talk.tools, in_reasoning=inside, only_calls=only_calls
            )  # fmt: skip

        return Ask(
            prompt=prompt, params=params, keep=frozenset(special.values()), new_parser=new_parser,
            one_call=tool_format is not None and not talk.parallel, **more,
        )  # fmt: skip

    def text(self, talk: Conversation) -> str:
        """The prompt's text, for `encode` with `rendered`."""
        kwargs, messages = self._template_kwargs(talk), self._messages(talk)
        tools = list(talk.tools) if talk.tools and talk.choice != "none" else None
        if self._literal is not None:
            kwargs, messages, tools = (self._mark(each, "messages") for each in (kwargs, messages, tools))
        if "tool" not in self._source(talk) and (tools or any("tool_calls" in message for message in messages)):
            if self.tool_format is None or self.tool_format.name != "hermes":
                raise bad("tools is not supported: the model's chat template does not read them", "tools")
            messages, tools = spell(messages, tools or ()), None
        own, source = self.is_own(talk.template), self._source(talk)
        names = self._tokenizer.special_tokens
        kwargs |= dict(
            add_generation_prompt=talk.add_generation_prompt, continue_final_message=talk.continue_final_message
        )
        try:
            if own:
                return ChatTemplate(source, names).render(messages, tools, **kwargs)
            return self._request_templates.render(source, names, messages, tools, **kwargs)
        except UserError as error:
            raise bad(str(error), "messages" if own else "chat_template") from None

    def is_own(self, template: str | None) -> bool:
        """Whether a request's template is one of the model's, by its name, or none is given."""
        return template is None or template in self._tokenizer.chat_templates

    def close(self) -> None:
        self._request_templates.close()

    def encode(self, text: str, add_special: bool = True, most: int | None = None, rendered: bool = False) -> list[int]:
        """Tokenize a request's text, or one that `text` has `rendered` with a chat template.

        A text that certainly has more than `most` tokens is refused before it is tokenized. Without `most`, only the
        text's length is bounded: tokenizing takes one or two seconds and up to 150 MB of memory per megabyte."""
        longest = max(LONGEST, 8 * self._max_len)
        if most is None and len(text) > longest:
            raise bad(f"the text has {len(text)} characters, and this server takes at most {longest}: send it in parts")
        try:
            if most is not None and self._tokenizer.exceeds(text, most):
                message = f"the prompt has more than {most} tokens, and this server takes at most {most}"
                raise bad(message, code="context_length_exceeded")
            if self._literal is None:
                return self._tokenizer.encode(text, add_special)
            return self._literal.encode(text if rendered else self._literal.mark(text), add_special)
        except UserError as error:
            raise bad(str(error)) from None

    def _mark(self, value: Any, param: str) -> Any:
        assert self._literal is not None
        try:
            return self._literal.mark(value)
        except UserError as error:
            raise bad(str(error), param) from None

    def _source(self, talk: Conversation) -> str:
        tools = list(talk.tools) or None
        try:
            return self._templates.tokenizer(talk.adapter).chat_source(tools, talk.template)
        except UserError as error:
            raise bad(str(error), "messages") from None

    def _messages(self, talk: Conversation) -> list[dict[str, Any]]:
        """`developer` is OpenAI's newer name for the system's role, which most templates do not know."""
        if "developer" in self._source(talk):
            return [dict(message) for message in talk.messages]
        return [{**m, "role": "system"} if m["role"] == "developer" else dict(m) for m in talk.messages]

    def _template_kwargs(self, talk: Conversation) -> dict[str, Any]:
        if talk.template is not None and not self._config.trust_request_chat_template:
            why = "a template of a request's own is run only by a server with --trust-request-chat-template"
            raise bad(f"chat_template is not supported: {why}", "chat_template")
        source = self._source(talk)
        for name in talk.template_kwargs:
            if name not in source:
                raise bad(f"chat_template_kwargs.{name}: the model's template does not read it", "chat_template_kwargs")
            if name in ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"):
                raise bad(f"chat_template_kwargs.{name}: it is a field of its own", "chat_template_kwargs")
        return {**talk.template_kwargs, **self._thinking(talk, source), **self._effort(talk, source)}

    def _thinking(self, talk: Conversation, source: str) -> dict[str, Any]:
        """Whether to think: the template's switch, or what the model does without one."""
        if talk.thinking is None or (self.reasoning_format is None and not talk.thinking):
            return {}
        if "enable_thinking" in source:
            return {"enable_thinking": talk.thinking}
        if self.reasoning_format is not None and talk.thinking:
            return {}
        raise bad(f"thinking: this model's template cannot turn it {'on' if talk.thinking else 'off'}", "thinking")

    def _effort(self, talk: Conversation, source: str) -> dict[str, Any]:
        """How long to think, by the template's own variable; refused where it has none."""
        if talk.effort is None or (talk.effort == "none" and self.reasoning_format is None):
            return {}
        if "reasoning_effort" in source:
            return {"reasoning_effort": talk.effort}
        if "enable_thinking" in source and talk.effort == "none":
            return {"enable_thinking": False}
        raise bad(f"reasoning_effort: this model's template has no way to say {talk.effort!r}", "reasoning_effort")

    def _tool_format(self, talk: Conversation, params: SamplingParams) -> ToolFormat | None:
        """The format in which tool calls may come; None where none may."""
        if not talk.tools or talk.choice == "none":
            if talk.choice in ("required", "named"):
                raise bad(f"tool_choice: {talk.choice!r} needs tools to choose from; send tools", "tool_choice")
            return None
        if self.tool_format is None:
            raise bad("tools is not supported: this server was started with --tool-call-parser none", "tools")
        if params.structured_outputs is not None:
            raise bad("a given output format leaves no room for tool calls: send tools or the format", "tools")
        return self.tool_format

    def _grammar(self, talk: Conversation, tool_format, special, reasoning, inside: bool) -> str:
        choice = {"name": talk.named} if talk.choice == "named" else talk.choice
        try:
            return grammar_for(
                tool_format, talk.tools, choice, talk.parallel,
                special=special, reasoning=reasoning, in_reasoning=inside,
            )  # fmt: skip
        except UserError as error:
            raise refused(error) from None


def _starts_inside(reasoning: ReasoningFormat | None, prompt: str) -> bool | None:
    """Whether the prompt has opened the reasoning; None where it shows neither the opening nor the end."""
    if reasoning is None:
        return False
    if reasoning.opened_by(prompt):
        return True
    return False if prompt.rstrip().endswith(reasoning.close) else None


class AdapterTemplates:
    def __init__(self, tokenizer: Tokenizer, backend: EngineBackend):
        self._tokenizer, self._backend = tokenizer, backend
        self._found: dict[tuple[str, int], Tokenizer] = {}

    def tokenizer(self, adapter: str | None) -> Tokenizer:
        """Return the model's tokenizer with the adapter's chat templates, where the adapter has any."""
        loaded = self._backend.info.adapters.get(adapter) if adapter else None
        if loaded is None:
            return self._tokenizer
        key = loaded.path, loaded.version
        if key not in self._found:
            templates = read_templates(Path(loaded.path))
            self._found[key] = self._tokenizer.with_templates(templates) if templates else self._tokenizer
        return self._found[key]
