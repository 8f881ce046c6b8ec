"""Run the steps of a prepared training on opened rows, from the newest checkpoint or new weights to the report."""

from __future__ import annotations

import platform as machine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from dovetail.core.chips import chip_of
from dovetail.core.errors import UserError
from dovetail.core.files import write_atomic
from dovetail.core.recipe import dump
from dovetail.core.reporter import Reporter
from dovetail.io.checkpoint import Checkpoints
from dovetail.plan.calibration import fractions
from dovetail.plan.flops import train_flops_per_token
from dovetail.plan.prediction import Prediction, chip_here, predict_training
from dovetail.train.boundary import Boundary
from dovetail.train.guard import health
from dovetail.train.guard.doctor import Doctor
from dovetail.train.guard.exits import PREEMPTED
from dovetail.train.guard.stop import Stop
from dovetail.train.guard.watch import Peers, Watchdog
from dovetail.train.loop import Loop
from dovetail.train.prepare import Ready
from dovetail.train.report import page
from dovetail.train.report.goodput import Goodput
from dovetail.train.report.metrics import Predicted, RunMetrics, Work, save_prediction
from dovetail.train.rows import Batches, BatchSource, Opened
from dovetail.train.saves import Saves, recipe_text
from dovetail.train.state import Position

IN_GOOD_ORDER = (0, PREEMPTED, 130)  # exit codes of runs whose last state is saved


@dataclass(frozen=True)
class RunResult:
    """Report how a run ended."""

    code: int  # 0, 130, or one of train.guard.exits
    at: Position  # where it ended
    began: int  # the step that it continued after; 0: a new run
    checkpoints: Checkpoints
    goodput: Goodput


def run(
    ready: Ready,
    folder: Path,
    opened: Opened,
    *,
    goodput: Goodput | None = None,
    reporter: Reporter | None = None,
    stop: Stop | None = None,
    peers: Peers | None = None,
) -> RunResult:
    """Train until the end, a signal or a fault."""
    settings, first = ready.settings, jax.process_index() == 0
    goodput, stop, reporter = goodput or Goodput(), stop or Stop(), reporter or Reporter(show=first)
    folder.mkdir(parents=True, exist_ok=True)
    with Saves(ready, folder, goodput, reporter, opened) as saves, stop:
        with reporter.waiting("reading the weights"):
            at = saves.open()
        began = at.step
        if first:
            write_atomic(folder / "recipe.yaml", recipe_text(settings))
        expected = _expected(ready, folder, reporter) if first else None
        with (
            RunMetrics(
                folder, steps=settings.total_steps, step=at.step, work=_work(ready), goodput=goodput,
                predicted=expected, first=first, reporter=reporter, report_to=settings.report_to, config=dump(settings),
            ) as metrics,
            Watchdog(settings.health.hang_seconds, folder, peers) as watchdog,
        ):  # fmt: skip
            boundary = Boundary(ready, folder, opened, saves, metrics, goodput, reporter)
            source = opened.rows if isinstance(opened.rows, BatchSource) else Batches(opened.rows)
            loop = Loop(
                ready, source, at, saves=saves, boundary=boundary, doctor=_doctor(ready, folder),
                metrics=metrics, goodput=goodput, reporter=reporter, watchdog=watchdog, stop=stop,
            )  # fmt: skip
            code, at = loop.run(), loop.at
            if code in IN_GOOD_ORDER and at.step:
                with watchdog.suspend("the last save"):
                    saves.await_last(at)
        goodput.end()
        saves.checkpoints.wait()
        boundary.end()
        goodput.save()
        if first and at.step and code in IN_GOOD_ORDER:
            page.write(folder)
        saves.refuse_lost(at.step)
    return RunResult(code, at, began, saves.checkpoints, goodput)


def predict(ready: Ready) -> Prediction | str:
    """Return the predicted time of a step on this process's devices, or a sentence that says why there is none."""
    if ready.cfg.external:
        return "no prediction: the layers of a torch module are not known"
    device = ready.placement.mesh.devices.flat[0]
    chip = chip_here(device)
    if chip is None:
        return f"no prediction: {device.device_kind} is not in the table of chips"
    try:
        return predict_training(ready.cfg, ready.derived, chip, fractions(chip.name), ready.settings.mesh.slices)
    except (UserError, ArithmeticError, LookupError) as error:  # a missing prediction must not stop a run
        return f"no prediction: {error!r}"


def _expected(ready: Ready, folder: Path, reporter: Reporter) -> Predicted | None:
    """Report the predicted step time, and save it for comparison with the measured time."""
    found = predict(ready)
    if isinstance(found, str):
        reporter.note(found)
        return None
    reporter.note(found.says)
    save_prediction(folder, found)
    return Predicted(found)


def _doctor(ready: Ready, folder: Path) -> Doctor:
    owners = {d.id: (d.process_index, _host_of(d)) for d in jax.devices()}
    layout = jax.tree.map(lambda leaf: leaf.sharding.spec, ready.abstract_state.params)
    return Doctor(
        ready.settings.health, folder, process=jax.process_index(), owners=owners,
        replicas=health.replicas(ready.placement.mesh, layout), exact=ready.platform == "cpu",
    )  # fmt: skip


def _host_of(device: Any) -> str:
    return machine.node() if device.process_index == jax.process_index() else f"process {device.process_index}"


def _work(ready: Ready) -> Work:
    cfg, length, frozen = ready.cfg, ready.settings.length, ready.settings.step_models.adapter is not None
    chip = chip_of(jax.devices()[0])
    peak = chip.device_bf16 * jax.device_count() if chip and chip.device_bf16 else None
    full, causal = (train_flops_per_token(cfg, length, causal, frozen) for causal in (False, True))
    return Work(full, causal, peak)
