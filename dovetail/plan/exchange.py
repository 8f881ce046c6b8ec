"""List the collectives of a training step: their kind, the links that they use and their time.

The list follows Dovetail's trainer (core.mesh.TRAIN, train.step, ops.moe, ops.context). Per microstep:

- weights are gathered over fsdp and context for the forward pass and again for the backward pass, and their gradients
  are scattered, in the compute dtype; the gradients of the two embeddings are in f32;
- gradients are summed over data and, except those of experts, over expert;
- a layer that is split over tensor sums the outputs of attention and feed-forward, and in the backward pass the
  gradients of their inputs; the looked-up embeddings and the gradient of the last hidden states are summed too;
- experts on several devices gather the tokens of all of them and scatter the sums, forward and backward;
- rows that are split along their length gather keys and values and scatter their gradients.

A collective that spans slices or machines sends 1/near of its bytes through the slow network while the fast links
distribute them: the slower of the two determines the time.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from dovetail.core.training import Training
from dovetail.models.config import Layer, ModelConfig
from dovetail.models.mtp import mtp_layer
from dovetail.plan.links import AxisSpan, joined
from dovetail.plan.plans import MeshPlan
from dovetail.plan.train_memory import BYTES, local_size, mtp_layers, placement_of, shapes_of

SUM = 4  # bytes of a number of an embedding's gradient
CHOICE = 8  # bytes of an expert's number and weight, for each of a token's choices
# How many of a layer's two sums over tensor are repeated in the backward pass, by remat policy.
SUMS_AGAIN = {"none": 0, "dots": 0, "attention": 1, "full": 1}


@dataclass(frozen=True)
class Exchange:
    """Hold the sum of all collectives of one kind and purpose in a step."""

    what: str  # "gather weights", "scatter gradients", ...
    kind: str  # all-gather, reduce-scatter, all-reduce
    axis: str  # of the mesh; several as "fsdp+context"
    over: str  # the slowest link on the way: see plan.links.AxisSpan
    bytes: float  # bytes that a device sends
    seconds: float
    overlaps: bool  # whether it may overlap with computation
    count: int = 1  # collectives


def exchanges(
    cfg: ModelConfig, settings: Training, plan: MeshPlan, spans: tuple[AxisSpan, ...]
) -> tuple[Exchange, ...]:
    """Return the collectives of one step, the longest first. `spans`: plan.links.layout of the plan's mesh."""
    step = _Step(cfg, settings, plan, {span.axis: span for span in spans})
    found = [*step.weights(), *step.sums(), *step.tensor(), *step.experts(), *step.context()]
    return tuple(sorted(found, key=lambda one: -one.seconds))


def collective(kind: str, whole: float, span: AxisSpan) -> tuple[float, float]:
    """Return (bytes that a device sends, seconds at the links' peak) of one collective.

    Args:
        kind: all-gather, reduce-scatter or all-reduce.
        whole: Bytes of the gathered result, or of the array that is scattered or summed.
        span: The links.
    """
    near, far = span.near, span.far
    times = 2 if kind == "all-reduce" else 1
    here = times * whole * (near - 1) / near
    away = times * whole / near * (far - 1) / far
    seconds = max(here / span.bandwidth if here else 0.0, away / span.far_bandwidth if span.far_bandwidth else 0.0)
    return here + away, seconds + times * span.hops


