"""The design's arrows, as a test: who may import whom, what each room may need, and how long a file may be."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

GROUND = {"core", "ops", "models", "io"}
# room -> the rooms it may import. tune/rl and tune/draft are written apart: they are where training and serving meet.
ARROWS = {
    "core": set(),
    "ops": {"core"},
    "models": {"core", "ops"},
    "io": {"core", "ops", "models", "interop"},
    "data": GROUND,
    "train": GROUND | {"data", "plan", "interop"},
    "engine": GROUND | {"plan", "interop"},
    "tune": GROUND | {"data", "plan", "train", "interop"},
    "tune/draft": GROUND | {"data", "plan", "train", "engine", "tune"},
    "tune/rl": GROUND | {"data", "plan", "train", "engine", "tune", "interop"},
    "serve": GROUND | {"engine"},
    "plan": {"core", "models"},
    "doctor": {"core"},
    "jobs": {"core"},  # what of it needs no jax: tests/jobs/test_room.py loads every file
    "interop": {"core", "ops", "models"},
    "web": set(),
}
APART = ("tune/draft", "tune/rl")
# The rooms of serve, from the client to the engine. What lies in serve/ itself is for all of them and imports none.
SERVE_ARROWS = {
    "": set(),
    "remote": set(),
    "media": set(),
    "talk": {"remote", "media"},
    "api": {"media", "talk"},
    "http": {"remote", "media", "talk", "api"},
}
ARROWS["cli"] = {room.partition("/")[0] for room in ARROWS}

# An accelerator's image often has no more than this: rooms in LEAN load with it alone.
LEAN = {"core", "ops", "models", "io", "engine", "train", "tune", "tune/draft", "tune/rl"}
LEAN_PACKAGES = {"jax", "numpy", "ml_dtypes", "optax", "orbax", "safetensors", "tokenizers", "jinja2", "yaml", "rich"}
QUICK_PACKAGES = {"typer", "rich"}  # what `dovetail --help` may wait for
# and these, which import the standard library alone
QUICK_FILES = {
    "engine/options.py", "engine/spec/config.py", "serve/config.py",
    "core/choice.py", "core/errors.py", "core/option.py", "core/reporter.py",
    "core/units.py",
}  # fmt: skip
COMPARED_WITH = {"torch", "transformers"}  # never needed to run
NEVER = {"tensorflow", "tensorflow_datasets", "seqio"}
LONGEST_FILE = 600


@dataclass(frozen=True)
class Import:
    target: str  # dotted, absolute
    line: int
    at_load: bool  # runs when the module is imported: not in a function, not under TYPE_CHECKING


def faults(root: Path) -> list[str]:
    """Every broken rule of the tree below root/dovetail, as 'file:line: what'."""
    found = []
    for path in sorted((root / "dovetail").rglob("*.py")):
        where = path.relative_to(root / "dovetail")
        for item in imports(path, root):
            found += [f"{path.relative_to(root)}:{item.line}: {what}" for what in broken(where, item)]
    return found


def broken(where: Path, item: Import) -> Iterator[str]:
    """The rules that one import, in the file dovetail/<where>, breaks."""
    room, package = room_of(where), item.target.partition(".")[0]
    if room and room not in ARROWS:
        yield f"{room}/ is not a room of docs/architecture.md"
    elif package == "dovetail":
        yield from broken_arrow(room, item)
        yield from broken_serve_arrow(where, item)
    else:
        yield from broken_dependency(where, room, package, item)


def broken_arrow(room: str, item: Import) -> Iterator[str]:
    parts = item.target.split(".")[1:]
    if not parts:
        if room not in ("", "cli"):
            yield "import the room that is meant, not the whole of dovetail"
        return
    other = parts[0]
    if other.startswith("__"):  # dovetail.__version__
        return
    if room in ("", "cli"):
        if item.at_load and other != "cli" and not is_quick(item.target):
            yield f"{item.target} is imported before a command runs; import it in the function that uses it"
    elif room != other and not (room in APART and other == "tune") and other not in ARROWS[room]:
        yield f"{room} may not import {other} ({item.target})"
    elif room == "tune" and "/".join(parts[:2]) in APART:
        yield f"tune may not import tune.{parts[1]}: {parts[1]} stands on tune"


def is_quick(target: str) -> bool:
    return any(target.startswith(f"dovetail.{file[:-3].replace('/', '.')}") for file in QUICK_FILES)


def broken_serve_arrow(where: Path, item: Import) -> Iterator[str]:
    """An arrow between two rooms of serve; from elsewhere each of them may be imported."""
    if where.parts[0] != "serve":
        return
    room = "/".join(where.parts[1:-1])
    if room not in SERVE_ARROWS:
        yield f"serve/{room} is not a room of docs/architecture.md"
        return
    parts = item.target.split(".")[1:]
    other = parts[1] if parts[:1] == ["serve"] and len(parts) > 1 else ""
    if other in SERVE_ARROWS.keys() - SERVE_ARROWS[room] - {room, ""}:
        yield f"serve/{room} may not import serve/{other} ({item.target})"


def broken_dependency(where: Path, room: str, package: str, item: Import) -> Iterator[str]:
    if package in NEVER:
        yield f"{package} is not used here"
    if package in COMPARED_WITH and room != "interop" and not (room == "cli" and where.name.startswith("bench")):
        yield f"{package} belongs in interop/ and cli/bench*; nothing at run time needs it"
    if room == "jobs" and package in ("jax", "jaxlib"):
        yield "jobs runs where there is no jax"
    if not item.at_load or package in sys.stdlib_module_names:
        return
    if room in ("", "cli") and package not in QUICK_PACKAGES:
        yield f"{package} is imported before a command runs; import it in the function that uses it"
    if package in ("numba", "llvmlite") and where.parts[:3] == ("ops", "kernels", "cpu"):
        return  # loaded only where a CPU computes and numba is there
    if room in LEAN and package not in LEAN_PACKAGES:
        yield f"{package} may be missing on an accelerator's machine; import it in the function that uses it"


def room_of(where: Path) -> str:
    """'' for dovetail/*.py, a room of APART for what is below it, else the first folder."""
    parts = where.parts[:-1]
    return "/".join(parts[:2]) if "/".join(parts[:2]) in APART else (parts[0] if parts else "")


def imports(path: Path, root: Path) -> tuple[Import, ...]:
    return imports_of(path.read_text(), path.relative_to(root).with_suffix("").parts[:-1])


@cache  # three tests read the whole package
def imports_of(source: str, package: tuple[str, ...]) -> tuple[Import, ...]:
    found = []
    for node, at_load in walk(ast.parse(source), True):
        if isinstance(node, ast.Import):
            found += [Import(alias.name, node.lineno, at_load) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from dovetail import ops` names a room only in its alias
            found += [Import(f"{module}.{alias.name}", node.lineno, at_load) for alias in node.names]
    return tuple(found)


def walk(node: ast.AST, at_load: bool) -> Iterator[tuple[ast.AST, bool]]:
    """Every statement below `node`, with whether it runs when the module is imported."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            continue
        deferred = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        deferred |= isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        yield child, at_load
        yield from walk(child, at_load and not deferred)


def circles(root: Path) -> list[str]:
    """Files that import each other, round about or under TYPE_CHECKING: none can be read without the rest."""
    files = {".".join(p.relative_to(root).with_suffix("").parts): p for p in (root / "dovetail").rglob("*.py")}
    arrows = {name: {module_of(i.target, files) for i in imports(p, root)} - {name, ""} for name, p in files.items()}
    while True:  # who imports none that is left, or is imported by none, is on no circle
        imported = {other for others in arrows.values() for other in others}
        on = {name: others & arrows.keys() for name, others in arrows.items() if name in imported}
        on = {name: others for name, others in on.items() if others}
        if on.keys() == arrows.keys():
            return [f"{name} is on a circle, by way of {', '.join(sorted(others))}" for name, others in on.items()]
        arrows = on


def module_of(target: str, files: dict[str, Path]) -> str:
    """The file that an import names; '' for none of ours."""
    while target and target not in files:
        target = target.rpartition(".")[0]
    return target


def too_long(root: Path) -> list[str]:
    found = []
    for path in sorted(
        p for top in ("dovetail", "tests", "benchmarks", "examples") for p in root.glob(f"{top}/**/*.py")
    ):
        lines = len(path.read_text().splitlines())
        if lines > LONGEST_FILE and "ops/kernels/" not in path.as_posix():
            found.append(
                f"{path.relative_to(root)}: {lines} lines, and {LONGEST_FILE} is the most: split it by its nouns"
            )
    return found


