"""SpeculationCounts: counters of speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class SpeculationCounts:
    """Count what speculative decoding did, under vLLM's names (`vllm:spec_decode_num_*`)."""

    drafts: int = 0  # rows of verify steps with draft tokens
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_pos: list[int] = field(default_factory=list)
