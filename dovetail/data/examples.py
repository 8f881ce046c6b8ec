"""Convert a record of any known form to an `Example`: a conversation or two texts, a pair of them, or one with a label.

    {"messages": [...], "tools": [...]}                     a chat (also ShareGPT's `conversations` of from and value)
    {"prompt": ..., "completion": ...}                      each text, or messages
    {"instruction": ..., "input": ..., "output": ...}       Alpaca: a chat of one turn
    {"prompt": ..., "chosen": ..., "rejected": ...}         a preference; without a prompt, two chats that begin alike
    {"prompt": ..., "completion": ..., "label": true}       a completion to learn from, or to avoid
    {"prompt": ...}                                         a prompt alone
    {"text": ...}                                           plain text, all of it trained
    {"messages": [...], "images": [...]}                    with images; also `image`, and prompt and completion

Texts are used as they are; messages are rendered with the model's chat template.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dovetail.core.choice import one_of
from dovetail.core.errors import UserError
from dovetail.data.messages import Messages, check_roles, check_turns, conversation, is_messages, say, tools_of
from dovetail.data.pictures import count_images
from dovetail.data.records import Record
from dovetail.data.settings import Keys
from dovetail.io.images.prompt import place_images

KINDS = ("sft", "preference", "unpaired", "prompts")


@dataclass(frozen=True)
class ChatExample:
    """Hold a conversation; the assistant's turns from message `first` on are trained."""

    messages: Messages
    tools: list[dict[str, Any]] | None = None
    first: int = 0
    images: tuple[Any, ...] = ()  # of its image parts, in order: as in a record, or data.pictures.Picture


@dataclass(frozen=True)
class TextExample:
    """Plain text without a template: the completion is trained."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Example:
    """Hold one record's example."""

    sides: tuple[ChatExample | TextExample, ...]  # one; of a preference two: chosen, rejected
    label: bool | None = None
    margin: float = math.nan  # of a preference: by how much the chosen side should lead, if its record says so


def kind_of(record: Record, keys: Keys) -> str:
    """Return the kind of example that a record holds, by its keys."""
    fields = _Fields(record, keys)
    if fields.has("chosen", "rejected"):
        return "preference"
    if fields.has("prompt", "completion", "label"):
        return "unpaired"
    alone = fields.has("prompt") and not fields.has("messages") and not fields.has("completion")
    return "prompts" if alone else "sft"


def example(record: Record, kind: str, form: str = "auto", keys: Keys = Keys()) -> Example | None:
    """Return the record as an example of `kind`; None where it has no turn of the assistant to train on.

    Args:
        record: The record.
        kind: One of `KINDS`.
        form: As `TuningData.format`.
        keys: The keys of the record's fields.

    Raises:
        UserError: The record does not fit; the message names the record, its keys and what would fit.
    """
    one_of("kind", kind, KINDS)
    if record.error:
        raise UserError(record.error)
    forms = _FORMS[kind]
    if form != "auto":
        one_of("data.format", form, forms)
        forms = {form: forms[form]}
    fields = _Fields(record, keys)
    for needed, read in forms.values():
        if fields.has(*needed):
            return _checked(read, fields, kind)
    there = ", ".join(map(repr, record.fields)) or "none"
    raise UserError(
        f"{record.where()}: expected a record with {_FITS[kind]}; its keys are {there}: name the key of each field, "
        f"such as {_hint(record, [needed for needed, _ in forms.values()])}"
    )


def _checked(read: Callable[[_Fields], Example | None], fields: _Fields, kind: str) -> Example | None:
    """Return what a form's reader makes of a record; a UserError names the record."""
    try:
        found = _with_images(read(fields), fields)
        for side in found.sides if found else ():
            if isinstance(side, ChatExample):
                check_turns(side.messages)
            elif kind != "prompts" and not side.completion.strip():
                raise UserError("the completion is empty; fill it, or remove the record")
        return found
    except UserError as error:
        where = fields.where()
        raise UserError(str(error) if str(error).startswith(where) else f"{where}: {error}") from None


def _with_images(found: Example | None, fields: _Fields) -> Example | None:
    """Return the example with its images in the place of image parts; where it has none, before the user's first text.

    A prompt and a completion that are texts become a conversation. Both sides of a preference have all images.
    """
    given = fields.get("images")
    images = list(given) if isinstance(given, list | tuple) else [] if given is None else [given]
    chats = [side for side in found.sides if isinstance(side, ChatExample)] if found else []
    if found is None or not (images or any(count_images(chat.messages) for chat in chats)):
        return found
    return replace(found, sides=tuple(_with_placed_images(side, images) for side in found.sides))


