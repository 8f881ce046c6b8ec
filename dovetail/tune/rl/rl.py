"""Reinforcement learning: trainer and sampler in one process, on one set of weights."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from dovetail.core.choice import require
from dovetail.core.errors import RecipeError, UnsupportedError
from dovetail.core.fingerprint import fingerprint
from dovetail.core.imported import ImportedFunction
from dovetail.core.reporter import Reporter
from dovetail.io.images.processor import ImageProcessor
from dovetail.io.tokenizer import Tokenizer
from dovetail.train.launch import Ended, launch
from dovetail.train.objective import Objective
from dovetail.train.prepare import Ready
from dovetail.train.rows import Opened
from dovetail.tune.policy import with_teacher_cfg
from dovetail.tune.rl.advantages import Advantage
from dovetail.tune.rl.algorithms import ALGORITHMS, LOSS_SETTINGS, policy_loss_of
from dovetail.tune.rl.batches import BatchBuilder
from dovetail.tune.rl.completions import Completions
from dovetail.tune.rl.drafter import PolicyDrafter
from dovetail.tune.rl.environment_factory import EnvironmentFactory
from dovetail.tune.rl.environment_runner import EnvironmentRunner
from dovetail.tune.rl.episode_runner import Reply
from dovetail.tune.rl.evaluation import Evaluator
from dovetail.tune.rl.failures import Failures
from dovetail.tune.rl.images import RolloutImages, max_items, max_patches
from dovetail.tune.rl.journal import Journal
from dovetail.tune.rl.losses import PolicyLoss
from dovetail.tune.rl.objective import rl_objective
from dovetail.tune.rl.prompts import PromptRecord, PromptSet, open_prompts
from dovetail.tune.rl.reward_assigner import RewardAssigner
from dovetail.tune.rl.rewards.pool import Rewards
from dovetail.tune.rl.rewards.reward import reward_of
from dovetail.tune.rl.rewards.user_code import identity
from dovetail.tune.rl.rollouts import RolloutParts, Rollouts
from dovetail.tune.rl.sampler import PolicySampler
from dovetail.tune.rl.settings import Rl, rl_rows_key
from dovetail.tune.rl.tool_grammars import ToolGrammars
from dovetail.tune.run import given_settings, tokenizer_of, vision_of


@dataclass(frozen=True)
class RlFunctions:
    """Functions and classes of a program, which a recipe cannot hold."""

    rewards: Sequence[Any] = ()  # functions, besides those of the recipe
    environment: Any = None  # a class, or a function that makes an environment
    advantage: Advantage | None = None
    policy_loss: PolicyLoss | None = None

    def check(self, settings: Rl) -> None:
        """Refuse settings of what a function of the program replaces."""
        usual = ALGORITHMS[settings.algo]
        replaced = {"advantage": ("advantage", "scale_rewards") if self.advantage else ()}
        replaced |= {"policy_loss": ("policy_loss", *LOSS_SETTINGS) if self.policy_loss else ()}
        for function, names in replaced.items():
            for name in names:
                value = getattr(settings.loss, name)
                require(
                    value in (None, getattr(usual, name), getattr(policy_loss_of(usual), name, None)),
                    f"loss.{name} is not read where dt.rl is given a function as `{function}`, got {value}: leave one "
                    "out",
                    param=f"loss.{name}",
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
    """Train a model by RL on rewards for its own completions.

        dt.rl(model="smollm2-135m", data="prompts.jsonl", rewards=[my_reward], num_generations=8, steps=100)

    Args:
        recipe: A shipped name, a path, or settings.
        data: Records with a `prompt` (text or messages), or a path; the other columns are given to the rewards.
        rewards: Functions reward(prompts, completions, **columns) -> list[float | None], or entries of a recipe's
            `rewards`. A completion is text where its prompt is text, else messages.
        environment: A class or a function that makes an environment, for agents: see tune.rl.environment.
        advantage: A function in place of the algorithm's: see tune.rl.advantages.
        policy_loss: A function in place of the algorithm's: see tune.rl.losses.
        run_dir: The folder of the run.
        show: Print progress and tables.
        overrides: Keys of the recipe.

    Returns:
        How the run ended, and its folder.

    Raises:
        RecipeError: A key or its value is not valid; `param` names it.
    """
    settings, records, folder = given_settings(Rl, recipe, data, run_dir, overrides)
    functions = RlFunctions(rewards, environment, advantage, policy_loss)
    return rl_settings(settings, folder, functions, records=records, reporter=Reporter(show))


def rl_settings(
    settings: Rl,
    folder: Path,
    functions: RlFunctions = RlFunctions(),
    *,
    records: list[Any] | None = None,
    reporter: Reporter | None = None,
    **how: Any,
) -> Ended:
    """Run the settings in `folder`.

    Args:
        settings: The recipe.
        folder: The folder of the run.
        functions: Functions of the program.
        records: Records of the program, in place of the recipe's data.
        reporter: Prints progress.
        how: Further arguments of train.launch.launch.
    """
    functions.check(settings)
    reporter = reporter or Reporter()
    data = _Data(records, reporter, functions)
    with ExitStack() as stack:
        open_rows = partial(_open_rows, folder=folder, functions=functions, data=data, reporter=reporter, stack=stack)
        objective = partial(_objective, functions=functions)
        return launch(settings, folder, objective, open_rows, settle=data.settle, reporter=reporter, **how)


def _objective(settings: Rl, functions: RlFunctions) -> Objective:
    return rl_objective(settings, functions.policy_loss)


class _Data:
    """Read the prompts once."""

    def __init__(self, records: list[Any] | None, reporter: Reporter, functions: RlFunctions):
        self._records, self._reporter, self._functions, self._read = records, reporter, functions, None

    def settle(self, settings: Rl) -> Rl:
        if jax.process_count() > 1:
            raise UnsupportedError(
                f"dovetail rl runs in one process with all of its devices, got {jax.process_count()} processes: start "
                "one process"
            )
        devices = max(1, jax.device_count() - settings.spare_devices)
        prompts, held_out, _ = self.read(settings)
        settings = settings.with_steps(len(prompts.records)).filled(devices)
        records = (*prompts.records, *held_out)
        shown = replace(settings, image_patches=max_patches(records), image_items=max_items(records))
        return with_teacher_cfg(shown)

    def read(self, settings: Rl) -> tuple[PromptSet, list[PromptRecord], int]:
        if self._read is None:
            tokenizer, made = tokenizer_of(settings), self._functions.environment or settings.environment
            vision = vision_of(settings)
            processor = vision and vision[0]
            environments = EnvironmentFactory.from_settings(made, settings, tokenizer, processor) if made else None
            with self._reporter.progress() as progress:
                self._read = open_prompts(
                    settings.data, tokenizer, settings.max_prompt_length, self._records, progress,
                    environments, processor,
                )  # fmt: skip
        return self._read


def _open_rows(
    settings: Rl,
    ready: Ready,
    *,
    folder: Path,
    functions: RlFunctions,
    data: _Data,
    reporter: Reporter,
    stack: ExitStack,
) -> Opened:
    tokenizer = tokenizer_of(settings)
    prompts, held_out, too_long = data.read(settings)
    left_out = f", {too_long:,} longer than max_prompt_length={settings.max_prompt_length} left out" if too_long else ""
    reporter.line(f"{len(prompts.records):,} prompts, {len(held_out):,} held out{left_out}")
    everything = {record.index: record for record in (*prompts.records, *held_out)}
    failures = Failures(reporter.line)
    vision = vision_of(settings)
    reply = _reply(settings, functions, tokenizer, [*everything.values()], failures, vision and vision[0])
    columns = {name for record in prompts.records for name in record.columns}
    pool = _reward_pool(settings, functions, columns, has_environment=reply is not None)
    rewards = RewardAssigner(stack.enter_context(pool) if pool else None, tokenizer, failures)
    drafter = PolicyDrafter(settings, ready) if ready.objective.companion else None
    sampler = PolicySampler(settings, ready, tokenizer, drafter.model if drafter else None)
    calls = ToolGrammars.from_settings(settings, tokenizer, ready.cfg, everything.values())
    grammar = calls.grammar if calls else None
    images = RolloutImages(*vision, everything.values()) if vision else None
    builder = BatchBuilder(settings, ready, functions.advantage, calls, images)
    inputs = _inputs(settings, functions, (*prompts.records, *held_out), pool)
    journal = Journal(folder / "rollouts", fingerprint(inputs, settings.rollouts_key))
    parts = RolloutParts(settings, prompts, sampler, rewards, builder, journal, reply, grammar, drafter, images)
    rollouts = Rollouts(parts, Completions(folder, settings, everything))
    stack.callback(rollouts.close)
    evaluates = bool(held_out) and settings.eval.every > 0
    evaluator = Evaluator(settings, held_out, sampler, rewards, reply, grammar, images) if evaluates else None
    return Opened(rollouts, None, tokenizer, evaluator, inputs=inputs, rows_key=rl_rows_key)


def _inputs(
    settings: Rl, functions: RlFunctions, records: Sequence[PromptRecord], pool: Rewards | None
) -> dict[str, str]:
    """Return fingerprints of the inputs of a run: see train.saves."""
    where = ", ".join(source.path for source in settings.data.all_sources) or "of this program"
    files = [image.file for record in records for image in record.images]
    found = {f"data {where}": fingerprint([(record.tokens, record.columns) for record in records], *files)}
    for reward in pool.rewards if pool else ():
        found[f"the reward {reward.name!r}"] = reward.fingerprint
    if made := functions.environment or settings.environment:
        found["the environment"] = fingerprint(
            identity(ImportedFunction.parse(made) if isinstance(made, str) else made)
        )
    for name in ("advantage", "policy_loss"):
        if function := getattr(functions, name):
            found[f"the function {name}"] = fingerprint(identity(function))
    return found


def _reward_pool(settings: Rl, functions: RlFunctions, columns: set[str], has_environment: bool) -> Rewards | None:
    given = [reward_of(each, columns) for each in (*settings.rewards, *functions.rewards)]
    if given:
        return Rewards(given, seconds=settings.reward_timeout)
    if not (has_environment or settings.has_teacher):
        raise RecipeError(
            "rewards must have at least one reward, got none: give a function (dt.rl(rewards=[...])), or in a recipe "
            "rewards: [{kind: number, column: answer}]",
            param="rewards",
        )
    if settings.reward_timeout != Rl.reward_timeout:
        raise RecipeError(
            f"reward_timeout is not read without rewards, got {settings.reward_timeout}: leave it out",
            param="reward_timeout",
        )
    return None


def _reply(
    settings: Rl,
    functions: RlFunctions,
    tokenizer: Tokenizer,
    records: Sequence[PromptRecord],
    failures: Failures,
    processor: ImageProcessor | None,
) -> Reply | None:
    made = functions.environment or settings.environment
    if not made:
        return None
    return EnvironmentRunner.from_settings(made, settings, tokenizer, records, failures, processor).reply
