"""`dovetail plan train`: tables, recipe lines and JSON, on narrow and wide screens."""

import functools
import json

import pytest
import yaml
from refusals import refuses
from typer.testing import CliRunner

from dovetail.cli import plan
from dovetail.core import recipe
from dovetail.core.errors import RecipeError, UserError
from dovetail.train.settings import Pretrain

pytestmark = pytest.mark.slow

ASKED = ["train", "llama3-8b", "--on", "v5e-64", "--batch", "1M", "--seq", "8192", "--tokens", "1T"]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("DOVETAIL_HOME", str(tmp_path))  # no calibration of this machine's


@functools.cache  # several tests read the same answer
def run(*args: str, columns: int = 120) -> str:
    result = CliRunner(env={"COLUMNS": str(columns), "TERM": "dumb"}).invoke(plan.app, list(args))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


@pytest.mark.parametrize("columns", [80, 120, 160])
def test_the_tables_fit_the_screen(columns):
    output = run(*ASKED, columns=columns)
    assert max(map(len, output.splitlines())) <= columns
    for words in (
        "v5litepod-64",
        "180 plans",
        "MFU",
        "tok/s",
        "days",
        "GiB",
        "why others are slower",
        "gather weights",
    ):
        assert words in output
    assert "…" not in output, "a cell was cut"


def test_the_answer_comes_first():
    fits, step, run_ = run(*ASKED).splitlines()[:3]
    assert fits.startswith("fits: 180 plans on v5litepod-64; fastest: fsdp 64, remat full") and "GiB" in fits
    assert step.startswith("step: ") and " s, " in step and "MFU" in step
    assert run_.startswith("run:  1T tokens: ") and " days, $" in run_


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["llama3-8b"], "160B tokens (the recipe's): "),
        (["qwen3-8b"], "160B tokens (20 per weight; set --tokens): "),
        (["qwen3-8b", "steps=10"], "10.5M tokens: "),
        (["llama3-8b", "--tokens", "1M"], "1M tokens: "),  # less than the recipe's warmup
        (["llama3-8b", "--tokens", "100T", "--spot"], "years, $"),
        (["llama3-8b", "--region", "europe-west4"], "$"),
    ],
)
def test_the_run_line_states_tokens_time_and_price(args, words):
    output = run("train", *args, "--on", "v5e-64")
    assert words in output.splitlines()[2], output.splitlines()[:3]
    assert "years" not in output or "days" not in output


def test_an_explicit_warmup_is_checked():
    with refuses("schedule.warmup", RecipeError):
        run("train", "llama3-8b", "--on", "v5e-64", "--tokens", "1M", "schedule.warmup=2000")


def test_the_printed_recipe_lines_give_that_plan():
    output = run(*ASKED)
    lines = yaml.safe_load(output.split("recipe lines")[1])
    settings = recipe.load("llama3-8b", [f"{key}={json.dumps(value)}" for key, value in lines.items()], Pretrain)
    mesh = settings.mesh
    assert mesh.data * mesh.fsdp * mesh.tensor * mesh.context * mesh.expert == 64
    assert settings.per_device * settings.accumulate * mesh.data * mesh.fsdp * mesh.expert == settings.batch == 128


def test_the_arithmetic_is_shown_with_its_numbers():
    output = run(*ASKED, "--explain", "--stages", "2", "mesh.fsdp=64", "mesh.tensor=1", "mesh.context=1")
    for words in ("lower bound = max(products", ": 90 GB/s", "B active weights", "TFLOP/s", "has no pipeline axis"):
        assert words in output.replace("\n", "")


def test_json_holds_bounds_and_collectives():
    found = json.loads(run(*ASKED, "--json", "--top", "2", "--price", "1"))
    assert found["tokens"] == 10**12 and found["fits"] == 180
    assert len(found["plans"]) == 2 and found["price"].startswith("$1 per chip and hour, as given")
    first = found["plans"][0]
    assert first["step_s"][0] < first["step_s"][1] and first["mfu_causal"][0] < first["mfu_full"][0]
    assert first["run"][0]["dollars"] == pytest.approx(64 * first["run"][0]["seconds"] / 3600)
    assert {one["over"] for one in first["exchanges"]} == {"ICI"}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["train", "llama3-8b", "--on", "v5e-12"], "no slice of v5e has that size"),
        (["train", "llama3-8b", "--on", "v5e-64", "--price", "1", "--spot"], "leave out --spot"),
        (["train", "llama3-8b", "--on", "v5e-64", "--batch", "1k"], "--batch must be at least one row"),
        (["train", "lama3-8b", "--on", "v5e-64"], "Did you mean 'llama3-8b'"),
        (
            ["train", "llama3-8b", "--on", "v5e-64", "--region", "mars"],
            "--region must be a region .* Known: .*us-west4",
        ),
        (["train", "llama3-8b", "--on", "v5e-64", "--region", "us-est5"], "Did you mean 'us-east5'"),
        (["train", "llama3-70b", "--on", "v5e-4"], "What would do: it fits from v5litepod-"),
    ],
)
def test_plans_that_cannot_be_made_are_refused(args, message):
    with pytest.raises(UserError, match=message):
        run(*args)


def test_provisional_figures_are_marked():
    output = run("train", "llama3-8b", "--on", "8t:4x4x4", "--batch", "1M")
    assert "the figures of TPU8t are provisional" in output and "no public price of TPU8t" in output
