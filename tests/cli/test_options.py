"""Command-line options generated from the settings classes."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
from refusals import refuses
from typer.main import get_command
from typer.testing import CliRunner

from dovetail.cli.main import app
from dovetail.cli.options import OptionCommand, takes_options
from dovetail.core.errors import UserError
from dovetail.core.option import check_options, option, options_of
from dovetail.engine.options import EngineOptions
from dovetail.serve.config import ServerConfig, ServerLimits


@dataclass(frozen=True)
class Settings:
    size: int = option(3, "A size.", least=1, most=9)
    share: float | None = option(None, "A share.", least=0, above=True)
    mode: str = option("fast", "A mode.", choices=("fast", "slow"))
    strict: bool = option(False, "A flag.")
    paths: tuple[str, ...] = option((), "Paths.")

    def __post_init__(self):
        check_options(self)


@pytest.fixture
def run():
    """Return a function that parses words and returns the values the command received."""
    found = {}
    cli = typer.Typer()

    @cli.command(cls=OptionCommand)
    @takes_options(EngineOptions, "engine", defaults={"seed": None})
    @takes_options(Settings, "settings")
    def command(settings: dict, engine: dict, model: str = typer.Argument("m")) -> None:
        found.update(settings=Settings(**settings), engine=EngineOptions(**engine), model=model)

    def invoke(*words: str) -> dict:
        CliRunner().invoke(cli, list(words), catch_exceptions=False)
        return found

    return invoke


def test_values_reach_the_settings(run):
    found = run("--size", "5", "--share", "0.5", "--mode", "slow", "--strict", "--paths", "a", "--paths", "b", "x")
    assert found["settings"] == Settings(size=5, share=0.5, mode="slow", strict=True, paths=("a", "b"))
    assert found["model"] == "x" and found["engine"] == EngineOptions(seed=None)


def test_several_adapters_follow_one_flag(run):
    found = run("--lora-modules", "a=DIR", "b=~/x=y", "--max-loras", "4", "model")
    assert found["engine"].lora_modules == {"a": "DIR", "b": str(Path("~/x=y").expanduser())}
    assert found["engine"].max_loras == 4 and found["model"] == "model"


@pytest.mark.parametrize("words", [["--lora-modules", "a"], ["--lora-modules", "a=x", "a=y"]])
def test_adapters_need_distinct_names(run, words):
    with refuses("--lora-modules"):
        run(*words)


@pytest.mark.parametrize(
    "given, said",
    [
        ({"size": 0}, "`size` must be an integer of at least 1 and at most 9, got 0"),
        ({"size": 10}, "got 10"),
        ({"size": 2.5}, "must be an integer"),
        ({"share": 0}, "`share` must be a number above 0, got 0"),
        ({"share": float("nan")}, "got nan"),
        ({"mode": "fats"}, "must be one of fast, slow, got 'fats'. Did you mean 'fast'?"),
    ],
)
def test_values_out_of_range_are_refused_with_the_name(given, said):
    with pytest.raises(UserError) as caught:
        Settings(**given)
    assert said in str(caught.value) and caught.value.param == next(iter(given))


@pytest.mark.parametrize("path", ["serve", "chat", "eval", "bench throughput", "compile serve"])
def test_every_command_with_an_engine_has_every_engine_option(path):
    command = get_command(app)
    for name in path.split():
        command = command.commands[name]
    flags = {flag for each in command.params for flag in each.opts}
    assert {f"--{name.replace('_', '-')}" for name in options_of(EngineOptions)} <= flags


def test_the_documented_options_are_those_that_exist():
    page = (Path(__file__).parents[2] / "docs/serving.md").read_text()
    for settings in (EngineOptions, ServerConfig, ServerLimits):
        for name, each in options_of(settings).items():
            assert f"| `--{name.replace('_', '-')}` |" in page and each.help in page, name
