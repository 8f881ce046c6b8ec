"""docs/architecture.md: its files and functions exist, and its tables are the rules of tests/test_architecture.py."""

import ast
import re

from docs.blocks import ROOT
from test_architecture import ARROWS, SERVE_ARROWS

PAGE = (ROOT / "docs" / "architecture.md").read_text()
ROOMS = {room.partition("/")[0] for room in ARROWS}


def section(title: str) -> str:
    """Return the text below a heading that begins with `title`, up to the next heading."""
    found = re.search(rf"^## {re.escape(title)}.*?\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    assert found, f"docs/architecture.md has no section {title!r}"
    return found[1]


def rows(text: str) -> list[list[str]]:
    """Return the cells of the tables' rows, without heads and rules."""
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    heads = {i - 1 for i, cells in enumerate(found) if set(cells[0]) == {"-"}}
    return [cells for i, cells in enumerate(found) if i not in heads and i - 1 not in heads]


def spans(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text)


def names_of(file: str) -> set[str]:
    """Return the names that a file defines: functions, classes and methods (`Class.method`)."""
    found = set()
    for node in ast.parse((ROOT / file).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
            found |= {f"{node.name}.{each.name}" for each in methods}
    return found


def test_files_exist():
    paths = [span for span in spans(PAGE) if re.fullmatch(r"[\w/]+\.py|dovetail/[\w/]+/", span)]
    assert len(paths) > 40
    assert not [path for path in paths if not any((ROOT / base / path).exists() for base in ("", "dovetail"))]


def test_functions_of_the_tables_exist():
    for title in ("Ten files", "Trace: from a recipe", "Trace: from a chat", "Trace: a GRPO"):
        for file, names, *_ in rows(section(title)):
            path = spans(file)[0]
            assert set(spans(names)) <= names_of(path) | {"Delta", "Add"}, f"{path} has not all of {names}"


def test_dotted_names_exist():
    dotted = [span for span in spans(PAGE) if re.fullmatch(r"[a-z_]+(\.\w+)+", span)]
    dotted = [name for name in dotted if name.partition(".")[0] in ROOMS]
    assert dotted
    for name in dotted:
        parts = name.split(".")
        files = [
            i for i in range(1, len(parts)) if (ROOT / "dovetail" / "/".join(parts[:i])).with_suffix(".py").is_file()
        ]
        assert files, f"{name}: no such file"
        file = "dovetail/" + "/".join(parts[: files[-1]]) + ".py"
        assert ".".join(parts[files[-1] :]) in names_of(file), f"{file} has no {name}"


def test_a_trace_has_at_most_15_files():
    assert len(rows(section("Ten files"))) == 10
    traces = re.findall(r"^## (Trace: .*)$", PAGE, re.MULTILINE)
    assert len(traces) == 3
    for title in traces:
        assert len({cells[0] for cells in rows(section(title))}) <= 15, title


def test_import_tables_are_the_rules():
    tables = section("Rooms").partition("Further rules")[0]
    table = {spans(room)[0]: set(spans(others)) for room, others in rows(tables)}
    assert {room: table[room] for room in ARROWS if room != "cli"} == {k: v for k, v in ARROWS.items() if k != "cli"}
    serve = {f"serve/{folder}": others for folder, others in SERVE_ARROWS.items()}
    assert {folder: table[folder] for folder in serve} == serve


def test_diagram_has_no_forbidden_arrow():
    diagram = re.search(r"```mermaid\n(.*?)```", section("Rooms"), re.DOTALL)
    assert diagram
    names = {"rl": "tune/rl", "draft": "tune/draft"}
    for line in diagram[1].splitlines():
        if found := re.match(r"\s*(\w+)(?:\[.*?\])? --> (.*)", line):
            source = names.get(found[1], found[1])
            allowed = ARROWS[source] | (set(names.values()) if source == "cli" else set())
            targets = {each.strip() for each in found[2].split("&")}
            assert {names.get(each, each) for each in targets} <= allowed, line


def test_glossary_has_at_most_40_terms_of_one_meaning():
    terms = [cells[0] for cells in rows(section("Glossary"))]
    assert 0 < len(terms) <= 40 and len(set(terms)) == len(terms)
