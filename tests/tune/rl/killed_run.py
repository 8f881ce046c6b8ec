"""Run a small RL recipe once without a kill, and once killed in every part and resumed.

Usage: python killed_run.py FOLDER SCENARIO. It prints the exit code of each process. The processes are forked from one
that has imported everything and computed nothing: importing takes longer than such a run.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

Kill = tuple[str, int]  # (part of a step, number of the step)


class Scenario(NamedTuple):
    steps: int
    kills: tuple[Kill, ...]
    recipe: dict[str, Any]


SCENARIOS = {
    "one update": Scenario(
        5, (("rollout", 2), ("reward", 3), ("train", 4), ("sync", 5)),
        {
            "checkpoint": {"every": 2}, "prompts": 2, "num_generations": 4, "max_completion_length": 6,
            "engine": {"max_num_seqs": 2},
        },
    ),
    # rollouts of four updates, two passes of two; each update is accumulated in two parts, with a checkpoint after it
    "several passes": Scenario(
        8, (("train", 2), ("train", 4), ("reward", 5), ("train", 7)),
        {
            "algo": "ppo", "critic": {"kl_coef": 0.01}, "checkpoint": {"every": 1}, "prompts": 2, "num_generations": 4,
            "max_completion_length": 6, "updates": 2, "num_iterations": 2, "accumulate": 2,
        },
    ),
    # a kill within a rollout loses the drafter's past outputs; the next process drafts from other ones
    "speculation": Scenario(
        4, (("rollout", 2), ("rollout", 3), ("sync", 4)),
        {
            "checkpoint": {"every": 2}, "prompts": 2, "num_generations": 4, "max_completion_length": 16,
            "speculation": {"kind": "suffix", "num_speculative_tokens": 3, "refresh": 1},
        },
    ),
    # the drafter is trained after every rollout, and is part of each checkpoint
    "drafter": Scenario(
        4, (("rollout", 2), ("train", 3), ("sync", 4)),
        {
            "checkpoint": {"every": 2}, "prompts": 2, "num_generations": 4, "max_completion_length": 16,
            "speculation": {"kind": "dspark", "num_speculative_tokens": 3, "refresh": 1, "updates": 2},
        },
    ),
}  # fmt: skip


def die_in(cls: type, method: str, when: Callable[..., bool]) -> None:
    """Kill this process with SIGKILL when the method is called and `when` holds."""
    own: Any = getattr(cls, method)

    def killed(self: Any, *args: Any) -> Any:
        if when(self, *args):
            os.kill(os.getpid(), signal.SIGKILL)
        return own(self, *args)

    setattr(cls, method, killed)


def prepare(where: str, step: int) -> None:
    """Arrange the kill in the rollout, the rewards, the update or the publishing of weights of a step."""
    from dovetail.train.loop import Loop
    from dovetail.tune.rl import partial_turns
    from dovetail.tune.rl.episode_runner import EpisodeRunner
    from dovetail.tune.rl.reward_assigner import RewardAssigner
    from dovetail.tune.rl.sampler import PolicySampler

    seen = []
    match where:
        case "rollout":  # within a group; its completions so far are in the journal
            partial_turns.WRITE_SECONDS, partial_turns.MAX_SHARE = 0.0, float("inf")
            die_in(
                EpisodeRunner,
                "append_turn",
                lambda self, episode, _: episode.version == step - 1 and (seen.append(1) or len(seen) > 5),
            )
        case "reward":
            die_in(RewardAssigner, "assign", lambda self, episodes, _: episodes[0].version == step - 1)
        case "train":
            die_in(Loop, "_look", lambda self, launched: launched.step == step)
        case "sync":
            die_in(PolicySampler, "publish", lambda self, params, version, *_: version == step - 1)


def always_speculate() -> None:
    """Speculate at every step, and wait for the compiler, so that it does not depend on the machine's speed."""
    from dovetail.engine.device.runner import Runner
    from dovetail.engine.spec.draft_length import DraftLength

    def ready(self: Any, rows: int, drafts: int) -> bool:
        self.steps.all([self.buckets.verify(rows, drafts)])
        return True

    Runner.drafts_ready = ready  # type: ignore[method-assign]
    DraftLength.choose = lambda self, rows: self.choices[-1]  # type: ignore[method-assign]


def train(place: Path, scenario: Scenario, name: str, kill: Kill | None) -> None:
    from tune.rl.small_runs import run
    from tune.small_models import model_folder

    if kill:
        prepare(*kill)
    if "speculation" in scenario.recipe:
        always_speculate()
    model_folder(place, num_hidden_layers=1)
    sys.exit(run(place, name=name, steps=scenario.steps, **scenario.recipe).code)


def exit_code(*given: Any) -> int | None:
    process = multiprocessing.get_context("fork").Process(target=train, args=given)
    process.start()
    process.join()
    return process.exitcode


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    import tune.rl.small_runs  # noqa: F401

    from dovetail.ops.dispatch import import_kernels

    import_kernels("cpu")  # numba takes two seconds more
    warnings.filterwarnings("ignore", "os.fork")  # no thread runs yet
    place, scenario = Path(sys.argv[1]), SCENARIOS[sys.argv[2]]
    runs = [("straight", None), *(("killed", kill) for kill in scenario.kills), ("killed", None)]
    print(json.dumps([exit_code(place, scenario, *each) for each in runs]))
