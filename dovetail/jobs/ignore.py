"""Which files of a working tree belong to its code: git's own answer where there is git, else the .gitignore files."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ALWAYS = (".git/", "__pycache__/", "*.pyc", ".venv/", "venv/", ".ruff_cache/", ".pytest_cache/", "node_modules/")


@dataclass(frozen=True)
class Rule:
    """One line of a .gitignore, for paths below the file's folder."""

    base: PurePosixPath
    pattern: re.Pattern[str]
    only_folders: bool
    negated: bool

    def matches(self, path: PurePosixPath, is_folder: bool) -> bool:
        if self.only_folders and not is_folder:
            return False
        try:
            return self.pattern.fullmatch(str(path.relative_to(self.base))) is not None
        except ValueError:
            return False


def rule(line: str, base: PurePosixPath = PurePosixPath()) -> Rule | None:
    """None for a comment or an empty line."""
    text = line.rstrip("\n").rstrip()
    if not text or text.startswith("#"):
        return None
    negated, text = text.startswith("!"), text.removeprefix("!")
    only_folders, text = text.endswith("/"), text.rstrip("/")
    anchored, text = "/" in text, text.lstrip("/")
    inner = _translated(text)
    return Rule(base, re.compile(inner if anchored else f"(?:.*/)?{inner}"), only_folders, negated)


def _translated(text: str) -> str:
    """git's wildcards as a regular expression: * and ? stop at a slash, ** does not."""
    out, i = "", 0
    while i < len(text):
        if text.startswith("**/", i):
            out, i = out + "(?:.*/)?", i + 3
        elif text.startswith("**", i):
            out, i = out + ".*", i + 2
        elif text[i] == "[" and "]" in text[i + 2 :]:
            end = text.index("]", i + 2)
            inner = text[i + 1 : end].replace("\\", r"\\")
            out, i = out + "[" + ("^" + inner[1:] if inner[0] == "!" else inner) + "]", end + 1
        else:
            out, i = out + {"*": "[^/]*", "?": "[^/]"}.get(text[i], re.escape(text[i])), i + 1
    return out


def files(root: Path, exclude: Sequence[str] = ()) -> list[PurePosixPath]:
    """Sorted paths below root of what is neither ignored nor excluded."""
    own = [made for made in map(rule, (*ALWAYS, *exclude)) if made]
    listed = _by_git(root)
    if listed is None:
        return sorted(_walked(root, PurePosixPath(), own))
    return sorted(path for path in listed if not _is_below_ignored(path, own) and (root / path).is_file())


def repository(root: Path) -> Path | None:
    """Return the top folder of the git repository that `root` lies in; None where there is none, or no git."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "--show-toplevel"], capture_output=True, check=False
        )
    except OSError:
        return None
    found = os.fsdecode(done.stdout).rstrip("\n")
    return Path(found).resolve() if done.returncode == 0 and found else None


def _by_git(root: Path) -> list[PurePosixPath] | None:
    """Tracked files and those that are not ignored; None where this is no repository, or there is no git."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except OSError:
        return None
    if done.returncode:
        return None
    return sorted({PurePosixPath(name) for name in os.fsdecode(done.stdout).split("\0") if name})


def _is_below_ignored(path: PurePosixPath, rules: Sequence[Rule]) -> bool:
    folders = [folder for folder in path.parents if folder != PurePosixPath()]
    return _is_ignored(path, False, rules) or any(_is_ignored(folder, True, rules) for folder in folders)


def _is_ignored(path: PurePosixPath, is_folder: bool, rules: Sequence[Rule]) -> bool:
    """The last rule that matches decides."""
    decided = [one for one in rules if one.matches(path, is_folder)]
    return bool(decided) and not decided[-1].negated


def _walked(root: Path, at: PurePosixPath, rules: list[Rule]) -> Iterator[PurePosixPath]:
    ignore = root / at / ".gitignore"
    if ignore.is_file():
        rules = rules + [made for made in (rule(line, at) for line in ignore.read_text().splitlines()) if made]
    for entry in sorted(os.scandir(root / at), key=lambda e: e.name):
        path, is_folder = at / entry.name, entry.is_dir(follow_symlinks=False)
        if _is_ignored(path, is_folder, rules):
            continue
        if is_folder:
            yield from _walked(root, path, rules)
        elif entry.is_file():
            yield path