def _with_placed_images(side: ChatExample | TextExample, images: Sequence[Any]) -> ChatExample:
    if isinstance(side, TextExample):
        if not side.prompt:
            raise UserError("a record of plain text cannot have images; give messages, or prompt and completion")
        answer = [say("assistant", side.completion)] if side.completion else []
        side = ChatExample([say("user", side.prompt), *answer], first=1)
    return placed_images(side, images)


def placed_images(side: ChatExample, images: Sequence[Any] = ()) -> ChatExample:
    """Return a conversation with bare image parts, and its images: those of its parts, and `images` for the others."""
    messages, sources = place_images(side.messages, images)
    return replace(side, messages=[dict(message) for message in messages], images=tuple(sources))


def _hint(record: Record, forms: Sequence[tuple[str, ...]]) -> str:
    """Return settings that would make the record one of these forms, by the usual names of its keys."""

    def named(name: str) -> str | None:
        known = (name, *_USUAL.get(name, ()), *_CALLED.get(name, ()))
        return next((key for key in record.fields if key.lower() in known), None)

    found = next((form for form in forms if all(map(named, form))), None)
    if found is None:
        return f"data.keys.{forms[0][0]}={next(iter(record.fields), 'dialogue')}"
    return " ".join(f"data.keys.{name}={key}" for name in found if (key := named(name)) not in (name, None))


# Other names in datasets: only suggested, because they may mean something else.
_CALLED = {
    "messages": ("dialogue", "dialog", "conversation", "chat", "turns", "message"),
    "prompt": ("question", "query", "q", "input", "problem", "request", "source"),
    "completion": ("answer", "response", "a", "output", "solution", "reply", "target"),
    "text": ("content", "document", "body"),
    "chosen": ("accepted", "preferred", "better"),
    "rejected": ("dispreferred", "worse"),
    "label": ("good", "desirable"),
}

_FITS = {
    "sft": "messages, conversations (ShareGPT), prompt and completion, instruction and output (Alpaca), or text",
    "preference": "chosen and rejected, and the prompt or two conversations that begin alike",
    "unpaired": "prompt, completion and label (true or false)",
    "prompts": "prompt or messages",
}


class _Fields:
    """Read a record's values by the names of `Keys`."""

    def __init__(self, record: Record, keys: Keys):
        self.where, self.keys, self._fields = record.where, keys, record.fields

    def has(self, *names: str) -> bool:
        """Return whether the record has all of these fields."""
        return all(self.get(name) is not None for name in names)

    def get(self, name: str) -> Any:
        """Return a field, under the key that was given or a usual one; None where it is absent."""
        given = getattr(self.keys, name)
        found = (self._fields.get(key) for key in ((given,) if given else _USUAL.get(name, (name,))))
        return next((value for value in found if value is not None), None)

    @property
    def is_alpaca(self) -> bool:
        """Return whether the prompt is Alpaca's instruction."""
        return "instruction" in self._fields and not self.keys.prompt and "prompt" not in self._fields

    @property
    def alpaca_prompt(self) -> str:
        """Return instruction and input as one message."""
        return "\n\n".join(text for name in ("prompt", "input") if (text := self.get(name)))

    def part(self, name: str) -> str | Messages:
        """Return a field that is text or messages."""
        value = self.get(name)
        if isinstance(value, str):
            return value
        if is_messages(value):
            return conversation(value, self.keys, f"{self.where()}: {name}")
        raise UserError(
            f"{self.where()}: expected {name} to be text or a list of messages, got {type(value).__name__}; "
            f"name another key, as keys: {{{name}: ...}}"
        )

    def tools(self) -> list[dict[str, Any]] | None:
        """Return the tools of the conversation."""
        return tools_of(self.get("tools"), self.where)

    def with_system(self, messages: Messages) -> Messages:
        """Return the messages with the record's system prompt first, unless they have one."""
        system = self.get("system")
        return [say("system", system), *messages] if system and messages[0]["role"] != "system" else messages


_USUAL = {
    "messages": ("messages", "conversations"),
    "prompt": ("prompt", "instruction"),
    "completion": ("completion", "output"),
    "images": ("images", "image"),
}

# --- one function per form --------------------------------------------------------------------------------------------


def _chat(fields: _Fields) -> Example | None:
    messages = conversation(fields.get("messages"), fields.keys, f"{fields.where()}: messages")
    return _trained(ChatExample(fields.with_system(messages), fields.tools()))


def _prompt_and_completion(fields: _Fields) -> Example | None:
    completion = fields.part("completion")
    if fields.is_alpaca and isinstance(completion, str):
        messages = fields.with_system([say("user", fields.alpaca_prompt), say("assistant", completion)])
        return Example((ChatExample(messages, fields.tools()),))
    return _trained(_after(fields, fields.part("prompt"), completion))


