"""Reinforcement learning: trainer and sampler in one process, on one set of weights."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax

from dovetail.core.choice import require
from dovetail.core.errors import UserError
from dovetail.core.fingerprint import fingerprint
from dovetail.core.reporter import Reporter
from dovetail.io.tokenizer import Tokenizer
from dovetail.train.launch import Ended, launch
from dovetail.train.objective import Objective
from dovetail.train.prepare import Ready
from dovetail.train.rows import Opened
from dovetail.tune.rl.actor import Actor
from dovetail.tune.rl.advantages import Advantage
from dovetail.tune.rl.algorithms import ALGORITHMS, LOSS_SETTINGS, loss_of
from dovetail.tune.rl.completions import Completions
from dovetail.tune.rl.environment_factory import EnvironmentFactory
from dovetail.tune.rl.environment_runner import EnvironmentRunner
from dovetail.tune.rl.exam import Examiner
from dovetail.tune.rl.failures import Failures
from dovetail.tune.rl.journal import Journal
from dovetail.tune.rl.lessons import Lessons
from dovetail.tune.rl.losses import PolicyLoss
from dovetail.tune.rl.objective import rl_objective
from dovetail.tune.rl.player import Reply
from dovetail.tune.rl.referee import Referee
from dovetail.tune.rl.rewards.pool import Rewards
from dovetail.tune.rl.rewards.reward import reward_of
from dovetail.tune.rl.rewards.user_code import ImportedFunction, identity
from dovetail.tune.rl.rollouts import Rollouts
from dovetail.tune.rl.settings import Rl
from dovetail.tune.rl.task import Task, Tasks, open_tasks
from dovetail.tune.rl.tool_grammars import ToolGrammars
from dovetail.tune.run import given_settings, tokenizer_of


@dataclass(frozen=True)
class Own:
    """What a program brings that no recipe can say."""

    rewards: Sequence[Any] = ()  # functions, beside those of the recipe
    environment: Any = None  # a class, or a function that makes one
    advantage: Advantage | None = None
    loss: PolicyLoss | None = None

    def check(self, settings: Rl) -> None:
        """Refuse settings of what a function of the program replaces."""
        usual = ALGORITHMS[settings.algo]
        replaced = {"advantage": ("advantage", "scale_rewards") if self.advantage else ()}
        replaced |= {"policy_loss": ("policy", *LOSS_SETTINGS) if self.loss else ()}
        for own, names in replaced.items():
            for name in names:
                value = getattr(settings.loss, name)
                require(
                    value in (None, getattr(usual, name), getattr(loss_of(usual), name, None)),
                    f"loss.{name}={value} is not read where dt.rl is given a function as `{own}`: leave one out",
                )


def rl(
    recipe: str | Path | Rl | None = None,
    *,
    data: Any = None,
    rewards: Sequence[Any] = (),
    environment: Any = None,
    advantage: Advantage | None = None,
    policy_loss: PolicyLoss | None = None,
    run_dir: str | Path = "",
    show: bool = True,
    **overrides: Any,
) -> Ended:
    """Teach a model by rewards of what it writes itself.

        dt.rl(model="smollm2-135m", data="prompts.jsonl", rewards=[my_reward], algo="grpo", group_size=8, steps=100)

    data: records with a `prompt` (text or messages); their other columns go to the rewards. rewards: functions
    reward(prompts, completions, **columns) -> list[float | None], or what a recipe's `rewards` holds; a completion is
    text where its prompt is, and else messages. environment: see tune.rl.environment. advantage, policy_loss:
    functions in place of the algorithm's (tune.rl.advantages, .losses). All else is as dt.sft has it.
    """
    settings, records, folder = given_settings(Rl, recipe, data, run_dir, overrides)
    own = Own(rewards, environment, advantage, policy_loss)
    return rl_settings(settings, folder, own, records=records, reporter=Reporter(show))


def rl_settings(
    settings: Rl,
    folder: Path,
    own: Own = Own(),
    *,
    records: list[Any] | None = None,
    reporter: Reporter | None = None,
    **how: Any,
) -> Ended:
    """Run the settings in `folder`. `records`: a program's own; for `how` see train.launch."""
    own.check(settings)
    reporter = reporter or Reporter()
    data = _Data(records, reporter, own)
    with ExitStack() as stack:
        open_rows = partial(_open_rows, folder=folder, own=own, data=data, reporter=reporter, stack=stack)
        objective = partial(_objective, own=own)
        return launch(settings, folder, objective, open_rows, settle=data.settle, reporter=reporter, **how)


