"""Test the output and the errors of `dovetail data`."""

import json

import pytest
from refusals import refuses
from typer.testing import CliRunner

from dovetail.cli.data import app
from dovetail.core.errors import MissingFileError, RecipeError, UserError

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


def test_prepare_shows_statistics_and_folder(dovetail, tmp_path):
    out = dovetail("prepare", "fables:50", "--tokenizer", "bytes", "--out", str(tmp_path / "out"))
    assert "fables-50" in out and "documents" in out and "p99" in out
    (folder,) = (tmp_path / "out").glob("fables-50-*")
    assert str(folder) in out.replace("\n", "")


def test_prepare_a_recipe_with_overrides(dovetail, recipe, tmp_path):
    out = dovetail("prepare", recipe, "data.sources.0.path=fables:20")
    assert "fables-20" in out and "texts" in out
    assert len(list((tmp_path / "home" / "data").iterdir())) == 2


def test_show_rows_marks_the_ends_of_documents(dovetail, recipe):
    out = dovetail("show", recipe, "--rows", "3")
    assert out.count("row ") == 3 and "from fables:50" in out and "Text number" in out
    assert "⏹" in out and "120 tokens" in out and "padding: fables:50" in out
    assert dovetail("show", recipe, "--rows", "1", "--first", "2") in out.replace(out[: out.index("row 2")], "")
    assert dovetail("show", recipe, "--held-out") != out


def test_show_paths(dovetail):
    assert "row 1 from fables:9: " in dovetail("show", "fables:9", "--tokenizer", "bytes", "--length", "50")


@pytest.mark.parametrize(
    ("args", "param", "kind"),
    [
        (["prepare", "fables"], "--tokenizer", UserError),
        (["prepare", "fables", "--tokenizer", "bytes", "--format", "csv"], "format", RecipeError),
        (["show", "fables:9", "--tokenizer", "bytes", "--packing", "tight"], "packing", RecipeError),
        (["show", "fables:9", "--tokenizer", "bytes", "--held-out"], "--held-out", UserError),
        (["show", "fables:9", "--tokenizer", "bytes", "--kind", "sft"], "--model", UserError),
    ],
)
def test_bad_options_are_refused(dovetail, args, param, kind):
    with refuses(param, kind):
        dovetail(*args)


def test_a_missing_recipe_is_named(dovetail):
    with refuses("recipe", RecipeError, naming="'nothing.yaml'"):
        dovetail("prepare", "nothing.yaml")


def test_format_with_a_recipe_is_refused(dovetail, recipe):
    with refuses("--format"):
        dovetail("prepare", recipe, "--format", "text")


# --- examples for fine-tuning -----------------------------------------------------------------------------------------


@pytest.fixture
def tuning(dovetail, make_tokenizer, tmp_path):
    """`dovetail data show` of these records, for a small model."""
    make_tokenizer().save(tmp_path / "model")

    def show(record, *args):
        (tmp_path / "a.jsonl").write_text(json.dumps({"messages": []}) + "\n" + json.dumps(record))
        where = ["show", str(tmp_path / "a.jsonl"), "--model", str(tmp_path / "model"), "--index", "1"]
        return dovetail(*where, *args)

    return show


CHAT = [{"role": "user", "content": "who [b]?"}, {"role": "assistant", "content": "a fox 🦊"}]


def test_show_an_example_with_the_trained_tokens_marked(tuning):
    out = tuning({"messages": CHAT * 2})
    assert out.count("<|im_start|>assistant\n⟦a fox 🦊<|im_end|>⟧\n") == 2 and "who [b]?" in out
    assert "a.jsonl line 2 (sft, whole): " in out and "tokens trained" in out
    assert "(sft, shortened)" in tuning({"messages": CHAT * 2}, "--length", "40")
    assert "⟦a fox 🦊<|im_end|>⟧" in tuning({"talk": CHAT}, "keys.messages=talk")


def test_trained_tokens_are_coloured_in_a_terminal(tuning, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = tuning({"messages": CHAT})
    assert "\x1b[1;32ma fox 🦊<|im_end|>\x1b[0m" in out and "⟦" not in out


def test_show_a_preference_and_a_prompt(tuning):
    out = tuning({"prompt": CHAT[:1], "chosen": "fox", "rejected": "dog"})
    assert "(preference, whole)" in out and "segment 1, chosen: " in out and "segment 2, rejected: " in out
    assert "⟦fox<|im_end|>⟧" in out and "⟦dog<|im_end|>⟧" in out
    assert "label false" in tuning({"prompt": "a", "completion": "b", "label": False})
    assert tuning({"prompt": CHAT[:1]}).rstrip().endswith("<|im_start|>assistant")


@pytest.mark.parametrize(
    ("record", "args", "param", "code"),
    [
        ({"messages": CHAT[:1]}, [], "--index", None),
        ({"messages": CHAT}, ["--index", "5"], "--index", None),
        ({"messages": CHAT}, ["--kind", "dpo"], "kind", None),
        ({"messages": CHAT}, ["--packing", "concat"], "--packing", None),
        ({"messages": CHAT}, ["key.messages=x"], "key", "unknown_key"),
    ],
)
def test_bad_options_for_an_example_are_refused(tuning, record, args, param, code):
    with refuses(param, code=code):
        tuning(record, *args)


def test_a_recipe_for_fine_tuning_shows_an_example(dovetail, make_tokenizer, tmp_path):
    """A recipe of any kind of fine-tuning is shown with its model, data and length; sources are read in order."""
    make_tokenizer().save(tmp_path / "model")
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"prompt": CHAT[:1], "chosen": "fox", "rejected": "dog"}))
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": CHAT * 2}))
    recipe = tmp_path / "judge.yaml"
    recipe.write_text(
        f"model: {tmp_path / 'model'}\nlength: 64\nepochs: 2\nreward: {{margin: true}}\n"
        f"data: {{path: {tmp_path / 'pairs.jsonl'}}}\n"
    )
    out = dovetail("show", str(recipe))
    assert "(preference, whole)" in out and "⟦fox<|im_end|>⟧" in out
    listed = [f"data.sources.{i}.path={tmp_path / name}" for i, name in enumerate(("pairs.jsonl", "chats.jsonl"))]
    recipe.write_text(f"model: {tmp_path / 'model'}\nlength: 40\nepochs: 2\n")
    assert "(sft, shortened)" in dovetail("show", str(recipe), *listed, "--index", "1")
    data = [f"data.path={tmp_path / 'chats.jsonl'}", f"model={tmp_path / 'model'}"]  # without a recipe, its keys
    assert "(sft, whole)" in dovetail("show", *data)
    assert "(sft, shortened)" in dovetail("show", str(tmp_path / "chats.jsonl"), data[1], "length=40", "lora.r=4")
    assert "⟦<|im_start|>user" in dovetail("show", *data, "assistant_only_loss=false")
    with refuses("data.template", MissingFileError, naming="'nowhere'"):
        dovetail("show", *data, "data.template=nowhere")
    with refuses("modle", RecipeError, code="unknown_key", naming="'model'"):
        dovetail("show", *data, "modle=x")
    with refuses("--packing"):
        dovetail("show", str(recipe), *listed, "--packing", "concat")
    with refuses("data.pth", RecipeError, code="unknown_key", naming="judge.yaml"):
        dovetail("show", str(recipe), "data.pth=x")
