"""The journal: what was sampled and judged, kept as it comes, so that a run which is killed goes on with it.

A file holds one rollout: lines with the episodes that ended, with what others have so far and with judgements, and in
the end one that says which groups are trained. Weights are replayed exactly from a checkpoint, so what they sampled
stays true. Beside it, of a rollout with several updates, a file holds what models said of its tokens before the first
of them. Rollouts that a checkpoint has behind it are removed.
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
from dovetail.tune.rl import draft
from dovetail.tune.rl.draft import Draft, Turn, joined
from dovetail.tune.rl.episode import JUDGED, Episode, Place, from_json, to_json

Chosen = list[tuple[int, int]]  # (turn, group) of the groups that are trained, in order
Scores = dict[str, np.ndarray]  # by name, of all tokens of an update's episodes, one after another
EPISODES, SCORES, KEY = ".jsonl", ".npz", "key"


class Found(NamedTuple):
    episodes: dict[Place, Episode]  # that ended
    drafts: dict[Turn, Draft]  # of those that did not
    chosen: Chosen | None  # which groups are trained; None: that is not known yet


class Journal:
    def __init__(self, folder: Path, key: str = ""):
        """`key`: what is read of a journal that was written with another is nothing; "": it does not matter."""
        self._folder, self._file, self._number, self._key = folder, None, -1, key
        self._file: TextIO | None

    def read(self, rollout: int) -> Found:
        self._open()
        path, found, chosen = self._path(rollout), {}, None
        drafts: list[Draft] = []
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else ():
            entry = _parsed(line)
            if entry is None:
                break  # a kill cut it short
            if "chosen" in entry:
                chosen = [(turn, group) for turn, group in entry["chosen"]]
            elif "drafts" in entry:
                drafts += draft.from_json(entry["drafts"])
            elif "judged" in entry:
                for place, *judged in entry["judged"]:
                    vars(found[Place(*place)]).update(zip(JUDGED, judged, strict=True))
            else:
                found |= {one.place: one for one in from_json(entry["episodes"])}
        return Found(found, joined(each for each in drafts if each.turn.place not in found), chosen)

    def _open(self) -> None:
        """Before the first reading. Not when it is made: a run that is then refused leaves it as it is."""
        path = self._folder / KEY
        before = path.read_text(encoding="utf-8") if self._key and path.exists() else self._key
        if before != self._key:
            self.forget(sys.maxsize)
        if self._key and (before != self._key or not path.exists()):
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomic(path, self._key)

    def write(self, rollout: int, episodes: Sequence[Episode]) -> None:
        """That have ended."""
        self._line(rollout, f'{{"episodes": {to_json(episodes)}}}')

    def judge(self, rollout: int, episodes: Sequence[Episode]) -> None:
        judged = [(each.place, *(getattr(each, name) for name in JUDGED)) for each in episodes]
        self._line(rollout, json.dumps({"judged": judged}, ensure_ascii=False))

    def write_drafts(self, rollout: int, drafts: Sequence[Draft]) -> None:
        self._line(rollout, f'{{"drafts": {draft.to_json(drafts)}}}')

    def choose(self, rollout: int, chosen: Chosen) -> None:
        self._line(rollout, json.dumps({"chosen": chosen}))

    def forget(self, before: int) -> None:
        """Rollouts that no checkpoint asks for any more."""
        for suffix in (EPISODES, SCORES):
            for path in self._folder.glob(f"*{suffix}"):
                if int(path.name.removesuffix(suffix)) < before:
                    path.unlink()

    def scores(self, rollout: int) -> list[Scores] | None:
        """Of each of its updates, as `write_scores` was given them; None where there are none."""
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
        self._folder.mkdir(parents=True, exist_ok=True)
        arrays = {f"{i}.{name}": array for i, each in enumerate(scores) for name, array in each.items()}
        text = io.BytesIO()
        np.savez(text, updates=len(scores), **arrays)  # type: ignore[arg-type]
        write_atomic(self._path(rollout, SCORES), text.getvalue())

    def close(self) -> None:
        if self._file:
            self._file.close()
            self._file = None

    def _line(self, rollout: int, line: str) -> None:
        if self._number != rollout or self._file is None:
            self.close()
            self._folder.mkdir(parents=True, exist_ok=True)
            _mend(self._path(rollout))
            self._file, self._number = self._path(rollout).open("a", encoding="utf-8"), rollout
        self._file.write(line + "\n")
        self._file.flush()  # the system has it now, whatever becomes of us

    def _path(self, rollout: int, suffix: str = EPISODES) -> Path:
        return self._folder / f"{rollout:08}{suffix}"


def _mend(path: Path) -> None:
    """Without a last line that a kill cut short: the next would be joined to it."""
    if path.exists() and (text := path.read_bytes()) and not text.endswith(b"\n"):
        path.write_bytes(text[: text.rfind(b"\n") + 1])


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        return json.loads(line) if line.endswith("\n") else None
    except ValueError:
        return None
