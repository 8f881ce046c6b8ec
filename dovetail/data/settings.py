"""Settings of a recipe's `data` section: `Data` for pretraining, `TuningData` for fine-tuning and RL."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import ClassVar, NamedTuple

from dovetail.core.choice import one_of, require

FILE_FORMATS = ("auto", "text", "jsonl", "parquet", "arrayrecord", "hf", "corpus")
RECORD_FORMATS = ("auto", "chat", "prompt", "text", "preference", "unpaired")
PACKINGS = ("concat", "best_fit")
OVERLONG = ("turns", "cut", "skip")


@dataclass(frozen=True)
class Source:
    """Configure one source of documents: a file, a folder, or a built-in corpus by name."""

    path: str
    weight: float = 1.0  # share of the rows, relative to the other sources
    format: str = "auto"  # by the files' endings
    text_key: str = "text"  # the field that holds the text, where a record has fields

    def __post_init__(self) -> None:
        require(bool(self.path), "path must name a file, a folder or a corpus; it is empty", param="path")
        _check_weight(self.weight)
        one_of("format", self.format, FILE_FORMATS)
        require(bool(self.text_key), "text_key must name the field of the text; it is empty", param="text_key")


@dataclass(frozen=True)
class Data:
    """Configure the documents of pretraining, and how they fill rows."""

    sources: tuple[Source, ...]  # where the documents are, each with a path and a weight
    tokenizer: str = ""  # "": the model's own; "bytes": raw UTF-8 (ids 0 to 255, 256 ends a document); or a path
    packing: str = "concat"  # how documents fill rows: concat or best_fit
    seed: int = 0  # seed of the order of documents
    cache: str = ""  # folder of the token caches; default: data/ in Dovetail's home
    held_out: float = 0.0  # for evaluation: below 1 a share of the documents, from 1 on a number of rows

    def __post_init__(self) -> None:
        require(
            bool(self.sources), "sources must list at least one source, such as `- path: my-texts`; it is empty",
            param="sources",
        )  # fmt: skip
        one_of("packing", self.packing, PACKINGS)
        _check_split(self.seed, self.held_out, "documents")


class TrainedTokens(NamedTuple):
    """Select the tokens of an example that count in the loss."""

    assistant_only: bool = True  # of a conversation, the assistant's tokens; else all of them
    completion_only: bool = True  # of a prompt with a completion, the completion; else both


@dataclass(frozen=True)
class Keys:
    """Name the key of each field in a record, such as `keys: {messages: dialogue}`; empty: the usual name."""

    messages: str = ""  # a conversation: messages, or ShareGPT's conversations
    role: str = ""  # of a message: role, or from
    content: str = ""  # of a message: content, or value
    tools: str = ""  # the tools that a conversation may call
    system: str = ""  # a system prompt beside the conversation
    prompt: str = ""  # prompt, or Alpaca's instruction
    input: str = ""  # the input of an instruction (Alpaca)
    completion: str = ""  # completion, or Alpaca's output
    chosen: str = ""  # the better answer of a pair
    rejected: str = ""  # the worse answer of a pair
    label: str = ""  # true: a completion to learn from; false: one to avoid
    text: str = ""  # plain text, trained as a whole
    margin: str = ""  # of a preference: by how much the chosen answer should lead
    images: str = ""  # the images of a record, a list or one: images, or image

    def over(self, below: Keys) -> Keys:
        """Return `below` with the keys that are set here in place of its own."""
        return replace(below, **{f.name: value for f in fields(self) if (value := getattr(self, f.name))})


@dataclass(frozen=True)
class TuningSource:
    """Configure one of several sources of records."""

    path: str
    weight: float = 1.0  # share of the rows, relative to the other sources
    keys: Keys = Keys()  # override the keys of `data.keys`

    def __post_init__(self) -> None:
        require(bool(self.path), "path must name a file or a folder of records; it is empty", param="path")
        _check_weight(self.weight)


@dataclass(frozen=True)
class TuningData:
    """Configure the records of fine-tuning, and how they become examples."""

    MAIN: ClassVar = "path"  # `data: chats.jsonl` is data.path

    path: str = ""  # JSONL, Parquet or a Hugging Face dataset on disk: a file, a folder, a pattern
    sources: tuple[TuningSource, ...] = ()  # several sources, in place of path
    format: str = "auto"  # which form of a record to read, where it has several
    keys: Keys = Keys()
    template: str = ""  # a file with the chat template to use; default: the tokenizer's own
    overlong: str = "turns"  # an example longer than a row loses its oldest turns, is cut at its end, or is skipped
    skip_bad_records: bool = False  # leave out and list records that cannot be used; else they are an error
    seed: int = 0  # seed of the order of examples
    cache: str = ""  # folder of the token caches; default: data/ in Dovetail's home
    held_out: float = 0.0  # for evaluation: below 1 a share of the records, from 1 on a number of rows

    def __post_init__(self) -> None:
        require(
            not (self.path and self.sources),
            f"path is for one source and sources for several; got both (path is {self.path!r}): leave one out",
            param="path",
        )
        one_of("format", self.format, RECORD_FORMATS)
        one_of("overlong", self.overlong, OVERLONG)
        _check_split(self.seed, self.held_out, "records")

    @property
    def all_sources(self) -> tuple[TuningSource, ...]:
        """Return every source with its keys; none where the records come from a program."""
        listed = self.sources or ((TuningSource(self.path),) if self.path else ())
        return tuple(replace(source, keys=source.keys.over(self.keys)) for source in listed)


def _check_weight(weight: float) -> None:
    require(
        0 < weight < float("inf"),
        f"weight must be above 0; got {weight} (leave a source out of the list to use none of it)",
        param="weight",
    )


def _check_split(seed: int, held_out: float, what: str) -> None:
    require(seed >= 0, f"seed must be 0 or more; got {seed}", param="seed")
    require(
        held_out >= 0 and (held_out < 1 or held_out == int(held_out)),
        f"held_out must be a share of the {what} (0 to 1) or a whole number of rows; got {held_out}",
        param="held_out",
    )
