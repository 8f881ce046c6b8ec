"""Bound the time of an engine's steps on one replica, from the chip's peaks and the bytes that a step reads and sends.

*At best* attention and the other products run one after the other, each bound by the slower of arithmetic and memory at
the chip's peak, and collectives overlap with them: a decode step takes KV / bandwidth + max(FLOPs / peak, weights /
bandwidth). *At worst* nothing overlaps, kernels reach half of the peaks, each small kernel waits for its launch, and
the host takes a millisecond per step. A well-made engine is between the two.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from dovetail.core.accelerator import Accelerator
from dovetail.core.chips import Chip
from dovetail.core.errors import UserError
from dovetail.models.config import Attention, Layer, ModelConfig
from dovetail.models.draft.draft import DraftModel
from dovetail.plan.calibration import Fractions
from dovetail.plan.exchange import collective
from dovetail.plan.links import MEMORY_OF_A_HOST, AxisSpan, layout
from dovetail.plan.serve_memory import (
    HELD,
    STEP_TOKENS,
    compute_dtype,
    local_rows,
    local_size,
    local_weights,
    page_parts,
    platform_of,
)
from dovetail.plan.serve_memory import placement as placement_on

WORST = 0.5  # fraction of a peak at worst: a kernel below it has a fault
KERNELS = 16  # per layer without fusion: products, norms, rotation, page write, attention, activation, sums
# Seconds that each kernel waits for at worst: a launch from the host on a GPU; TPUs and CPUs run one program.
LAUNCH = {"cuda": 5e-6, "tpu": 1e-6, "cpu": 1e-6}
HOST = 1e-3  # per step at worst: scheduling, packing, fetching tokens
# Fractions of the bf16 peak. NVIDIA GPUs compute f32 without tensor cores (H100: 67 of 989 TFLOP/s, A100: 19.5 of 312;
# data sheets) and TF32 at half the rate; a TPU computes f32 as six bf16 products (jax's "highest").
PEAK_SHARE = {"cuda": {"tf32": 0.5, "f32": 1 / 15}, "tpu": {"tf32": 1 / 6, "f32": 1 / 6}, "cpu": {}}


@dataclass(frozen=True)
class Bounds:
    """Hold a quantity, mostly seconds, at best and at worst, and as calibrated if that is known."""

    best: float
    worst: float
    likely: float | None = None

    def __add__(self, other: Bounds) -> Bounds:
        likely = None if self.likely is None or other.likely is None else self.likely + other.likely
        return Bounds(self.best + other.best, self.worst + other.worst, likely)

    def times(self, factor: float) -> Bounds:
        """Return the bounds multiplied by `factor`."""
        return Bounds(self.best * factor, self.worst * factor, None if self.likely is None else self.likely * factor)


@dataclass(frozen=True)
class Replica:
    """Describe an engine on `tensor` devices of an accelerator."""

    cfg: ModelConfig
    accelerator: Accelerator
    tensor: int = 1
    dtype: str = "bf16"
    kv: str = ""
    fractions: Fractions | None = None
    spread: bool = False  # over several machines: see plan.serve_memory
    draft: DraftModel | None = None  # its memory is planned; times are those of decode steps, without draft tokens

    # --- a decode step ------------------------------------------------------------------------------------------------

    def decode(self, batch: int, context: float) -> Bounds:
        """Return the time of a decode step: one token for each of `batch` sequences with `context` tokens."""
        products = batch * self.decode_flops / self.peak
        read = self.weight_bytes(batch) / self.bandwidth
        attended = batch * self.attention_flops(context) / self.peak
        keys = batch * self.kv_bytes(context) / self.bandwidth
        return self._bounds(products, read, attended, keys, self.sent(batch, batch))

    def weight_bytes(self, tokens: int) -> float:
        """Return the bytes of weights that a step with `tokens` tokens reads on a device.

        An embedding that is only looked up does not count, nor do experts that no token chose, assuming that tokens
        choose evenly.
        """
        total = 0.0
        for one, size in self._weights:
            if one.active == 0.0 and one.axes[0] == "vocab":
                continue
            is_expert = "experts" in one.axes and 0 < one.active < 1
            total += size * (1 - (1 - one.active) ** tokens if is_expert else 1)
        return total

    def kv_bytes(self, context: float) -> float:
        """Return the bytes of KV pages that one sequence's attention reads on a device, at most its window."""
        rows, total = local_rows(self.cfg.layers, self.chip, self.tensor, self.kv or self.dtype, self.spread), 0.0
        for layer, row in zip(self.cfg.layers, rows, strict=True):
            own = rows[layer.attn.kv_from] if row is None and layer.attn.kv_from is not None else row
            total += (own or 0) * layer.attn.keys_seen(context)
        return total

    @property
    def critical_batch(self) -> float:
        """Return the batch at which a decode step's products take as long as reading the weights."""
        each = self.decode_flops / self.peak
        return self.weight_bytes(1 << 30) / self.bandwidth / each

    @property
    def decode_flops(self) -> float:
        """Return the FLOPs of one token's products on a device, without attention."""
        return self._flops + self._head_flops

    # --- prompts ------------------------------------------------------------------------------------------------------

    def prompt(self, tokens: int) -> Bounds:
        """Return the time to first token of a single prompt."""
        steps = -(-tokens // self.step_tokens)
        return self._prompts(tokens, steps, min(tokens, self.step_tokens))

    def prompt_among_many(self, tokens: int) -> Bounds:
        """Return one prompt's share of steps that many prompts fill."""
        return self._prompts(tokens, tokens / self.step_tokens, self.step_tokens)

    def _prompts(self, tokens: int, steps: float, together: int) -> Bounds:
        products = (tokens * self._flops + self._head_flops) / self.peak
        attended = tokens * self.attention_flops(tokens / 2) / self.peak
        read = steps * self.weight_bytes(together) / self.bandwidth
        keys = self.kv_bytes(tokens) / self.bandwidth  # read at least once
        return self._bounds(products, read, attended, keys, self.sent(tokens, 1), steps)

    # --- both ---------------------------------------------------------------------------------------------------------

    def per_token(self, batch: int, prompt: int, output: int) -> Bounds:
        """Return the time between two tokens of a sequence while `batch` sequences start and end.

        Prompts of new sequences run between decode steps.
        """
        return self.decode(batch, prompt + output / 2) + self.prompt_among_many(prompt).times(batch / output)

    def _bounds(
        self, products: float, read: float, attended: float, keys: float, sent: float, steps: float = 1.0
    ) -> Bounds:
        best = max(max(products, read) + max(attended, keys), sent)
        small = steps * (HOST + len(self.cfg.layers) * KERNELS * LAUNCH[self.platform])
        worst = (products + read + attended + keys + sent) / WORST + small
        return Bounds(best, worst, self._likely(products, read, attended, keys, sent))

    def _likely(self, products: float, read: float, attended: float, keys: float, sent: float) -> float | None:
        """Return the time at the calibrated fractions; None if those that bound the step are not known."""
        known = self.fractions
        if known is None:
            return None
        total = sent / (known.links or 1.0)
        for arithmetic, memory in ((products, read), (attended, keys)):
            share = known.products if arithmetic >= memory else known.memory
            if share is None:
                return None
            total += max(arithmetic, memory) / share
        return total

    # --- the chip -----------------------------------------------------------------------------------------------------

    @property
    def chip(self) -> Chip:
        """Return the kind of chip.

        Raises:
            UserError: The machine is not in the table of chips.
        """
        if self.accelerator.chip is None:
            raise UserError("there is no prediction for this machine: it is not in the table of chips", param="--on")
        return self.accelerator.chip

    @property
    def platform(self) -> str:
        """Return the chip's platform as jax names it."""
        return platform_of(self.chip)

    @property
    def machines(self) -> int:
        """Return the number of machines that the replica's devices are on."""
        return -(-self.tensor // machine_devices(self.accelerator))

    @property
    def peak(self) -> float:
        """Return the FLOP/s of one device in the compute dtype."""
        return self.chip.device_bf16 * PEAK_SHARE[self.platform].get(compute_dtype(self.dtype), 1.0)

    @property
    def bandwidth(self) -> float:
        """Return the bytes/s of one device's memory."""
        return self.chip.bandwidth / self.chip.devices

    @property
    def step_tokens(self) -> int:
        """Return the most tokens of a step."""
        return STEP_TOKENS[self.platform]

    @functools.cached_property
    def span(self) -> AxisSpan | None:
        """Return the links between the devices of the replica; None for one device."""
        if self.tensor == 1:
            return None
        if not self.chip.kinds:  # the cores of one machine
            return AxisSpan("tensor", self.tensor, (), "memory", MEMORY_OF_A_HOST)
        axes = {"data": self.accelerator.total_devices // self.tensor, "tensor": self.tensor}
        return next(one for one in layout(self.accelerator, axes) if one.axis == "tensor")

    # --- the model ----------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _weights(self):
        return local_weights(self.cfg, self.chip, self.tensor, self.dtype, self.spread, tower=False)

    @functools.cached_property
    def _flops(self) -> float:
        """Return the FLOPs of one token's products on a device, without the head."""
        place = placement_on(self.chip, self.tensor)
        whole = sum(2.0 * local_size(one, place, self.spread) * one.active for one, _ in self._weights)
        return whole - self._head_flops

    @functools.cached_property
    def _head_flops(self) -> float:
        place = placement_on(self.chip, self.tensor)
        heads = [one for one, _ in self._weights if one.axes[0] == "vocab" and one.active]
        return sum(2.0 * local_size(one, place) * one.active for one in heads)

    def attention_flops(self, context: float) -> float:
        """Return the FLOPs of one token's attention on a device.

        Heads are split as their pages are. Queries attend to a latent as it is cached: its up-projections are folded
        into them.
        """
        place, total = placement_on(self.chip, self.tensor), 0.0
        for layer in self.cfg.layers:
            total += (
                _flops_per_key(layer)
                * layer.attn.keys_seen(context)
                / _head_parts(layer, self.tensor, place, self.spread)
            )
        return total

    def sent(self, tokens: int, rows: int) -> float:
        """Return the seconds of a step's collectives.

        The outputs of attention and feed-forward and the looked-up embeddings are summed over the devices, and the
        logits of each sampled row are gathered.
        """
        if self.span is None:
            return 0.0
        sums, split = 0, self.tensor
        for layer in self.cfg.layers:
            sums += layer.attn.heads % split == 0
            sums += any(part.width % split == 0 for part in (layer.mlp, layer.moe) if part)
        gathered = 0.0
        if self.cfg.vocab % split == 0:
            sums, gathered = sums + 1, collective("all-gather", rows * self.cfg.vocab * 4.0, self.span)[1]
        each = tokens * self.cfg.dim * HELD[compute_dtype(self.dtype)]
        return sums * collective("all-reduce", each, self.span)[1] + gathered


def machine_devices(accelerator: Accelerator) -> int:
    """Return how many jax devices one machine has."""
    return accelerator.chips_per_host * (accelerator.chip.devices if accelerator.chip else 1)


def _flops_per_key(layer: Layer) -> float:
    attn = layer.attn
    if isinstance(attn, Attention):
        return attn.flops_per_key
    return 2.0 * attn.heads * (2 * attn.kv_rank + attn.rope_dim)


def _head_parts(layer: Layer, tensor: int, place, spread: bool) -> int:
    if isinstance(layer.attn, Attention) and not spread:
        return page_parts(layer, place)
    return tensor if layer.attn.heads % tensor == 0 else 1
