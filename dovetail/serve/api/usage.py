"""Usage: the tokens that an answer took, counted as its steps come."""

from __future__ import annotations

from typing import Any

from dovetail.io.tool_formats.events import Content, Reasoning
from dovetail.serve.talk.answer import Ask, Step


class Usage:
    def __init__(self, asks: list[Ask]):
        self.prompt = sum(len(ask.prompt) for ask in asks)
        self.completion = self.reasoning = 0
        self._cached = [0] * len(asks)

    @property
    def cached(self) -> int:
        return sum(self._cached)

    def count(self, step: Step, prompt: int = 0) -> None:
        """`prompt`: the index of the prompt that the step answers."""
        self.completion += len(step.tokens)
        self._cached[prompt] = max(self._cached[prompt], step.cached_tokens)  # n answers share one prompt
        kinds = {type(event) for event in step.events}
        if Reasoning in kinds and Content not in kinds:
            self.reasoning += len(step.tokens)  # exact to one step: tokens are counted when their text appears

    def openai(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        }

    def responses(self) -> dict[str, Any]:
        return {
            "input_tokens": self.prompt,
            "input_tokens_details": {"cached_tokens": self.cached, "cache_write_tokens": 0},
            "output_tokens": self.completion,
            "output_tokens_details": {"reasoning_tokens": self.reasoning},
            "total_tokens": self.prompt + self.completion,
        }

    def anthropic(self) -> dict[str, Any]:
        """Anthropic counts cached tokens separately."""
        return {
            "input_tokens": self.prompt - self.cached,
            "cache_read_input_tokens": self.cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": self.completion,
        }
