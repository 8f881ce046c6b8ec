"""An episode: a prompt, what the policy wrote, and what an environment answered in between, token by token.

Tokens go in and come out: nothing is tokenised twice, and which were sampled is known, not inferred.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np


class Place(NamedTuple):
    """Where in a rollout an episode belongs."""

    turn: int  # of the rollout's draws: 0, and more where groups that teach nothing are replaced
    group: int  # of that draw
    member: int = 0


@dataclass
class Episode:
    task: int
    place: Place
    prompt: int  # tokens of the prompt
    tokens: np.ndarray  # [T] int32: the prompt, and all that came after
    sampled: np.ndarray  # [T] bool: whether the policy chose it
    logprobs: np.ndarray  # [T] f32: the sampler's, of each that was sampled; 0 of the others
    support: np.ndarray | None = None  # [T, K] int32: the words that each was drawn from, -1 beyond them
    version: int = 0  # of the weights that sampled it: the updates they had had
    text: str = ""  # what the policy wrote; of several turns, all of it
    finish: str = ""  # stop, length, or what an environment says
    messages: list[dict[str, Any]] | None = None  # the conversation, where there was one
    rewards: dict[str, float | None] = field(default_factory=dict)  # each by its name
    problems: dict[str, str] = field(default_factory=dict)  # why one is None
    reward: float | None = None  # the total

    @property
    def written(self) -> int:
        """Tokens that the policy chose."""
        return int(self.sampled.sum())

    @property
    def truncated(self) -> bool:
        return self.finish == "length"

    def mask(self, drops_truncated: bool, needs_reward: bool = True) -> np.ndarray:
        """[T]: which are trained. Where rewards teach, one without a reward teaches nothing."""
        counts = (self.reward is not None or not needs_reward) and not (drops_truncated and self.truncated)
        return self.sampled & counts

    def extend(
        self, tokens: Sequence[int], logprobs: np.ndarray | None = None, support: np.ndarray | None = None
    ) -> None:
        """With what the policy wrote, where log-probabilities come with it, or what it was told."""
        more = np.fromiter(tokens, np.int32, len(tokens))
        self.tokens = np.concatenate([self.tokens, more])
        self.sampled = np.concatenate([self.sampled, np.full(len(more), logprobs is not None)])
        self.logprobs = np.concatenate(
            [self.logprobs, np.zeros(len(more), np.float32) if logprobs is None else logprobs]
        )
        if self.support is not None:
            none = np.full((len(more), self.support.shape[1]), -1, np.int32)
            self.support = np.concatenate([self.support, none if support is None else support])


def begun(task: int, place: Place, tokens: Sequence[int], version: int, support: int = 0) -> Episode:
    """Of which the prompt alone is there; `support`: how many words each token is drawn from, where they are kept."""
    count = len(tokens)
    return Episode(
        task, place, count, np.asarray(tokens, np.int32), np.zeros(count, bool), np.zeros(count, np.float32),
        np.full((count, support), -1, np.int32) if support else None, version,
    )  # fmt: skip


# --- as JSON ----------------------------------------------------------------------------------------------------------


ARRAYS = {"tokens": np.int32, "sampled": np.bool_, "logprobs": np.float32, "support": np.int32}
PLAIN = tuple(each.name for each in fields(Episode) if each.name not in ARRAYS)
JUDGED = ("text", "rewards", "problems", "reward")  # what is known when an episode has been judged


def to_json(episodes: Sequence[Episode]) -> str:
    counts = [len(each.tokens) for each in episodes]
    told = {"count": counts} | {name: [getattr(each, name) for each in episodes] for name in PLAIN}
    there = [name for name in ARRAYS if getattr(episodes[0], name) is not None]
    return with_arrays(told, {name: np.concatenate([getattr(each, name) for each in episodes]) for name in there})


def from_json(entry: dict[str, Any]) -> list[Episode]:
    ends, total = np.cumsum(entry["count"]), sum(entry["count"])
    parts = {}
    for name, dtype in ARRAYS.items():
        whole = array_of(entry, name, dtype)
        shape = (total, -1) if name == "support" else (total,)
        parts[name] = np.split(whole.reshape(shape), ends[:-1]) if whole.size else [None] * len(ends)
    rows = zip(*(entry[name] for name in PLAIN), *parts.values(), strict=True)
    found = [Episode(**dict(zip((*PLAIN, *ARRAYS), row, strict=True))) for row in rows]
    for each in found:
        each.place = Place(*each.place)
    return found


def with_arrays(told: dict[str, Any], arrays: dict[str, np.ndarray]) -> str:
    """JSON of both, arrays as base64, past json.dumps: a rollout has hundreds of thousands of numbers, and their digits
    would take longer to write than they took to sample; of base64 nothing must be escaped, so nobody need look.
    """
    texts = (f', "{name}": "{base64.b64encode(array.tobytes()).decode()}"' for name, array in arrays.items())
    return f"{json.dumps(told, ensure_ascii=False)[:-1]}{''.join(texts)}}}"


def array_of(entry: dict[str, Any], name: str, dtype: Any) -> np.ndarray:
    """[n]; empty where it is not there."""
    return np.frombuffer(base64.b64decode(entry.get(name, "")), dtype).copy()
