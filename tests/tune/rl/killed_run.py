"""A small run of reinforcement learning that kills itself: python killed_run.py PLACE NAME [WHERE STEP]"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def die_in(cls: type, method: str, when: Callable[..., bool]) -> None:
    """With -9, as the method is called so."""
    own: Any = getattr(cls, method)

    def killed(self: Any, *args: Any) -> Any:
        if when(self, *args):
            os.kill(os.getpid(), signal.SIGKILL)
        return own(self, *args)

    setattr(cls, method, killed)


def prepare(where: str, step: int) -> None:
    """`step`: whose rollout, rewards, update or weights are never whole."""
    from dovetail.train.loop import Loop
    from dovetail.tune.rl.actor import Actor
    from dovetail.tune.rl.player import Player
    from dovetail.tune.rl.referee import Referee

    seen = []
    match where:
        case "rollout":  # amid a group
            die_in(
                Player,
                "take",
                lambda self, episode, _: episode.version == step - 1 and (seen.append(1) or len(seen) > 5),
            )
        case "reward":
            die_in(Referee, "end", lambda self, episodes, _: episodes[0].version == step - 1)
        case "train":
            die_in(Loop, "_look", lambda self, launched: launched.step == step)
        case "sync":
            die_in(Actor, "publish", lambda self, params, version: version == step - 1)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from tune.rl.small_runs import run

    place, name, *kill = sys.argv[1:]
    if kill:
        prepare(kill[0], int(kill[1]))
    sys.exit(run(Path(place), name=name, steps=7, checkpoint={"every": 3}).code)
