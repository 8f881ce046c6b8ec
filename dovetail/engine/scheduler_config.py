"""SchedulerConfig: the limits the scheduler works within, and with them the most tokens a sequence may reach."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dovetail.core.errors import UserError
from dovetail.engine.sequence import Sequence


@dataclass(frozen=True)
class SchedulerConfig:
    max_num_seqs: int
    max_num_batched_tokens: int  # of one device step, over all sequences
    max_model_len: int
    page_size: int
    num_pages: int
    prefix_caching: bool = True
    policy: Literal["fcfs", "priority"] = "fcfs"
    multi_step: int = 1  # the most device steps in one plan
    model: str = ""  # names the weights in the prefix cache's hashes

    def __post_init__(self):
        for name in ("max_num_seqs", "max_num_batched_tokens", "page_size", "num_pages", "multi_step"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1; got {getattr(self, name)}")
        if self.max_model_len < 2:
            raise UserError(f"max_model_len must hold a prompt token and a sampled one; got {self.max_model_len}")
        if self.policy not in ("fcfs", "priority"):
            raise UserError(f"policy must be 'fcfs' or 'priority'; got {self.policy!r}")

    @property
    def context(self) -> int:
        """The most tokens of any sequence: the model's limit, or the pool's where that is smaller. The last one sampled
        is never fed, so it needs no slot in a page."""
        return min(self.max_model_len, self.num_pages * self.page_size + 1)

    def limit_of(self, seq: Sequence) -> int:
        """The most tokens the sequence may reach. Because of this limit a sequence alone always fits the pool, which is
        why preemption always helps."""
        size, asked, name = len(seq.tokens), seq.request.params.max_tokens, f"request {seq.request.id}"
        if not seq.request.prompt:
            raise UserError(f"{name}: the prompt is empty; give at least one token")
        if size >= self.max_model_len:
            raise UserError(
                f"{name}: a prompt of {size} tokens leaves no room for a sampled one within "
                f"max_model_len={self.max_model_len}; shorten the prompt or raise max_model_len"
            )
        if size >= self.context:
            raise UserError(
                f"{name}: a prompt of {size} tokens does not fit the KV pool of {self.num_pages} "
                f"pages x {self.page_size} tokens; shorten the prompt or give the KV cache more memory"
            )
        return self.context if asked is None else min(self.context, seq.prompt_len + asked)
