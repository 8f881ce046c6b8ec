"""What a recipe says about data: which sources, in what proportions, cut into rows how."""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.core.choice import one_of, require

FORMATS = ("auto", "text", "jsonl", "parquet", "arrayrecord", "hf", "corpus")
PACKINGS = ("concat", "best_fit")


@dataclass(frozen=True)
class Source:
    """A file, a folder, or a built-in corpus by name; `weight` is its share of the rows, relative to the others."""

    path: str
    weight: float = 1.0
    format: str = "auto"  # by the files' endings
    text_key: str = "text"  # the field that holds the text, where a record has fields

    def __post_init__(self) -> None:
        require(bool(self.path), "path must name a file, a folder or a corpus; it is empty")
        require(
            0 < self.weight < float("inf"),
            f"weight must be above 0; got {self.weight} (leave a source out of the list to use none of it)",
        )
        one_of("format", self.format, FORMATS)
        require(bool(self.text_key), "text_key must name the field that holds the text; it is empty")


@dataclass(frozen=True)
class Data:
    sources: tuple[Source, ...]  # where the documents are, each with a path and a weight
    tokenizer: str = ""  # "": the model's own; "bytes": raw UTF-8 (ids 0 to 255, 256 ends a document); or a path
    packing: str = "concat"  # how documents fill rows: see data.pack
    seed: int = 0  # seed of the order of documents and of what is held out
    cache: str = ""  # where tokens are kept; "": data/ in Dovetail's home
    held_out: float = 0.0  # for evaluation: below 1 a share of the documents, from 1 on a number of rows

    def __post_init__(self) -> None:
        require(bool(self.sources), "sources must list at least one source, such as `- path: my-texts`; it is empty")
        one_of("packing", self.packing, PACKINGS)
        require(self.seed >= 0, f"seed must be 0 or more; got {self.seed}")
        whole = self.held_out < 1 or self.held_out == int(self.held_out)
        require(
            self.held_out >= 0 and whole,
            f"held_out must be a share of the documents (0 to 1) or a whole number of rows; got {self.held_out}",
        )