def public_classes(root: Path) -> dict[str, list[str]]:
    """Return the files of each public class, by its name."""
    found: dict[str, list[str]] = {}
    for path in sorted((root / "dovetail").rglob("*.py")):
        where = path.relative_to(root / "dovetail")
        for line, text in enumerate(path.read_text().splitlines(), 1):
            if declared := re.match(r" *class ([A-Za-z]\w*)[(:]", text):
                found.setdefault(declared[1], []).append(f"{where}:{line}")
    return found


def test_public_class_names_are_unique():
    shared = {name: files for name, files in public_classes(ROOT).items() if len(files) > 1}
    assert not shared, shared


def test_every_arrow_runs_forward():
    assert not faults(ROOT), "\n".join(faults(ROOT))


def test_what_a_command_line_loads_is_quick():
    for file in QUICK_FILES:
        loaded = {item.target for item in imports(ROOT / "dovetail" / file, ROOT) if item.at_load}
        slow = {one for one in loaded if one.partition(".")[0] not in sys.stdlib_module_names and not is_quick(one)}
        assert not slow, f"dovetail/{file} loads {slow}"


def test_no_files_import_each_other():
    assert not circles(ROOT), "\n".join(circles(ROOT))


def test_no_file_is_too_long():
    assert not too_long(ROOT), "\n".join(too_long(ROOT))


