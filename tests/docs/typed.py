"""Read what the documentation types: `dovetail` commands by the real application, YAML blocks by the real loader."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from docs.blocks import ROOT, Block, blocks
from typer.main import get_command

from dovetail.cli.main import app
from dovetail.core import yaml_text
from dovetail.train.launch import Ended

TRAININGS = ("pretrain", "sft", "dpo", "reward", "distill", "rl", "draft")
# The kind of a page's YAML blocks, where no key of a block tells it.
USUAL = {
    "docs/data.md": "pretrain",
    "docs/pretraining.md": "pretrain",
    "docs/jobs.md": "job",
    "docs/rl.md": "rl",
    "docs/speculation.md": "rl",
    "docs/torch.md": "pretrain",
}
USUAL["docs/finetuning.md"] = "sft"
TELLING = {
    "preference": "dpo",
    "reward": "reward",
    "teacher": "distill",
    "rewards": "rl",
    "algo": "rl",
    "backend": "job",
}
# What stands for something of the reader's.
PLACEHOLDERS = {"RECIPE": "tiny"}


@functools.cache  # typer makes hundreds of options each time
def application() -> Any:
    """Return the `dovetail` command."""
    return get_command(app)


def parse(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Return the command's path (`job`, `create`) and its parameters; a usage error where one does not exist."""
    context, path = application().make_context("dovetail", list(words)), []
    while hasattr(context.command, "resolve_command"):
        left = [*context._protected_args, *context.args]
        if not left:
            break
        name, command, left = context.command.resolve_command(context, left)
        path.append(name)
        context = command.make_context(name, left, parent=context)
    return path, context.params


def mentioned(text: str) -> tuple[str, list[str]]:
    """Return the command that a code span names, and the options in it that the command does not have."""
    words = re.sub(r"[\[\]]|\.\.\.|[>&|].*", " ", text).split()[1:]
    command, path = application(), "dovetail"
    while words and hasattr(command, "resolve_command") and not words[0].startswith("-"):
        context = command.make_context(path, words, resilient_parsing=True)
        name, *words = [*context._protected_args, *context.args]
        command, path = command.commands[name], f"{path} {name}"
    options = [word.partition("=")[0] for word in words if word.startswith("-") and word != "-"]
    known = {name for param in command.params for name in (*param.opts, *param.secondary_opts)} | {"--help", "-h"}
    return path, [option for option in options if option not in known]


def kind_of(block: Block) -> str:
    """Return what a YAML block is for: a training, or `job`."""
    keys = yaml_text.parse(block.text)
    if block.page not in USUAL and not any(key in TELLING for key in keys):
        raise AssertionError(f"{block.where}: say in tests/docs/typed.py what this block is for")
    return next((kind for key, kind in TELLING.items() if key in keys), USUAL.get(block.page, ""))


def write_recipe(block: Block, path: Path, model: str = "smollm2-135m") -> str:
    """Write a YAML block as a file; where it is a part of a recipe, over a base that has the rest. Return its kind."""
    kind, keys, text = kind_of(block), yaml_text.parse(block.text), block.text
    if kind == "pretrain" and not {"model", "base"} & set(keys):
        text = f"base: tiny\n{text}"
    elif kind != "job" and not {"model", "base"} & set(keys):
        rest = {"model": model, "steps": 1, "data": {"path": "chats.jsonl"}}
        if kind == "rl":
            rest |= {"data": {"path": "sums.jsonl"}, "rewards": [{"kind": "number", "column": "answer"}]}
        missing = {key: value for key, value in rest.items() if key not in keys}
        (path.parent / "rest.yaml").write_text(yaml_text.write(missing))
        text = f"base: rest.yaml\n{text}"
    path.write_text(text)
    return kind


def name_files(page: str, folder: Path) -> None:
    """Write a page's YAML blocks under the names by which its commands call them: a comment at the top, or any."""
    for block in reversed(blocks(page, "yaml")):
        named = re.match(r"# (\S+\.yaml)\n", block.text)
        for name in [named[1]] if named else ("my.yaml", "recipe.yaml", "job.yaml"):
            write_recipe(block, folder / name)


def record_trainings(monkeypatch: Any) -> list[tuple[Any, Path]]:
    """Let trainings end before they begin; return the list to which each adds its settings and folder."""
    started: list[tuple[Any, Path]] = []

    def run(settings: Any, folder: Path, *_: Any, **how: Any) -> Ended:
        started.append((settings, folder))
        return Ended(0, folder, settings.steps, {"loss": 1.0, "token_accuracy": 1.0})

    # drafters first: their module imports tune_settings by name, and would keep the one that is set here
    places = ("tune.draft.draft.draft_settings", "tune.run.tune_settings", "tune.rl.rl.rl_settings")
    for place in (*places, "train.pretrain.pretrain_settings"):
        monkeypatch.setattr(f"dovetail.{place}", run)
    return started


def routes() -> set[str]:
    """Return the paths that a server answers."""
    sources = "".join(path.read_text() for path in (ROOT / "dovetail" / "serve").rglob("*.py"))
    return set(re.findall(r'"(/[\w/{}.-]+)"', sources))