def _text(fields: _Fields) -> Example:
    text = fields.get("text")
    if not isinstance(text, str):
        raise UserError(f"{fields.where()}: expected text to be a string, got {type(text).__name__}")
    return Example((TextExample("", text),))


def _preference(fields: _Fields) -> Example | None:
    margin = fields.get("margin")
    if margin is not None and (isinstance(margin, bool) or not isinstance(margin, int | float)):
        raise UserError(f"{fields.where()}: expected margin to be a number, got {margin!r}; write it as one")
    found = _pair(fields)
    return found if found is None or margin is None else replace(found, margin=float(margin))


def _pair(fields: _Fields) -> Example | None:
    chosen, rejected = fields.part("chosen"), fields.part("rejected")
    prompt = fields.part("prompt") if fields.has("prompt") else None
    whole = isinstance(chosen, list) and isinstance(rejected, list) and chosen[0]["role"] != "assistant"
    if whole and not isinstance(prompt, list):  # a text repeats what both conversations begin with
        return _trained(*_sharing_a_beginning(fields, chosen, rejected))  # type: ignore[arg-type]
    if prompt is None:
        raise UserError(
            f"{fields.where()}: expected a prompt beside chosen and rejected, or both as whole conversations that "
            f"begin alike; got {type(chosen).__name__} and {type(rejected).__name__} without one"
        )
    return _trained(_after(fields, prompt, chosen), _after(fields, prompt, rejected))


def _unpaired(fields: _Fields) -> Example | None:
    label = fields.get("label")
    if label not in (True, False):
        raise UserError(f"{fields.where()}: expected label to be true or false, got {label!r}; write it as one of them")
    found = _prompt_and_completion(fields)
    return Example(found.sides, bool(label)) if found else None


def _prompt_alone(fields: _Fields) -> Example:
    """Return a prompt to answer: its completion is empty."""
    prompt = fields.part("messages" if fields.has("messages") else "prompt")
    if isinstance(prompt, str) and fields.is_alpaca:
        prompt = [say("user", fields.alpaca_prompt)]
    if isinstance(prompt, str):
        return Example((TextExample(prompt, ""),))
    while prompt and prompt[-1]["role"] == "assistant":
        prompt = prompt[:-1]
    if not prompt:
        raise UserError(f"{fields.where()}: expected a prompt, got only the assistant's turns; add the user's turn")
    messages = fields.with_system(prompt)
    return Example((ChatExample(messages, fields.tools(), len(messages)),))


def _after(fields: _Fields, prompt: str | Messages, completion: str | Messages) -> ChatExample | TextExample:
    """Return two texts as they are; if one of them is messages, a conversation."""
    if isinstance(prompt, str) and isinstance(completion, str):
        return TextExample(prompt, completion)
    before = [say("user", prompt)] if isinstance(prompt, str) else prompt
    before = fields.with_system(before)
    after = [say("assistant", completion)] if isinstance(completion, str) else completion
    return ChatExample([*before, *after], fields.tools(), len(before))


def _sharing_a_beginning(fields: _Fields, chosen: Messages, rejected: Messages) -> tuple[ChatExample, ChatExample]:
    most = min(len(chosen), len(rejected)) - 1
    shared = next((i for i in range(most) if chosen[i] != rejected[i]), most)
    if shared < 1:
        raise UserError(
            f"{fields.where()}: expected chosen and rejected to begin with the same messages, and their first ones "
            "differ; give what they share as prompt"
        )
    begin = len(fields.with_system(chosen)) - len(chosen) + shared
    one, other = (ChatExample(fields.with_system(side), fields.tools(), begin) for side in (chosen, rejected))
    return one, other


def _trained(*sides: ChatExample | TextExample) -> Example | None:
    for side in sides:
        if isinstance(side, ChatExample) and not _answers(side):
            check_roles(side.messages)  # a misspelt `assistant` must be an error
    return Example(sides) if all(_answers(side) for side in sides) else None


def _answers(side: ChatExample | TextExample) -> bool:
    return isinstance(side, TextExample) or any(m["role"] == "assistant" for m in side.messages[side.first :])


Form = tuple[tuple[str, ...], Callable[[_Fields], Example | None]]  # what a record must have, and its reader
_FORMS: dict[str, dict[str, Form]] = {
    "sft": {
        "chat": (("messages",), _chat),
        "prompt": (("prompt", "completion"), _prompt_and_completion),
        "text": (("text",), _text),
    },
    "preference": {"preference": (("chosen", "rejected"), _preference)},
    "unpaired": {"unpaired": (("prompt", "completion", "label"), _unpaired)},
    "prompts": {"chat": (("messages",), _prompt_alone), "prompt": (("prompt",), _prompt_alone)},
}