# --- the test of the test: each rule, broken on purpose in a tree of its own ------------------------------------------

BROKEN = {
    "a backwards arrow": ("core/a.py", "from dovetail.ops import norm", "core may not import ops"),
    "one hidden in a function": (
        "ops/a.py",
        "def f():\n    import dovetail.models.decoder",
        "ops may not import models",
    ),
    "one under TYPE_CHECKING": (
        "models/a.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from dovetail.io import hf",
        "models may not import io",
    ),
    "a relative one": ("models/a.py", "from ..io import hf", "models may not import io"),
    "a room named in the alias": ("core/a.py", "from dovetail import ops", "core may not import ops"),
    "the whole package": ("engine/a.py", "import dovetail as dt", "import the room that is meant"),
    "train to engine": ("train/a.py", "import dovetail.engine", "train may not import engine"),
    "engine to train": ("engine/a.py", "from dovetail.train import step", "engine may not import train"),
    "tune outside rl to engine": ("tune/sft.py", "import dovetail.engine", "tune may not import engine"),
    "tune to rl": ("tune/sft.py", "import dovetail.tune.rl.loop", "rl stands on tune"),
    "rl to the server": ("tune/rl/a.py", "import dovetail.serve.http.app", "tune/rl may not import serve"),
    "serve to train": ("serve/a.py", "import dovetail.train", "serve may not import train"),
    "serve's talk to its api": (
        "serve/talk/a.py",
        "from dovetail.serve.api.requests import Body",
        "serve/talk may not import serve/api",
    ),
    "serve's api to the engine's process": (
        "serve/api/a.py",
        "def f():\n    from dovetail.serve import remote",
        "serve/api may not import serve/remote",
    ),
    "serve's ground to a room": ("serve/errors.py", "from .talk import answer", "serve/ may not import serve/talk"),
    "an unknown room of serve": ("serve/helpers/a.py", "from dovetail.serve import errors", "not a room"),
    "plan to io": ("plan/a.py", "import dovetail.io", "plan may not import io"),
    "jobs to a room": ("jobs/a.py", "import dovetail.train", "jobs may not import train"),
    "jobs to jax": ("jobs/a.py", "def f():\n    import jax", "no jax"),
    "torch at run time": ("io/a.py", "def f():\n    import torch", "interop/"),
    "gguf at the top": ("io/a.py", "import gguf", "import it in the function"),
    "a try at the top": (
        "io/a.py",
        "try:\n    import gguf\nexcept ImportError:\n    pass",
        "import it in the function",
    ),
    "jax in a command": ("cli/a.py", "import jax", "before a command runs"),
    "a room in a command": ("cli/a.py", "from dovetail.io import hub", "before a command runs"),
    "an eager package": ("__init__.py", "from dovetail.io.load import load", "before a command runs"),
    "an unknown room": ("utils/a.py", "import os", "not a room"),
}

