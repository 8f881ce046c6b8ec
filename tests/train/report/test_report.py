"""Test that a run in any state has a well-formed, self-contained report page."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import typer
from refusals import refuses
from typer.testing import CliRunner

from dovetail.cli.info import report as command
from dovetail.core.errors import MissingFileError
from dovetail.core.reporter import Reporter
from dovetail.train.report.curves import Mark, Series, chart, smooth
from dovetail.train.report.goodput import Goodput
from dovetail.train.report.metrics import RunMetrics, Work
from dovetail.train.report.page import write
from dovetail.train.report.summary import read, summary

pytestmark = pytest.mark.slow

VOID = {"meta", "br", "link", "img"}


class Checker(HTMLParser):
    """Every tag is closed in its order."""

    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.sources += [value for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def checked(page: str) -> str:
    checker = Checker()
    checker.feed(page)
    assert checker.open == [] and checker.sources == []
    assert "nan" not in re.findall(r'(?: d|cx|cy|x1|y1)="([^"]*)"', page).__repr__().lower()
    assert "url(" not in page and "@import" not in page and "fetch(" not in page
    return page


def make(folder: Path, steps: int, loss=lambda step: 2 + 8 / step) -> Path:
    now = 0.0
    folder.mkdir()
    goodput = Goodput(folder / "goodput.json", lambda: now)
    with goodput.span("compile"):
        now += 2
    goodput.begin()
    with RunMetrics(
        folder, steps=200, work=Work(3e9, 2e9, 1e14), goodput=goodput, reporter=Reporter(show=False), report_to=()
    ) as run:
        for step in range(1, steps + 1):
            now += 1
            goodput.step(step)
            run.record(step, {"loss": loss(step), "lr": 1e-3 / step, "grad_norm": 0.5}, 1.0, 4096)
            if step % 10 == 0:
                run.evaluated(step, {"held_out_loss": loss(step) + 0.1})
    goodput.save()
    return folder


@pytest.fixture
def run(tmp_path) -> Path:
    folder = make(tmp_path / "my run", 60)
    (folder / "recipe.yaml").write_text("model: <tiny> & co\n")
    bad = dict(time=1.0, host="h", step=20, batch=19, what="skip", kind="spike", reason="a <bad> batch", values=[1])
    (folder / "health.jsonl").write_text(json.dumps(bad) + "\n")
    for step in (20, 40):
        (folder / "checkpoints" / str(step)).mkdir(parents=True)
        (folder / "checkpoints" / str(step) / "data").write_bytes(b"0" * 3000)
    (folder / "checkpoints" / "60.orbax-checkpoint-tmp").mkdir()
    (folder / "export" / "step_40").mkdir(parents=True)
    return folder


def test_the_page_has_every_section_of_a_complete_run(run):
    page = checked(write(run).read_text())
    for title in ("loss", "learning rate", "gradient norm", "tokens per second", "model FLOPs utilisation"):
        assert f'aria-label="{title}"' in page
    assert page.count("<circle") == 6  # the held-out losses
    assert "model: &lt;tiny&gt; &amp; co" in page and "a &lt;bad&gt; batch" in page and "skip: spike" in page
    for text in ("compiling", "Goodput", "3 kB", "export"):
        assert text in page, text
    assert "orbax-checkpoint-tmp" not in page and "prefers-color-scheme:dark" in page
    assert str(run.parent) not in page
    assert not list(run.glob(".*"))


def test_the_command_shows_the_figures_and_where_the_page_is(run, tmp_path):
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, [str(run)], catch_exceptions=False)
    assert result.exit_code == 0
    for part in ("60 of 200", "held-out loss", "2.2333", "4.1k tok/s", "MFU", "goodput", "step 40", "report.html"):
        assert part in result.output
    elsewhere = tmp_path / "page.html"
    CliRunner().invoke(app, [str(run), "--out", str(elsewhere)], catch_exceptions=False)
    assert elsewhere.exists() and (run / "report.html").exists()


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_run_that_just_started_has_a_page(tmp_path, steps):
    page = checked(write(make(tmp_path / "run", steps)).read_text())
    assert ('aria-label="loss"' in page) == (steps > 0)


def test_a_run_that_went_wrong_has_a_page(tmp_path):
    folder = make(tmp_path / "run", 30, loss=lambda step: math.nan if step > 5 else -1.0)
    for name in ("run.json", "goodput.json", "health.jsonl"):
        (folder / name).unlink(missing_ok=True)
    (folder / "health.jsonl").write_text('{"what": "ha')
    checked(write(folder).read_text())
    assert dict(summary(read(folder)))["steps"] == "30"


def test_a_long_run_has_a_small_page_that_keeps_its_spikes(tmp_path):
    folder = make(tmp_path / "run", 5000, loss=lambda step: 100.0 if step == 3333 else 2.0)
    page = checked(write(folder).read_text())
    assert len(page) < 400_000
    raw = re.search(r'<path class="raw"[^>]* d="([^"]*)"', page)
    assert raw and len({point.split()[1] for point in raw[1][1:].split("L")}) >= 2


def test_folders_without_a_run_are_refused(tmp_path):
    with refuses(None, MissingFileError, naming="metrics.jsonl"):
        write(tmp_path)
    with refuses(None, MissingFileError, naming=str(tmp_path / "none")):
        write(make(tmp_path / "run", 1), tmp_path / "none" / "page.html")


def test_a_curve_follows_its_points():
    points = [(step, float(step)) for step in range(1, 101)]
    assert [y for _, y in smooth(points)] == pytest.approx([y for _, y in points])  # a line stays where it is
    assert max(y for _, y in smooth([(i, 1e4 if i == 500 else 1.0) for i in range(1000)], log=True)) < 2
    svg = chart("t", [Series("a", points)], form=str, marks=[Mark(50, "here <now>"), Mark(500, "not here")])
    assert "here &lt;now&gt;" in svg and "not here" not in svg
    assert chart("t", [Series("a", [])], form=str) == ""
