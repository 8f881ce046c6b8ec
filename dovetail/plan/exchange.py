"""What the devices of a mesh send each other in a training step: which collective, over which links, how long.

The list is that of our own trainer (core.mesh.TRAIN, train.step, ops.moe, ops.context), per microstep:

- weights are gathered over fsdp and context for the forward pass and once more for the backward pass, and their
  gradients scattered, in the compute dtype; those of the two embeddings in f32;
- gradients are summed over data, and over expert where the weight is no expert's;
- of a layer split over tensor, the outputs of attention and of the feed-forward are summed, and in the backward pass
  the gradients of their inputs; so are the looked-up embeddings and the gradient of the last hidden states;
- experts on several devices gather the tokens of all of them and scatter the sums, there and back;
- rows cut along their length gather keys and values, and scatter their gradients.

A collective over devices of which some are far sends 1/near of its bytes through the slow network, while the fast one
deals them out: the slower of the two counts.
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
# of a layer's two sums over tensor, those made again in the backward pass: where the attention's output is not kept
SUMS_AGAIN = {"none": 0, "dots": 0, "attention": 1, "full": 1}


@dataclass(frozen=True)
class Exchange:
    """All collectives of one kind and purpose in a step."""

    what: str  # "gather weights", "scatter gradients", ...
    kind: str  # all-gather, reduce-scatter, all-reduce
    axis: str  # of the mesh; several as "fsdp+context"
    over: str  # the slowest link on the way: see plan.links.Span
    bytes: float  # that a device sends
    seconds: float
    overlaps: bool  # may go on while products are computed
    count: int = 1  # collectives


def exchanges(
    cfg: ModelConfig, settings: Training, plan: MeshPlan, spans: tuple[AxisSpan, ...]
) -> tuple[Exchange, ...]:
    """Of one step, those that take longest first."""
    step = _Step(cfg, settings, plan, {span.axis: span for span in spans})
    found = [*step.weights(), *step.sums(), *step.tensor(), *step.experts(), *step.context()]
    return tuple(sorted(found, key=lambda one: -one.seconds))


def collective(kind: str, whole: float, span: AxisSpan) -> tuple[float, float]:
    """(bytes that a device sends, seconds at the links' peak) for `whole` bytes: of the gathered result, or of what is
    scattered or summed."""
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
        """Of one device in a microstep."""
        return self.plan.rows * self.settings.length // self.plan.mesh.context

    @property
    def layers(self) -> Counter[Layer]:
        extra = mtp_layers(self.cfg, self.settings)
        return _layers(self.cfg, extra)

    def over(self, *axes: str) -> AxisSpan | None:
        return joined(tuple(self.spans[axis] for axis in axes if axis in self.spans))

    def one(self, what: str, kind: str, span: AxisSpan | None, whole: float, count: int, overlaps: bool):
        """`count` collectives, of `whole` bytes together, in a microstep."""
        if span is None or not whole:
            return []
        sent, seconds = collective(kind, whole / count, span)
        times = count * self.plan.microsteps
        return [Exchange(what, kind, span.axis, span.over, sent * times, seconds * times, overlaps, times)]

    def weights(self) -> list[Exchange]:
        span, held = self.over("fsdp", "context"), _held(self.cfg, self.settings, self.plan)
        layers = sum(self.layers.values())
        # adapters' weights, which are frozen, are read forward and backward, another model's only forward
        frozen = sum(_frozen(model or self.cfg, self.plan) * (1 if model else 2) for model, _ in self.settings.frozen)
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
        whole, count = 2.0 * each, 2  # of the looked-up embeddings, and of the gradient of the last states
        for layer, number in self.layers.items():
            width = (layer.mlp is not None) + (experts if layer.moe else 0)  # experts' sums are of gathered tokens
            whole += number * each * (2 + again + 2 * width)
            count += number * (4 + again)
        # on TPUs a product is cut up and sent while the rest of it is made; on GPUs it waits
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
    """Trained weights of a device when they are whole over fsdp and context, in numbers."""

    layers: int
    experts: int
    ends: int  # the two embeddings


def _held(cfg: ModelConfig, settings: Training, plan: MeshPlan) -> _Held:
    return _weights(cfg, mtp_layers(cfg, settings), settings.adapter, plan.mesh.expert, plan.mesh.tensor)


def _frozen(cfg: ModelConfig, plan: MeshPlan) -> int:
    held = _weights(cfg, 0, None, plan.mesh.expert, plan.mesh.tensor)
    return held.layers + held.experts + held.ends


def whole_weights(cfg: ModelConfig, settings: Training, plan: MeshPlan) -> int:
    """What a device multiplies by in a microstep, in numbers."""
    held = _held(cfg, settings, plan)
    return held.layers + held.experts + held.ends + sum(_frozen(model or cfg, plan) for model, _ in settings.frozen)


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
    """Seconds of each axis's links; those of different axes may go on at the same time."""
    seconds: dict[str, float] = {}
    for one in found:
        if one.overlaps == overlapping:
            for axis in one.axis.split("+"):
                seconds[axis] = seconds.get(axis, 0.0) + one.seconds
    return seconds


def total(found: tuple[Exchange, ...]) -> float:
    return math.fsum(one.seconds for one in found)
