"""Test that the prediction appears beside the measurement in metrics, notes and report."""

import json
import re

from dovetail.plan.prediction import Prediction
from dovetail.train.report import metrics, summary
from dovetail.train.report.metrics import ENOUGH, WARM, Predicted, RunMetrics
from dovetail.train.report.page import write

PREDICTION = Prediction("H200", 1, 0.4, 0.1, 0.0, best=0.4, worst=1.0)


def run_of(folder, steps: int, more: dict | None = None, every: int = 1) -> list[dict]:
    folder.mkdir(exist_ok=True)
    metrics.save_prediction(folder, PREDICTION)
    with RunMetrics(folder, steps=100, predicted=Predicted(PREDICTION), report_to=()) as run:
        for i in range(1, steps + 1):
            seconds = (9.0 if i <= WARM else 0.5) * every
            run.record(i * every, {"loss": 1.0, **(more or {})}, seconds, 10)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_prediction_is_reported_once_after_warmup(tmp_path, capsys):
    lines = run_of(tmp_path, WARM + ENOUGH + 3)
    said = capsys.readouterr().err
    assert said.count("a step takes 500 ms (median), predicted 400 ms to 1 s") == 1
    assert not [name for name in lines[0] if name.startswith("predicted")]  # constants: no curves of TensorBoard's


def test_a_short_run_reports_the_prediction_at_its_end(tmp_path, capsys):
    run_of(tmp_path / "a", WARM + 1)
    assert "a step takes 500 ms" in capsys.readouterr().err
    run_of(tmp_path / "b", WARM)
    assert "a step takes" not in capsys.readouterr().err


def test_lines_of_several_steps_and_steps_with_other_work(tmp_path):
    lines = run_of(tmp_path, 4, {"rollout_seconds": 1.0}, every=2)  # all of it was the rollout
    assert lines[-1]["seconds"] == 1.0
    assert summary.step_seconds(summary.read(tmp_path)) == 0.0
    again = run_of(tmp_path / "alone", 5, every=2)
    assert again[-1]["seconds"] == 1.0 and summary.step_seconds(summary.read(tmp_path / "alone")) == 0.5


def test_the_report_has_predicted_and_measured(tmp_path):
    run_of(tmp_path, 8)
    assert ("step time", "500 ms, predicted 400 ms to 1 s") in summary.summary(summary.read(tmp_path))
    (tmp_path / metrics.PREDICTION_FILE).write_text("{}")  # of another version
    assert dict(summary.summary(summary.read(tmp_path)))["step time"] == "500 ms"


def test_the_page_has_one_step_time_and_no_curve_of_a_constant(tmp_path):
    run_of(tmp_path, 8, {"token_accuracy": 0.5, "predicted_least": 0.4})  # the last as earlier versions wrote it
    page = write(tmp_path).read_text()
    titles = re.findall(r'aria-label="([^"]*)"', page)
    assert "predicted least" not in titles and titles.count("step time, seconds") == 1
    assert page.count('<div class="name">step time</div>') == 1 and ">predicted<" in page
    assert (
        "Share of the trained tokens to which the model gave the highest probability." in page
    )  # what a name means is said