FINE = {
    "ops/a.py": "import jax\nfrom dovetail.core.types import Packed",
    "io/a.py": "import numpy\ndef f():\n    import gguf",
    "tune/rl/a.py": "import dovetail.engine, dovetail.train\nfrom dovetail.tune import sft\nfrom . import loop",
    "tune/rl/environment_runner.py": "from dovetail.io.tool_formats.events import ToolCall",
    "cli/a.py": "import typer\nfrom dovetail.cli import errors\ndef f():\n    import jax, dovetail",
    "cli/bench.py": "def f():\n    import torch, transformers",
    "interop/torch.py": "import torch",
    "serve/http/a.py": "from dovetail.serve.api import chat\nimport dovetail.engine.llm, dovetail.serve.http.gate",
    "serve/talk/a.py": "from dovetail.serve import errors\nfrom dovetail.io.tool_formats.events import Event",
    "plan/a.py": "from dovetail import __version__\nfrom dovetail.models import registry",
}


def plant(root: Path, where: str, source: str) -> None:
    path = root / "dovetail" / where
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source + "\n")


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_rule_is_found(case, tmp_path):
    where, source, message = BROKEN[case]
    plant(tmp_path, where, source)
    found = faults(tmp_path)
    assert len(found) == 1 and message in found[0], found


@pytest.mark.parametrize("where", FINE)
def test_what_the_design_allows_is_not_a_fault(where, tmp_path):
    plant(tmp_path, where, FINE[where])
    assert faults(tmp_path) == []


@pytest.mark.parametrize("back", ["from dovetail.ops import a", "def f():\n    from dovetail.ops.a import x"])
def test_a_circle_is_found(back, tmp_path):
    plant(tmp_path, "ops/a.py", "import dovetail.ops.b")
    plant(tmp_path, "ops/b.py", "from dovetail.ops import c")
    plant(tmp_path, "models/user.py", "from dovetail.ops.a import x")
    plant(tmp_path, "ops/c.py", "import jax")
    assert circles(tmp_path) == []
    plant(tmp_path, "ops/c.py", back)
    assert {line.split()[0] for line in circles(tmp_path)} == {"dovetail.ops.a", "dovetail.ops.b", "dovetail.ops.c"}


def test_a_long_file_is_found_except_among_kernels(tmp_path):
    plant(tmp_path, "ops/long.py", "x = 1\n" * 600)
    plant(tmp_path, "ops/kernels/gpu/long.py", "x = 1\n" * 700)
    (found,) = too_long(tmp_path)
    assert found.startswith("dovetail/ops/long.py: 601 lines")


def test_a_class_name_used_twice_is_found(tmp_path):
    plant(tmp_path, "ops/a.py", "class Row: ...\nclass _Own: ...")
    plant(tmp_path, "engine/b.py", "class Row: ...\nclass _Own: ...")
    assert public_classes(tmp_path) == {"Row": ["engine/b.py:1", "ops/a.py:1"]}


def test_lint_reads_the_folders_with_tracked_code_and_no_others():
    """By name: `python -m venv env` in the checkout must not be linted."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    (named,) = re.findall(r"^CODE := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert sorted(named.split()) == sorted({name.partition("/")[0] for name in listed.stdout.split()})
