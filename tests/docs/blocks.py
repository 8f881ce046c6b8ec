"""Collect the code of README.md and docs/*.md: fenced blocks, the commands in them, and `dovetail ...` code spans."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
SHELL = ("sh", "bash", "console")
_FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
_SPAN = re.compile(r"`(dovetail(?: [^`]*)?)`")
_WRAPPERS = ("srun",)  # they run the command that follows
_ASSIGNED = re.compile(r"^(?:[A-Z_]+=(?:\$\([^)]*\)|\S*)\s+)+(?=\w)")  # variables for one command


class Block(NamedTuple):
    page: str
    line: int  # of its first line of code
    language: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


class Command(NamedTuple):
    """One simple command of a shell block: `a && b` are two."""

    page: str
    line: int
    words: tuple[str, ...]
    output: tuple[str, ...] = ()  # the lines that a console block shows below it

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def text(self) -> str:
        return shlex.join(self.words)


def blocks(page: str, *languages: str) -> list[Block]:
    """Return the page's fenced blocks in these languages, or all of them."""
    text = (ROOT / page).read_text()
    found = []
    for match in _FENCED.finditer(text):
        if not languages or match[2] in languages:
            found.append(Block(page, text.count("\n", 0, match.start(3)) + 1, match[2], match[3]))
    return found


def commands(page: str) -> list[Command]:
    """Return the commands of the page's shell blocks, in order. In blocks without a language, only lines that begin
    with `$ ` are commands."""
    found = []
    for block in blocks(page, *SHELL, ""):
        prompted = block.language not in ("sh", "bash")
        for line, text, output in _lines(block, prompted):
            simple = [words for words in _split(text) if words]
            for i, words in enumerate(simple):
                shown = output if i == len(simple) - 1 else ()
                found.append(Command(page, line, tuple(words), shown))
    return found


def spans(page: str) -> list[tuple[str, str]]:
    """Return (where, text) of each code span outside fenced blocks that begins with `dovetail`."""
    text = _FENCED.sub(lambda match: "\n" * match[0].count("\n"), (ROOT / page).read_text())
    return [(f"{page}:{text.count(chr(10), 0, m.start()) + 1}", " ".join(m[1].split())) for m in _SPAN.finditer(text)]


def _lines(block: Block, prompted: bool) -> list[tuple[int, str, tuple[str, ...]]]:
    """Return (line number, command line, the output below it); a line that ends with a backslash continues."""
    found: list[tuple[int, str, list[str]]] = []
    continues = False
    for number, line in enumerate(block.text.splitlines(), block.line):
        if continues:
            at, text, output = found[-1]
            found[-1] = (at, f"{text.rstrip().removesuffix(chr(92))} {line.strip()}", output)
        elif not prompted and line.strip():
            found.append((number, line, []))
        elif line.startswith("$ "):
            found.append((number, line[2:], []))
        elif found:
            found[-1][2].append(line)
            continue
        continues = bool(found) and found[-1][1].rstrip().endswith("\\")
    return [(at, text, tuple(output)) for at, text, output in found]


def _split(text: str) -> list[list[str]]:
    """Return the words of each simple command: split at `&&` and `;`, without comments, loops, wrappers and variables
    that are set for it."""
    lexer = shlex.shlex(_ASSIGNED.sub("", text), posix=True, punctuation_chars="&;|")
    lexer.whitespace_split, lexer.commenters = True, "#"
    parts: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set("&;|"):
            parts.append([])
        else:
            parts[-1].append(word)
    return [_bare(words) for words in parts]


def _bare(words: list[str]) -> list[str]:
    if words and words[0] == "do":
        words = words[1:]
    if not words or words[0] in ("for", "done"):
        return []
    return words[1:] if words[0] in _WRAPPERS else words
