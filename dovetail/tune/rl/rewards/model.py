"""A reward model of ours: its score of a prompt with its completion. It runs where the model is, in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from dovetail.core.choice import require
from dovetail.tune.rl.rewards.text import text_of

Document = str | list[dict[str, Any]]


class Scorer(Protocol):
    def score(self, prompts: Any, /) -> Sequence[float]:
        """Of each text, or of each conversation."""
        ...


@dataclass(frozen=True)
class ModelReward:
    """`model` is an `LLM` of a reward model, or whatever scores as it does; or its name or folder, which is loaded.

    A prompt of messages makes a conversation with its answer; a prompt of text is followed by the answer, and by
    `suffix` where the model has learnt to read its score there. The rows go to the model in one call.
    """

    model: Any
    suffix: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)  # of dovetail.LLM, for a model that is loaded here

    columns: ClassVar[tuple[str, ...]] = ()
    in_process: ClassVar[bool] = True
    _name: ClassVar[str] = ""  # of one that was loaded here

    @property
    def identity(self) -> Any:
        """What tells it from another (see code_identity): a model that was loaded counts by its name."""
        return [self._name or type(self.model).__name__, self.suffix, dict(self.options)]

    def __post_init__(self) -> None:
        object.__setattr__(self, "_name", self.model if isinstance(self.model, str) else "")
        if isinstance(self.model, str):
            from dovetail.engine.llm import LLM

            object.__setattr__(self, "model", LLM(self.model, **self.options))
        else:
            require(hasattr(self.model, "score"), f"model must have score(texts); got a {type(self.model).__name__}")
            require(not self.options, f"options are for a model that is loaded by its name; got {dict(self.options)}")

    def __call__(self, prompts: list, completions: list) -> list[float]:
        documents = [self._document(p, c) for p, c in zip(prompts, completions, strict=True)]
        scores: dict[int, float] = {}
        for kind in (str, list):  # texts and conversations are told apart by the whole list
            rows = [i for i, document in enumerate(documents) if isinstance(document, kind)]
            if rows:
                found = self.model.score([documents[i] for i in rows])
                scores |= {i: float(score) for i, score in zip(rows, found, strict=True)}
        return [scores[i] for i in range(len(documents))]

    def _document(self, prompt: Any, completion: Any) -> Document:
        if isinstance(prompt, str):
            return prompt + text_of(completion) + self.suffix
        answer = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
        return [*prompt, *answer]