@dataclass(frozen=True)
class _Step:
    cfg: ModelConfig
    settings: Training
    plan: MeshPlan
    spans: Mapping[str, AxisSpan]

    @property
    def itemsize(self) -> int:
        return BYTES[self.settings.precision.compute]

    @property
    def tokens(self) -> int:
        """Return the tokens of one device in a microstep."""
        return self.plan.rows * self.settings.length // self.plan.mesh.context

    @property
    def layers(self) -> Counter[Layer]:
        extra = mtp_layers(self.cfg, self.settings)
        return _layers(self.cfg, extra)

    def over(self, *axes: str) -> AxisSpan | None:
        return joined(tuple(self.spans[axis] for axis in axes if axis in self.spans))

    def one(self, what: str, kind: str, span: AxisSpan | None, whole: float, count: int, overlaps: bool):
        """Return `count` collectives per microstep with `whole` bytes together; none without links or bytes."""
        if span is None or not whole:
            return []
        sent, seconds = collective(kind, whole / count, span)
        times = count * self.plan.microsteps
        return [Exchange(what, kind, span.axis, span.over, sent * times, seconds * times, overlaps, times)]

    def weights(self) -> list[Exchange]:
        span, held = self.over("fsdp", "context"), _held(self.cfg, self.settings, self.plan)
        layers = sum(self.layers.values())
        # the frozen weights under adapters are read forward and backward, those of another model only forward
        models = self.settings.step_models.frozen
        frozen = sum(_frozen(model or self.cfg, self.plan) * (1 if model else 2) for model, _ in models)
        gathered = (2 * (held.layers + held.experts + held.ends) + frozen) * self.itemsize
        scattered = (held.layers + held.experts) * self.itemsize + held.ends * SUM
        return [
            *self.one("gather weights", "all-gather", span, gathered, 2 * layers, True),
            *self.one("scatter gradients", "reduce-scatter", span, scattered, layers, True),
        ]

    def sums(self) -> list[Exchange]:
        held, parts = _held(self.cfg, self.settings, self.plan), self.plan.mesh.fsdp * self.plan.mesh.context
        layers = sum(self.layers.values())
        dense = (held.layers * self.itemsize + held.ends * SUM) / parts
        sparse = held.experts * self.itemsize / parts
        data, both = self.over("data"), self.over("data", "expert")
        if "expert" not in self.spans:
            return self.one("sum gradients", "all-reduce", data, dense + sparse, layers, True)
        return [
            *self.one("sum gradients", "all-reduce", both, dense, layers, True),
            *self.one("sum experts' gradients", "all-reduce", data, sparse, layers, True),
        ]

    def tensor(self) -> list[Exchange]:
        span = self.over("tensor")
        if span is None:
            return []
        each = self.tokens * self.cfg.dim * self.itemsize
        again, experts = SUMS_AGAIN[self.plan.remat], self.plan.mesh.expert
        whole, count = 2.0 * each, 2  # the looked-up embeddings and the gradient of the last hidden states
        for layer, number in self.layers.items():
            width = (layer.mlp is not None) + (experts if layer.moe else 0)  # experts sum over gathered tokens
            whole += number * each * (2 + again + 2 * width)
            count += number * (4 + again)
        # on TPUs XLA splits a product and sends one part while it computes the next; on GPUs the sum waits
        return self.one("sum activations", "all-reduce", span, whole, count, span.over == "ICI")

    def experts(self) -> list[Exchange]:
        span = self.over("expert")
        if span is None:
            return []
        gathers, scatters, count = 0.0, 0.0, 0
        for layer, number in self.layers.items():
            if layer.moe:
                each = span.size * self.tokens * (self.cfg.dim * self.itemsize)
                choices = span.size * self.tokens * layer.moe.router.top_k * CHOICE
                gathers += number * (each * (2 + (self.plan.remat != "none")) + choices)
                scatters += number * 2 * each
                count += 2 * number
        return [
            *self.one("tokens to experts", "all-gather", span, gathers, max(count, 1), False),
            *self.one("tokens from experts", "reduce-scatter", span, scatters, max(count, 1), False),
        ]

    def context(self) -> list[Exchange]:
        span, tensor = self.over("context"), self.plan.mesh.tensor
        if span is None:
            return []
        gathers = scatters = count = 0
        for layer, number in self.layers.items():
            row = layer.attn.cache_row
            if row is None:
                continue
            heads = row[0] // tensor if row[0] % (2 * tensor) == 0 else row[0]
            seen = min(self.settings.length, layer.attn.keys_seen(self.settings.length) + self.tokens / self.plan.rows)
            each = self.plan.rows * seen * heads * row[1] * self.itemsize
            gathers += number * each * (2 + (self.plan.remat == "full"))
            scatters += number * each
            count += 2 * number
        return [
            *self.one("gather keys and values", "all-gather", span, gathers, max(count, 1), True),
            *self.one("scatter their gradients", "reduce-scatter", span, scatters, max(count, 1), True),
        ]


@dataclass(frozen=True)
class _Held:
    """Hold the elements of a device's trained weights after they are gathered over fsdp and context."""

    layers: int
    experts: int
    ends: int  # the two embeddings


def _held(cfg: ModelConfig, settings: Training, plan: MeshPlan) -> _Held:
    return _weights(cfg, mtp_layers(cfg, settings), settings.step_models.adapter, plan.mesh.expert, plan.mesh.tensor)


def _frozen(cfg: ModelConfig, plan: MeshPlan) -> int:
    held = _weights(cfg, 0, None, plan.mesh.expert, plan.mesh.tensor)
    return held.layers + held.experts + held.ends


def whole_weights(cfg: ModelConfig, settings: Training, plan: MeshPlan) -> int:
    """Return the elements of all weights that a device multiplies by in a microstep."""
    held = _held(cfg, settings, plan)
    frozen = sum(_frozen(model or cfg, plan) for model, _ in settings.step_models.frozen)
    return held.layers + held.experts + held.ends + frozen


@functools.lru_cache(maxsize=1024)
def _weights(cfg: ModelConfig, mtp: int, adapter, expert: int, tensor: int) -> _Held:
    placement = placement_of({"expert": expert, "tensor": tensor})
    sizes = {"layers": 0, "experts": 0, "ends": 0}
    for shape, count in shapes_of(cfg, mtp, adapter).items():
        kind = "experts" if "experts" in shape[1] else "ends" if "vocab" in shape[1] else "layers"
        sizes[kind] += local_size(shape, placement) * count
    return _Held(**sizes)


@functools.lru_cache(maxsize=64)
def _layers(cfg: ModelConfig, mtp: int) -> Counter[Layer]:
    return Counter(cfg.layers + (mtp_layer(cfg),) * mtp)


def by_axis(found: tuple[Exchange, ...], overlapping: bool) -> dict[str, float]:
    """Return the seconds of each axis's links, which may work at the same time.

    `overlapping`: count the collectives that overlap with computation, or those that do not.
    """
    seconds: dict[str, float] = {}
    for one in found:
        if one.overlaps == overlapping:
            for axis in one.axis.split("+"):
                seconds[axis] = seconds.get(axis, 0.0) + one.seconds
    return seconds


def total(found: tuple[Exchange, ...]) -> float:
    """Return the seconds of all collectives, one after another."""
    return math.fsum(one.seconds for one in found)
