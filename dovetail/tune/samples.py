"""What a model answers to a few prompts as it learns: the likeliest tokens, by the weights of the moment."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import jax

from dovetail.core.compute import compute_of
from dovetail.core.types import Params
from dovetail.io.tokenizer import Tokenizer
from dovetail.models.greedy import greedy
from dovetail.train.objective import step_context
from dovetail.train.prepare import Ready
from dovetail.train.rows import Sampled
from dovetail.train.step import compute_copy
from dovetail.tune.policy import policy_of
from dovetail.tune.settings import Tuning


@dataclass(frozen=True)
class Sampler:
    every: int  # steps
    settings: Tuning
    ready: Ready
    tokenizer: Tokenizer

    @classmethod
    def of(cls, settings: Tuning, ready: Ready, tokenizer: Tokenizer) -> Sampler | None:
        """None where no samples are asked for, or several processes share the weights."""
        if not settings.samples.every or jax.process_count() > 1:
            return None
        return cls(settings.samples.every, settings, ready, tokenizer)

    def __call__(self, params: Params, step: int) -> Sampled:
        settings, ready = self.settings, self.ready
        compute = compute_of(settings.precision.compute)
        ctx = replace(step_context(ready.settings, ready.placement, ready.platform), frozen=ready.frozen)
        own = compute_copy(params, ready.specs, compute)
        model: Any = jax.jit(lambda own, frozen: policy_of(settings).params(own, replace(ctx, frozen=frozen)))(
            own, ready.frozen
        )
        asked = settings.samples.prompts
        return Sampled([{"prompt": prompt, "answer": self._answer(model, prompt, compute)} for prompt in asked])

    def _answer(self, model: Params, prompt: str, compute: Any) -> str:
        ends = {*self.tokenizer.eos_ids, *self.ready.cfg.eos_ids}
        found = greedy(model, self.ready.cfg, self._ids(prompt), self.settings.samples.tokens, compute)
        return self.tokenizer.decode(takewhile(lambda token: token not in ends, found))

    def _ids(self, prompt: str) -> list[int]:
        if self.tokenizer.chat_template is None:
            return self.tokenizer.encode(prompt)
        return self.tokenizer.encode_chat([{"role": "user", "content": prompt}])
