"""A run on rows that are open: from its newest checkpoint, or new weights, to its report."""

from __future__ import annotations

import platform as machine
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from dovetail.core.chips import chip_of
from dovetail.core.files import write_atomic
from dovetail.core.recipe import dump
from dovetail.io.checkpoint import Checkpoints
from dovetail.io.tokenizer import Tokenizer
from dovetail.plan.flops import train_flops_per_token
from dovetail.train.boundary import Boundary
from dovetail.train.guard import health
from dovetail.train.guard.doctor import Doctor
from dovetail.train.guard.exits import PREEMPTED
from dovetail.train.guard.stop import Stop
from dovetail.train.guard.watchdog import Watchdog
from dovetail.train.loop import Loop
from dovetail.train.position import Position
from dovetail.train.predict import predict
from dovetail.train.prepare import Ready
from dovetail.train.recorded import recipe_text
from dovetail.train.report import page, predicted
from dovetail.train.report.goodput import Goodput
from dovetail.train.report.metrics import Remarks, RunMetrics, Work
from dovetail.train.report.waiting import waiting_alone
from dovetail.train.rows import Batches, Rows, Samples, Source
from dovetail.train.saves import Saves

IN_GOOD_ORDER = (0, PREEMPTED, 130)  # exit codes of runs whose last state is saved


@dataclass(frozen=True)
class Ran:
    code: int  # of train.guard.exits, 0 or 130
    at: Position  # where it ended
    began: int  # the step after which it began: 0 of a new run
    checkpoints: Checkpoints
    goodput: Goodput
    remarks: list[str]  # made before the first step


def run(
    ready: Ready,
    folder: Path,
    rows: Rows | Source,
    held_out: Rows | None = None,
    tokenizer: Tokenizer | None = None,
    samples: Samples | None = None,
    *,
    inputs: Mapping[str, str] = {},
    goodput: Goodput | None = None,
    show: bool = True,
    stop: Stop | None = None,
    on_hang: Callable[[str], object] | None = None,
) -> Ran:
    """Train until the end, a signal or a fault. `tokenizer` is what exports carry; for `samples` and `inputs` see
    train.rows.Opened."""
    settings, first = ready.settings, jax.process_index() == 0
    goodput, stop, remarks = goodput or Goodput(), stop or Stop(), Remarks()
    folder.mkdir(parents=True, exist_ok=True)
    with Saves(ready, folder, goodput, remarks, inputs) as saves, stop:
        with waiting_alone("reading the weights") if show and first else nullcontext():
            at = saves.open()
        began = at.step
        if first:
            write_atomic(folder / "recipe.yaml", recipe_text(settings))
        expected = _expected(ready, folder, remarks) if first else None
        with (
            RunMetrics(
                folder, steps=settings.total_steps, step=at.step, work=_work(ready), goodput=goodput,
                predicted=expected, first=first, show=show, report_to=settings.report_to, config=dump(settings),
            ) as metrics,
            Watchdog(settings.health.hang_seconds, folder, on_hang) as watchdog,
        ):  # fmt: skip
            remarks.show_with(metrics.remark)
            boundary = Boundary(ready, folder, saves, metrics, goodput, held_out, tokenizer, samples)
            source = rows if isinstance(rows, Source) else Batches(rows)
            loop = Loop(
                ready, source, at, saves=saves, boundary=boundary, doctor=_doctor(ready, folder),
                metrics=metrics, goodput=goodput, watchdog=watchdog, stop=stop,
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
    return Ran(code, at, began, saves.checkpoints, goodput, remarks.early)


def _expected(ready: Ready, folder: Path, remarks: Remarks) -> predicted.Predicted | None:
    """What a step should take, said before the first one and kept beside what is measured."""
    found = predict(ready)
    if isinstance(found, str):
        remarks(found)
        return None
    remarks(found.says)
    predicted.save(folder, found)
    return predicted.Predicted(found)


def _doctor(ready: Ready, folder: Path) -> Doctor:
    owners = {d.id: (d.process_index, _host_of(d)) for d in jax.devices()}
    layout = jax.tree.map(lambda leaf: leaf.sharding.spec, ready.form.params)
    return Doctor(
        ready.settings.health, folder, process=jax.process_index(), owners=owners,
        replicas=health.replicas(ready.placement.mesh, layout), exact=ready.platform == "cpu",
    )  # fmt: skip


def _host_of(device: Any) -> str:
    return machine.node() if device.process_index == jax.process_index() else f"process {device.process_index}"


def _work(ready: Ready) -> Work:
    cfg, length, frozen = ready.cfg, ready.settings.length, ready.settings.adapter is not None
    chip = chip_of(jax.devices()[0])
    peak = chip.device_bf16 * jax.device_count() if chip and chip.device_bf16 else None
    full, causal = (train_flops_per_token(cfg, length, causal, frozen) for causal in (False, True))
    return Work(full, causal, peak)
