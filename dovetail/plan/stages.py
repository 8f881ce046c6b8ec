"""What a pipeline would do: an estimate only, for our trainer has no such axis (its mesh is data, fsdp, expert, context
and tensor).

The layers are dealt out over P stages of equal size, each on its own P-th of the devices. Of M microbatches a stage
works on M and waits for P - 1 (GPipe's bubble, (P - 1) / (M + P - 1) of the time); between stages only the hidden
states travel, there and back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dovetail.core.errors import UserError
from dovetail.plan.memory import BYTES
from dovetail.plan.plans import axes_of, row_shards
from dovetail.plan.train_plan import TrainPlan

MICROBATCHES = 4  # for each stage, where the batch has so many rows: the bubble is then a fifth


@dataclass(frozen=True)
class Staged:
    stages: int
    microbatches: int
    bubble: float  # the share of the time in which a stage waits
    sent: float  # seconds of hidden states between stages
    lower: float
    upper: float
    says: str


def staged(one: TrainPlan, stages: int) -> Staged:
    """The best plan with its data or fsdp axis cut by `stages`, and its layers dealt out over those devices."""
    mesh, layers = one.plan.mesh, len(one.cfg.layers)
    if layers % stages:
        raise UserError(f"--stages {stages} must divide the model's {layers} layers")
    cut = "data" if mesh.data % stages == 0 else "fsdp"
    if getattr(mesh, cut) % stages:
        raise UserError(f"--stages {stages} must divide data or fsdp of the best mesh, {axes_of(mesh)}")
    smaller = replace(mesh, **{cut: getattr(mesh, cut) // stages})
    rows = one.settings.batch // row_shards(smaller)
    micro = max(1, min(rows, MICROBATCHES * stages))
    bubble = (stages - 1) / (micro + stages - 1)
    tokens = rows * one.settings.length // mesh.context
    states = 2 * tokens * one.cfg.dim * BYTES[one.settings.precision.compute]
    link = min((span.far_bandwidth or span.bandwidth for span in one.spans), default=one.chip.bandwidth)
    sent = states / link
    # weights of a stage are gathered by fewer devices, each of which has as many of them as before
    lower, upper = one.time.lower / (1 - bubble), one.time.upper / (1 - bubble) + sent
    verdict = "slower" if lower + upper > one.time.lower + one.time.upper else "faster"
    says = (
        f"what if: {stages} stages of {layers // stages} layers, {micro} microbatches: {bubble:.0%} of the time is "
        f"bubble, {sent:.3g} s of a step go to hidden states between stages; a step takes {lower:.3g} - {upper:.3g} s, "
        f"{verdict} than the best above. Our trainer has no pipeline axis: this is an estimate to compare with others"
    )
    return Staged(stages, micro, bubble, sent, lower, upper, says)