def _objective(settings: Rl, own: Own) -> Objective:
    return rl_objective(settings, own.loss)


class _Data:
    """The prompts, read once."""

    def __init__(self, records: list[Any] | None, reporter: Reporter, own: Own):
        self._records, self._reporter, self._own, self._read = records, reporter, own, None

    def settle(self, settings: Rl) -> Rl:
        if jax.process_count() > 1:
            raise UserError(
                "dovetail rl runs in one process, with as many devices as that has: start one, without the environment "
                "of several"
            )
        devices = max(1, jax.device_count() - settings.spare_devices)
        return settings.with_steps(len(self.read(settings)[0].tasks)).filled(devices)

    def read(self, settings: Rl) -> tuple[Tasks, list[Task], int]:
        if self._read is None:
            tokenizer, made = tokenizer_of(settings), self._own.environment or settings.environment
            scene = EnvironmentFactory.from_settings(made, settings, tokenizer) if made else None
            with self._reporter.progress() as progress:
                self._read = open_tasks(settings.data, tokenizer, settings.max_prompt, self._records, progress, scene)
        return self._read


def _open_rows(
    settings: Rl,
    ready: Ready,
    *,
    folder: Path,
    own: Own,
    data: _Data,
    reporter: Reporter,
    stack: ExitStack,
) -> Opened:
    tokenizer = tokenizer_of(settings)
    tasks, held, long = data.read(settings)
    left_out = f", {long:,} longer than max_prompt={settings.max_prompt} left out" if long else ""
    reporter.line(f"{len(tasks.tasks):,} prompts, {len(held):,} held out{left_out}")
    columns = {name for task in tasks.tasks for name in task.columns}
    failures = Failures(reporter.line)
    reply = _reply(settings, own, tokenizer, (*tasks.tasks, *held), failures)
    rewards = _rewards(settings, own, columns, has_environment=reply is not None)
    referee = Referee(stack.enter_context(rewards) if rewards else None, failures)
    actor = Actor(settings, ready, tokenizer)
    everyone = {task.number: task for task in (*tasks.tasks, *held)}
    shown = Completions(folder, settings, everyone)
    calls = ToolGrammars.from_settings(settings, tokenizer, ready.cfg, everyone.values())
    grammar = calls.grammar if calls else None
    lessons = Lessons(settings, ready, own.advantage, calls)
    inputs = _inputs(settings, own, (*tasks.tasks, *held), rewards)
    journal = Journal(folder / "rollouts", fingerprint(inputs, settings.rollouts_key))
    rollouts = Rollouts(settings, tasks, actor, referee, lessons, journal, shown, reply, grammar)
    stack.callback(rollouts.close)
    exam = Examiner(settings, held, actor, referee, reply, grammar) if held and settings.eval.every else None
    return Opened(rollouts, None, tokenizer, exam, inputs=inputs)


def _inputs(settings: Rl, own: Own, tasks: Sequence[Task], rewards: Rewards | None) -> dict[str, str]:
    """Return fingerprints of what the run reads: see train.inputs."""
    where = ", ".join(source.path for source in settings.data.all_sources) or "of this program"
    found = {f"data {where}": fingerprint([(task.tokens, task.columns) for task in tasks])}
    for reward in rewards.rewards if rewards else ():
        found[f"the reward {reward.name!r}"] = reward.fingerprint
    if made := own.environment or settings.environment:
        code = ImportedFunction.parse(made) if isinstance(made, str) else made
        found["the environment"] = fingerprint(identity(code))
    for name, function in (("advantage", own.advantage), ("policy_loss", own.loss)):
        found |= {f"the function {name}": fingerprint(identity(function))} if function else {}
    return found


def _rewards(settings: Rl, own: Own, columns: set[str], has_environment: bool) -> Rewards | None:
    given = [reward_of(each, columns) for each in (*settings.rewards, *own.rewards)]
    if given:
        return Rewards(given, seconds=settings.reward_seconds)
    if not (has_environment or settings.is_taught):
        raise UserError(
            "rewards must say what is good: a function of your program (dt.rl(rewards=[...])), or in a recipe such as "
            "rewards: [{kind: number, column: answer}]; there is none"
        )
    if settings.reward_seconds != Rl.reward_seconds:
        raise UserError("reward_seconds is what rewards may take, and there are none: leave it out")
    return None


def _reply(settings: Rl, own: Own, tokenizer: Tokenizer, tasks: Sequence[Task], failures: Failures) -> Reply | None:
    made = own.environment or settings.environment
    if not made:
        return None
    return EnvironmentRunner.from_settings(made, settings, tokenizer, tasks, failures).reply
