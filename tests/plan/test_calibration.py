"""Test calibration: the fractions of the peaks that runs reach, its file, and its effect on predictions."""

import json
from dataclasses import replace

import pytest
from refusals import refuses

from dovetail.core import recipe
from dovetail.core.chips import CHIPS, cpu_chip
from dovetail.models.registry import read_model
from dovetail.plan.calibration import Fractions, Observation, calibration_file, fit, fractions, store, stored
from dovetail.plan.derive import derive
from dovetail.plan.prediction import Prediction, predict_training
from dovetail.train.settings import Pretrain

ALONE = Observation("a", "H200", 1, products=0.5, memory=0.2, links=0.0, measured=1.0)
READS = Observation("b", "H200", 1, products=0.1, memory=0.8, links=0.0, measured=1.0)
SENDS = Observation("c", "H200", 8, products=0.5, memory=0.2, links=0.2, measured=1.4)
PREDICTED = Prediction("H200", 1, 0.5, 0.2, 0.0, best=0.5, worst=1.2)


def test_one_run_calibrates_what_bounds_it():
    known = fit([ALONE])
    assert (known.products, known.memory, known.links) == (0.5, None, None)
    assert known.describe() == "calibrated on a: 50% of peak in products"


def test_runs_with_different_bounds_calibrate_several_fractions():
    known = fit([ALONE, READS, SENDS])
    assert (known.products, known.memory) == (0.5, 0.8)
    assert known.links == pytest.approx(0.2 / (1.4 - 0.5 / 0.5))  # what the eight take longer than one would
    assert "calibrated on c and 2 more: 50% of peak in products, 80% of peak in memory, 50%" in known.describe()


def test_links_are_not_calibrated_without_a_run_on_one_device():
    known = fit([SENDS])
    assert known.products == pytest.approx(0.5 / 1.4) and known.links is None


def test_runs_of_several_kinds_of_chip_are_refused():
    with refuses(naming="H100, H200"):
        fit([ALONE, replace(ALONE, chip="H100")])
    with refuses(naming="at least one run"):
        fit([])


def test_the_file_has_each_run_once(tmp_path):
    path = tmp_path / "deep" / "calibration.json"
    assert stored(path) == [] and fractions("H200", path) is None
    store(ALONE, path)
    known = store(replace(ALONE, measured=2.0), path)  # the same run, longer
    assert known.products == 0.25 and len(stored(path)) == 1
    store(replace(ALONE, chip="v5e"), path)
    assert fractions("v5e", path) == Fractions("v5e", products=0.5, runs=("a",))
    path.write_text("{}")
    with refuses(naming="delete it and calibrate again"):
        stored(path)


def test_the_path_of_the_calibration(monkeypatch, tmp_path):
    monkeypatch.setenv("DOVETAIL_HOME", str(tmp_path))
    assert calibration_file() == tmp_path / "calibration.json"
    monkeypatch.delenv("DOVETAIL_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert calibration_file() == tmp_path / "data" / "dovetail" / "calibration.json"


def test_a_prediction_is_reported_before_and_after_calibration():
    assert PREDICTED.says == "a step is predicted to take 500 ms to 1.2 s (bounds, from the peaks of H200)"
    assert PREDICTED.beside(0.9) == "a step takes 900 ms (median), predicted 500 ms to 1.2 s"
    assert "slower than the upper bound" in PREDICTED.beside(2.0)
    assert "faster than the lower bound" in PREDICTED.beside(0.1)
    likely = replace(PREDICTED, likely=0.8, calibrated="calibrated on a: 62% of peak in products")
    assert likely.says.startswith("a step is predicted to take 800 ms (calibrated on a: 62%")


def test_a_calibrated_prediction_is_between_the_bounds():
    """What an H200 reached with Llama-3.2-1B's shape, learnt from it, predicts it."""
    cfg, settings = read_model("llama3-1b"), recipe.load("llama3-1b", ["batch=8", "schedule.warmup=0"], Pretrain)
    derived = derive(cfg, settings, CHIPS["H200"], 1)
    plain = predict_training(cfg, derived, CHIPS["H200"])
    measured = 8 * 4096 / 66_635  # docs/performance.md
    assert plain.best < measured < plain.worst and plain.likely is None
    known = fit([plain.observed("h200", measured)])
    assert known.products == pytest.approx(0.55, abs=0.08)
    again = predict_training(cfg, derived, CHIPS["H200"], known)
    assert again.likely == pytest.approx(measured, rel=0.01) and again.calibrated.startswith("calibrated on h200: ")
    assert Prediction(**json.loads(json.dumps(again.plain()))) == again


def test_several_devices_of_a_cpu_are_predicted_too():
    cfg, settings = read_model("tiny"), recipe.load("tiny", [], Pretrain)
    one, eight = (predict_training(cfg, derive(cfg, settings, None, n), cpu_chip(2, 8 << 30)) for n in (1, 8))
    assert one.links == 0 and eight.links > 0 and eight.products < one.products
