"""`dovetail data`: what a person sees."""

import pytest
from typer.testing import CliRunner

from dovetail.cli.data import app

RECIPE = """
model: llama
batch: 4
length: 120
steps: 10
data:
  tokenizer: bytes
  packing: best_fit
  held_out: 0.1
  sources:
    - {path: "fables:50", weight: 2}
    - {path: TEXTS}
"""


@pytest.fixture
def dovetail(tmp_path, monkeypatch):
    monkeypatch.setenv("DOVETAIL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "120")

    def run(*args):
        result = CliRunner().invoke(app, args)
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == 0, result.output
        return result.output

    return run


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "texts").mkdir()
    for i in range(9):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"Text number {i}. " * 3)
    (tmp_path / "my.yaml").write_text(RECIPE.replace("TEXTS", str(tmp_path / "texts")))
    return str(tmp_path / "my.yaml")


def test_prepare_shows_what_was_made_and_where(dovetail, tmp_path):
    out = dovetail("prepare", "fables:50", "--tokenizer", "bytes", "--out", str(tmp_path / "out"))
    assert "fables-50" in out and "documents" in out and "p99" in out
    (folder,) = (tmp_path / "out").glob("fables-50-*")
    assert str(folder) in out.replace("\n", "")


def test_prepare_a_recipe_with_overrides(dovetail, recipe, tmp_path):
    out = dovetail("prepare", recipe, "data.sources.0.path=fables:20")
    assert "fables-20" in out and "texts" in out
    assert len(list((tmp_path / "home" / "data").iterdir())) == 2


def test_show_rows_with_the_ends_of_documents(dovetail, recipe):
    out = dovetail("show", recipe, "--rows", "3")
    assert out.count("row ") == 3 and "from fables:50" in out and "Text number" in out
    assert "⏹" in out and "120 tokens" in out and "padding: fables:50" in out
    assert dovetail("show", recipe, "--rows", "1", "--first", "2") in out.replace(out[: out.index("row 2")], "")
    assert dovetail("show", recipe, "--held-out") != out


def test_show_paths(dovetail):
    assert "row 1 from fables:9: " in dovetail("show", "fables:9", "--tokenizer", "bytes", "--length", "50")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["prepare", "fables"], "expected --tokenizer with paths"),
        (["prepare", "fables", "--tokenizer", "bytes", "--format", "csv"], "format must be one of"),
        (["show", "fables:9", "--tokenizer", "bytes", "--packing", "tight"], "packing must be one of"),
        (["show", "fables:9", "--tokenizer", "bytes", "--held-out"], "data.held_out is 0"),
        (["prepare", "nothing.yaml"], "no recipe 'nothing.yaml'"),
    ],
)
def test_mistakes_are_said(dovetail, args, message):
    with pytest.raises(ValueError, match=message):
        dovetail(*args)


def test_a_recipes_formats_are_its_own(dovetail, recipe):
    with pytest.raises(ValueError, match="a recipe says them for each of its sources"):
        dovetail("prepare", recipe, "--format", "text")
