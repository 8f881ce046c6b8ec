"""How long a step is predicted to take on the devices of this process, or why nothing is."""

from __future__ import annotations

from dovetail.plan.calibration import fractions
from dovetail.plan.here import chip_here
from dovetail.plan.prediction import Prediction, predict_training
from dovetail.train.prepare import Ready


def predict(ready: Ready) -> Prediction | str:
    """A sentence where there is none."""
    device = ready.placement.mesh.devices.flat[0]
    chip = chip_here(device)
    if chip is None:
        return f"no prediction: {device.device_kind} is not in the table of chips"
    try:
        known = fractions(chip.name)
        return predict_training(ready.cfg, ready.derived, chip, known, ready.settings.mesh.slices)
    except (ValueError, ArithmeticError, LookupError) as error:  # whatever a plan lacks must not keep a run from going
        return f"no prediction: {error!r}"
