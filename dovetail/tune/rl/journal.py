"""The journal: what was sampled and rewarded, written as it comes, so that a killed run continues with it.

A file holds one rollout: lines with episodes that ended, with partial turns of others and with rewards, and at the end
the groups that are trained. Weights are replayed exactly from a checkpoint, so what they sampled stays valid. For a
rollout with several updates, a second file holds the scores of its tokens before the first update. Rollouts before the
last checkpoint are removed.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np

from dovetail.core.files import write_atomic
from dovetail.tune.rl import partial_turns
from dovetail.tune.rl.episode import Episode, EpisodeId, from_json, to_json
from dovetail.tune.rl.partial_turns import PartialTurn, TurnId, joined

TrainedGroups = list[tuple[int, int]]  # (draw, group) of the groups that are trained, in order
Scores = dict[str, np.ndarray]  # by name, for all tokens of an update's episodes, one after another
REWARDED = ("text", "rewards", "problems", "reward")  # the fields of an episode that rewards add
EPISODES, SCORES, KEY = ".jsonl", ".npz", "key"


class JournalEntry(NamedTuple):
    """What the journal has of a rollout."""

    episodes: dict[EpisodeId, Episode]  # those that ended
    partial: dict[TurnId, PartialTurn]  # turns of the others
    trained: TrainedGroups | None  # None: the rollout was not finished


class Journal:
    """Read and write the rollouts of a run."""

    def __init__(self, folder: Path, key: str = ""):
        """Open the journal in `folder`. One that was written with another `key` is not read; "": any key is."""
        self._folder, self._file, self._number, self._key = folder, None, -1, key
        self._file: TextIO | None

    def read(self, rollout: int) -> JournalEntry:
        """Return what there is of a rollout."""
        self._check_key()
        path, found, trained = self._path(rollout), {}, None
        parts: list[PartialTurn] = []
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else ():
            entry = _parsed(line)
            if entry is None:
                break  # a kill truncated it
            if "trained" in entry:
                trained = [(draw, group) for draw, group in entry["trained"]]
            elif "partial_turns" in entry:
                parts += partial_turns.from_json(entry["partial_turns"])
            elif "rewards" in entry:
                for id, *values in entry["rewards"]:
                    vars(found[EpisodeId(*id)]).update(zip(REWARDED, values, strict=True))
            else:
                found |= {one.id: one for one in from_json(entry["episodes"])}
        return JournalEntry(found, joined(each for each in parts if each.turn.episode not in found), trained)

    def _check_key(self) -> None:
        """Remove a journal with another key. This is done when it is first read: a refused run leaves it as it is."""
        path = self._folder / KEY
        before = path.read_text(encoding="utf-8") if self._key and path.exists() else self._key
        if before != self._key:
            self.remove(sys.maxsize)
        if self._key and (before != self._key or not path.exists()):
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomic(path, self._key)

    def write_episodes(self, rollout: int, episodes: Sequence[Episode]) -> None:
        """Write episodes that have ended."""
        self._line(rollout, f'{{"episodes": {to_json(episodes)}}}')

    def write_rewards(self, rollout: int, episodes: Sequence[Episode]) -> None:
        """Write the rewards of episodes."""
        values = [(each.id, *(getattr(each, name) for name in REWARDED)) for each in episodes]
        self._line(rollout, json.dumps({"rewards": values}, ensure_ascii=False))

    def write_partial_turns(self, rollout: int, parts: Sequence[PartialTurn]) -> None:
        """Write parts of turns."""
        self._line(rollout, f'{{"partial_turns": {partial_turns.to_json(parts)}}}')

    def write_trained_groups(self, rollout: int, groups: TrainedGroups) -> None:
        """Write which groups are trained, which finishes the rollout."""
        self._line(rollout, json.dumps({"trained": groups}))

    def remove(self, before: int) -> None:
        """Remove the rollouts before this number."""
        for suffix in (EPISODES, SCORES):
            for path in self._folder.glob(f"*{suffix}"):
                if int(path.name.removesuffix(suffix)) < before:
                    path.unlink()

    def scores(self, rollout: int) -> list[Scores] | None:
        """Return the scores of each update, as `write_scores` was given them; None where there are none."""
        path = self._path(rollout, SCORES)
        if not path.exists():
            return None
        with np.load(path) as arrays:
            found: list[Scores] = [{} for _ in range(int(arrays["updates"]))]
            for key in arrays.files:
                update, _, name = key.partition(".")
                if name:
                    found[int(update)][name] = arrays[key]
        return found

    def write_scores(self, rollout: int, scores: Sequence[Scores]) -> None:
        """Write the scores of each update of a rollout."""
        self._folder.mkdir(parents=True, exist_ok=True)
        arrays = {f"{i}.{name}": array for i, each in enumerate(scores) for name, array in each.items()}
        content = io.BytesIO()
        np.savez(content, updates=len(scores), **arrays)  # type: ignore[arg-type]
        write_atomic(self._path(rollout, SCORES), content.getvalue())

    def close(self) -> None:
        """Close the open file."""
        if self._file:
            self._file.close()
            self._file = None

    def _line(self, rollout: int, line: str) -> None:
        if self._number != rollout or self._file is None:
            self.close()
            self._folder.mkdir(parents=True, exist_ok=True)
            _remove_truncated_line(self._path(rollout))
            self._file, self._number = self._path(rollout).open("a", encoding="utf-8"), rollout
        self._file.write(line + "\n")
        self._file.flush()  # a kill of this process does not lose what the system has

    def _path(self, rollout: int, suffix: str = EPISODES) -> Path:
        return self._folder / f"{rollout:08}{suffix}"


def _remove_truncated_line(path: Path) -> None:
    """Remove a last line that a kill truncated: the next line would be joined to it."""
    if path.exists() and (text := path.read_bytes()) and not text.endswith(b"\n"):
        path.write_bytes(text[: text.rfind(b"\n") + 1])


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        return json.loads(line) if line.endswith("\n") else None
    except ValueError:
        return None
