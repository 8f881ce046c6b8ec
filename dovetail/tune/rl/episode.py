"""An episode: a prompt, what the policy sampled, and what an environment answered in between, token by token.

Tokens are never tokenised again, and which of them were sampled is stored.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np


class EpisodeId(NamedTuple):
    """Identify an episode within its rollout."""

    draw: int  # which draw of prompts: 0, and more where dynamic sampling replaces groups
    group: int  # which prompt of the draw
    member: int = 0  # which completion of the prompt


@dataclass
class Episode:
    """Hold the tokens of an episode, and its rewards once they are assigned."""

    id: EpisodeId
    prompt_index: int  # the index of its PromptRecord
    prompt_length: int  # tokens of the prompt
    tokens: np.ndarray  # [T] int32: the prompt, and everything after it
    sampled: np.ndarray  # [T] bool: whether the policy sampled the token
    logprobs: np.ndarray  # [T] f32: the sampler's log-probabilities; 0 where nothing was sampled
    support: np.ndarray | None = None  # [T, K] int32: with top_k, the candidates of each token; -1 pads
    version: int = 0  # version of the weights that sampled it: the number of updates they had had
    text: str = ""  # what the policy sampled, over all turns
    finish: str = ""  # stop, length, or the reason that an environment gives
    messages: list[dict[str, Any]] | None = None  # the conversation after the prompt, with an environment
    images: list[str] = field(default_factory=list)  # files of the images after the prompt, in base64
    rewards: dict[str, float | None] = field(default_factory=dict)  # each reward by its name
    problems: dict[str, str] = field(default_factory=dict)  # why a reward is None, by its name
    reward: float | None = None  # the total; None: it has none

    @property
    def completion_length(self) -> int:
        """Return the number of sampled tokens."""
        return int(self.sampled.sum())

    @property
    def truncated(self) -> bool:
        """Return whether the episode reached max_completion_length."""
        return self.finish == "length"

    def loss_mask(self, mask_truncated: bool, needs_reward: bool = True) -> np.ndarray:
        """Return which tokens are trained, [T] bool.

        Args:
            mask_truncated: Leave out a truncated episode.
            needs_reward: Leave out an episode without a reward.
        """
        counts = (self.reward is not None or not needs_reward) and not (mask_truncated and self.truncated)
        return self.sampled & counts

    def extend(
        self, tokens: Sequence[int], logprobs: np.ndarray | None = None, support: np.ndarray | None = None
    ) -> None:
        """Append tokens: with log-probabilities, a turn of the policy; without, what the environment said."""
        more = np.fromiter(tokens, np.int32, len(tokens))
        self.tokens = np.concatenate([self.tokens, more])
        self.sampled = np.concatenate([self.sampled, np.full(len(more), logprobs is not None)])
        self.logprobs = np.concatenate(
            [self.logprobs, np.zeros(len(more), np.float32) if logprobs is None else logprobs]
        )
        if self.support is not None:
            none = np.full((len(more), self.support.shape[1]), -1, np.int32)
            self.support = np.concatenate([self.support, none if support is None else support])


def new_episode(id: EpisodeId, prompt_index: int, tokens: Sequence[int], version: int, top_k: int = -1) -> Episode:
    """Return an episode that has only its prompt. `top_k`: the number of candidates to store per token, if above 0."""
    count = len(tokens)
    return Episode(
        id, prompt_index, count, np.asarray(tokens, np.int32), np.zeros(count, bool), np.zeros(count, np.float32),
        np.full((count, top_k), -1, np.int32) if top_k > 0 else None, version,
    )  # fmt: skip


# --- JSON -------------------------------------------------------------------------------------------------------------


ARRAYS = {"tokens": np.int32, "sampled": np.bool_, "logprobs": np.float32, "support": np.int32}
PLAIN = tuple(each.name for each in fields(Episode) if each.name not in ARRAYS)


def to_json(episodes: Sequence[Episode]) -> str:
    """Return episodes as one JSON object."""
    counts = [len(each.tokens) for each in episodes]
    plain = {"count": counts} | {name: [getattr(each, name) for each in episodes] for name in PLAIN}
    there = [name for name in ARRAYS if getattr(episodes[0], name) is not None]
    return with_arrays(plain, {name: np.concatenate([getattr(each, name) for each in episodes]) for name in there})


def from_json(entry: dict[str, Any]) -> list[Episode]:
    """Return the episodes that `to_json` wrote."""
    ends, total = np.cumsum(entry["count"]), sum(entry["count"])
    parts = {}
    for name, dtype in ARRAYS.items():
        whole = array_of(entry, name, dtype)
        shape = (total, -1) if name == "support" else (total,)
        parts[name] = np.split(whole.reshape(shape), ends[:-1]) if whole.size else [None] * len(ends)
    entry.setdefault("images", [[] for _ in ends])  # a journal of an earlier version has none
    rows = zip(*(entry[name] for name in PLAIN), *parts.values(), strict=True)
    found = [Episode(**dict(zip((*PLAIN, *ARRAYS), row, strict=True))) for row in rows]
    for each in found:
        each.id = EpisodeId(*each.id)
    return found


def with_arrays(plain: dict[str, Any], arrays: dict[str, np.ndarray]) -> str:
    """Return JSON of plain values and of arrays as base64, which are appended without json.dumps.

    A rollout has hundreds of thousands of numbers. Writing their digits would take longer than sampling them, and
    base64 has no characters to escape.
    """
    texts = (f', "{name}": "{base64.b64encode(array.tobytes()).decode()}"' for name, array in arrays.items())
    return f"{json.dumps(plain, ensure_ascii=False)[:-1]}{''.join(texts)}}}"


def array_of(entry: dict[str, Any], name: str, dtype: Any) -> np.ndarray:
    """Return an array that `with_arrays` wrote, flat; empty where it is missing."""
    return np.frombuffer(base64.b64decode(entry.get(name, "")), dtype).copy()
