"""What a fine-tuning recipe says about its data: where the records are, what they hold, how they become examples."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import ClassVar, NamedTuple

from dovetail.core.choice import one_of, require

FORMATS = ("auto", "chat", "prompt", "text", "preference", "unpaired")
OVERLONG = ("turns", "cut", "skip")


class TrainedTokens(NamedTuple):
    """Which tokens of an example count."""

    assistant_only: bool = True  # of a conversation, what the assistant writes; else all of it
    completion_only: bool = True  # of a prompt and its completion, the completion; else both


@dataclass(frozen=True)
class Keys:
    """Under which key a record holds what; one that is not given has its usual name: `keys: {messages: dialogue}`."""

    messages: str = ""  # a conversation: messages, or ShareGPT's conversations
    role: str = ""  # of a message: role, or from
    content: str = ""  # of a message: content, or value
    tools: str = ""  # the tools that a conversation may call
    system: str = ""  # a system prompt beside the conversation
    prompt: str = ""  # prompt, or Alpaca's instruction
    input: str = ""  # what belongs to an instruction, as Alpaca has it
    completion: str = ""  # completion, or Alpaca's output
    chosen: str = ""  # the better answer of a pair
    rejected: str = ""  # the worse answer of a pair
    label: str = ""  # true: a completion to learn from; false: one to avoid
    text: str = ""  # plain text, all of which is trained
    margin: str = ""  # of a preference: by how much the chosen one should lead

    def over(self, below: Keys) -> Keys:
        """These, and what they do not name as `below` has it."""
        return replace(below, **{f.name: value for f in fields(self) if (value := getattr(self, f.name))})


@dataclass(frozen=True)
class TuningSource:
    """One of several sources; `weight` is its share of the rows, relative to the others."""

    path: str
    weight: float = 1.0
    keys: Keys = Keys()  # over those of the whole data

    def __post_init__(self) -> None:
        require(bool(self.path), "path must name a file or a folder of records; it is empty")
        require(
            0 < self.weight < float("inf"),
            f"weight must be above 0; got {self.weight} (leave a source out of the list to use none of it)",
        )


@dataclass(frozen=True)
class TuningData:
    MAIN: ClassVar = "path"  # `data: chats.jsonl` is data.path

    path: str = ""  # JSONL, Parquet or a Hugging Face dataset on disk: a file, a folder, a pattern
    sources: tuple[TuningSource, ...] = ()  # in place of path: several
    format: str = "auto"  # which of a record's forms to take, where it has several
    keys: Keys = Keys()
    template: str = ""  # a file with the chat template to use; "": the tokenizer's own
    overlong: str = "turns"  # what is longer than a row loses its oldest turns, is cut at its end, or is left out
    skip_bad_records: bool = False  # leave out records that cannot be used, and list them; else they are an error
    seed: int = 0  # seed of the order of examples and of what is held out
    held_out: float = 0.0  # for evaluation: below 1 a share of the records, from 1 on a number of rows

    def __post_init__(self) -> None:
        require(
            not (self.path and self.sources),
            f"path is for one source and sources for several; got both (path is {self.path!r}): leave one out",
        )
        one_of("format", self.format, FORMATS)
        one_of("overlong", self.overlong, OVERLONG)
        require(self.seed >= 0, f"seed must be 0 or more; got {self.seed}")
        whole = self.held_out < 1 or self.held_out == int(self.held_out)
        require(
            self.held_out >= 0 and whole,
            f"held_out must be a share of the records (0 to 1) or a whole number of rows; got {self.held_out}",
        )

    @property
    def all_sources(self) -> tuple[TuningSource, ...]:
        """Each with the keys that hold for it; none where the records come from a program."""
        listed = self.sources or ((TuningSource(self.path),) if self.path else ())
        return tuple(replace(source, keys=source.keys.over(self.keys)) for source in listed)
