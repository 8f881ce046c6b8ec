"""The engine's prediction of its decode steps on the devices of this machine."""

import jax

from dovetail.core.compute import compute_of
from dovetail.engine.schedule.step_time import predictor, rates
from dovetail.models.config import scored
from dovetail.models.registry import read_model
from dovetail.plan.serve_time import Bounds


class Unknown:
    platform, device_kind = "gpu", "NVIDIA Voodoo 2"


def test_a_cpu_is_predicted_from_its_cores():
    cfg = read_model("smollm2-135m")
    made = predictor(cfg, compute_of("f32"), jax.devices()[:1])
    one, many = made.decode(1, 100), made.decode(64, 100)
    assert one and many and 0 < one.best < one.worst and one.best < many.best
    assert made.decode(0, 100) is None
    said = made.describe(64, 1024)
    assert said.startswith("predicted decode at 1,024 tokens, out tok/s: 1 x ") and "; 64 x " in said
    split = predictor(cfg, compute_of("f32"), jax.devices()[:2]).decode(1, 100)
    assert split and split.worst != one.worst


def test_a_device_without_table_entry_has_no_prediction():
    cfg = read_model("tiny")
    made = predictor(cfg, compute_of("bf16"), [Unknown()])
    assert made.decode(1, 1) is None
    assert made.describe(1, 1) == "no prediction: NVIDIA Voodoo 2 is not in the table of chips"
    assert "reward model" in predictor(scored(cfg), compute_of("f32"), jax.devices()[:1]).why


def test_rates_are_tokens_per_second_of_all():
    assert rates(Bounds(0.01, 0.02), 8) == "400 to 800"
    assert rates(Bounds(0.01, 0.02, likely=0.016), 8) == "500, within 400 to 800"
