"""README.md and docs/*.md: every YAML block is a recipe that loads, every command and snippet one that exists.

What they do is for tests/docs/test_docs_run.py, at a small size.
"""

import ast
import inspect
import json
import re
import tomllib
from dataclasses import fields

import pytest
from docs.blocks import PAGES, ROOT, SHELL, blocks, commands, spans
from docs.runs import PREAMBLES, as_module, category
from docs.typed import (
    PLACEHOLDERS,
    TRAININGS,
    application,
    mentioned,
    name_files,
    parse,
    record_trainings,
    routes,
    write_recipe,
)

from dovetail.core.types import Batch

ALL_PAGES = (*PAGES, "CHANGELOG.md", "CONTRIBUTING.md")
LANGUAGES = {*SHELL, "yaml", "python", "mermaid", ""}  # the last: output, drawings


@pytest.mark.parametrize("page", PAGES)
def test_blocks_are_in_a_language_that_is_tested(page):
    assert {block.language for block in blocks(page)} <= LANGUAGES


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "yaml")])
def test_yaml_blocks_load(page, tmp_path):
    from dovetail.cli.train import settings_class
    from dovetail.core import recipe
    from dovetail.jobs import spec

    for block in blocks(page, "yaml"):
        kind = write_recipe(block, tmp_path / "block.yaml")
        name = str(tmp_path / "block.yaml")
        spec.load(name, []) if kind == "job" else recipe.load(name, [], settings_class(kind))


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)])
def test_commands_exist(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name_files(page, tmp_path)
    started = record_trainings(monkeypatch)
    for command in commands(page):
        category(command)  # it runs in test_docs_run, or a reason is listed
        try:
            CHECKS[command.words[0]](list(command.words[1:]), started)
        except BaseException as error:
            raise AssertionError(f"{command.where}: {command.text}: {error}") from error


def dovetail(words, started):
    """Parse the words; of a training, a job and a compilation, read what they name too."""
    words = [PLACEHOLDERS.get(word, word) for word in words]
    path, given = parse(words)
    if path[0] in TRAININGS:
        before = len(started)
        starts = 0 if given.get("show_config") else 1
        assert not application()([*words, "--quiet"], standalone_mode=False) and len(started) == before + starts
    elif path == ["job", "create"] and "error" not in SHOWN.get(tuple(words), ""):
        from dovetail.cli.job_create import read_spec

        read_spec(given["spec"])
    elif path == ["compile", "recipe"]:
        from dovetail.core.recipe import load
        from dovetail.train.settings import Pretrain

        load(given["recipe"], list(given["overrides"] or ()), Pretrain)


SHOWN = {command.words[1:]: " ".join(command.output) for page in PAGES for command in commands(page)}


def python(words, started):
    """Find the script and its options, or the tests that pytest is to run."""
    if words[:2] == ["-m", "pytest"]:
        files = [word for word in words if word.endswith(".py")]
        assert files and all((ROOT / file).is_file() for file in files)
        return
    source = (ROOT / words[0]).read_text()
    for word in words[1:]:
        assert not word.startswith("--") or f'"{word}"' in source, f"{words[0]} has no option {word}"


def make(words, started):
    assert all(re.search(rf"^{word}:", (ROOT / "Makefile").read_text(), re.MULTILINE) for word in words)


def pip(words, started):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for group in re.findall(r"\[(.*?)\]", " ".join(words)):
        assert set(group.split(",")) <= set(extras)


def curl(words, started):
    """The server has the route, and what is sent is JSON."""
    assert re.sub(r"^[^/]+(:\d+)?(?=/)", "", words[0].removeprefix("http://")) in routes()
    json.loads(words[words.index("-d") + 1])


CHECKS = {
    name: check for name, check in list(globals().items()) if name in ("dovetail", "python", "make", "pip", "curl")
}
CHECKS |= dict.fromkeys(("export", "mkdir", "chgrp", "chmod"), lambda words, started: None)


@pytest.mark.parametrize("page", [page for page in PAGES if spans(page)])
def test_commands_in_sentences_exist(page):
    for where, text in spans(page):
        path, unknown = mentioned(text)
        assert not unknown, f"{where}: `{text}`: {path} has no option {', '.join(unknown)}"


@pytest.mark.parametrize("page", ALL_PAGES)
def test_named_files_and_links_exist(page):
    """Paths of Python files in code spans, from the root or from dovetail/; links to pages, with their headings."""
    text = (ROOT / page).read_text()
    paths = re.findall(r"`([\w./-]+/[\w-]+\.py)`", text)
    assert not [path for path in paths if not any((ROOT / base / path).is_file() for base in ("", "dovetail"))]
    for target, heading in re.findall(r"\]\(([\w./-]*)(?:#([^)]*))?\)", text):
        file = (ROOT / page).parent / target if target else ROOT / page
        assert file.is_file(), f"{page}: no file {target}"
        assert not heading or heading in headings(file.read_text()), f"{page}: {target} has no heading {heading}"


def headings(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub names them."""
    lines = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


# --- Python -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_snippets_call_what_exists(page):
    """They compile; what they import is there, and takes the arguments that they give it."""
    names: dict = {}
    exec(PREAMBLES.get(page, {}).get("imports", ""), names)
    for block in blocks(page, "python"):
        tree = ast.parse(as_module(block))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                exec(compile(ast.Module([node], []), block.where, "exec"), names)
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            _check_call(call, names, block.where)


def _check_call(call, names, where):
    target = _named(call.func, names)
    if target is None or not callable(target) or not call.keywords:
        return
    takes = inspect.signature(target).parameters
    free = any(each.kind is each.VAR_KEYWORD for each in takes.values())
    if free and not target.__module__.startswith("dovetail"):
        return
    known = set(takes) | (_free_names(target) if free else set())
    for word in (keyword.arg for keyword in call.keywords if keyword.arg):
        assert word in known, f"{where}: {ast.unparse(call.func)} takes no {word}"


def _named(node, names):
    """Return the object that a dotted name means; None where it is not imported."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute) and (of := _named(node.value, names)) is not None:
        return getattr(of, node.attr)
    return None


def _free_names(target):
    """Return the names that a function with **options takes: fields of the settings that they become."""
    from dovetail.cli.train import settings_class
    from dovetail.engine.options import EngineOptions
    from dovetail.jobs.spec import Spec
    from dovetail.models.config import ModelConfig

    name = target.__name__
    if name in TRAININGS:
        cls = settings_class(name)
    else:
        cls = {"LLM": EngineOptions, "remote": Spec, "finish": ModelConfig, "replace": Batch}[name]
    return {field.name for field in fields(cls)}
