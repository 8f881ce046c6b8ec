"""Peak rates, memory, links and prices of accelerator chips, and how the clouds name and group them.

Figures are per chip; a device is what jax calls one. Peaks are dense, and `Chip.source` names the source and date of
each chip's figures. Prices are Google Cloud's list prices per chip and hour (August 2026); they change, and serve to
rank machines. Prices of other regions are in core.cloud. Between slices or hosts a TPU has its share of its host's
network (the book "How to Scale Your Model", 2025) and a GPU its own network card. Names and groups are from Google
Cloud's pages on each TPU, on TPUs in GKE and on machines with GPUs (August 2026).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from dovetail.core.choice import did_you_mean
from dovetail.core.errors import UserError

GIB = 2**30
TERA = 1e12
GIGA = 1e9
LOGITS_BYTES = 5 << 28  # of the logits that a device other than a CPU holds at a time while it takes the loss


@dataclass(frozen=True)
class Chip:
    """Hold the peak rates, memory, links and prices of one chip."""

    name: str
    kinds: tuple[str, ...]  # what jax's device_kind says
    bf16: float  # FLOP/s
    hbm: int  # bytes
    bandwidth: float  # of HBM, bytes/s
    network: float | None  # to other chips of the pod or node, over all its links, one way, bytes/s
    pod: int | None = None  # chips that those links join; None: what one host holds
    dollars: float | None = None  # per hour, on demand
    spot: float | None = None
    dcn: float | None = None  # across slices or hosts, bytes/s: a TPU's share of the datacentre network, a GPU's card
    devices: int = 1  # jax devices of one chip: two where its cores are not joined
    domain: int = 1  # GPUs that NVLink joins
    provisional: bool = False  # announced, and some figures derived from others: `source` says which
    source: str = ""

    @property
    def device_hbm(self) -> int:
        """Return the bytes of HBM per jax device."""
        return self.hbm // self.devices

    @property
    def device_bf16(self) -> float:
        """Return the peak bf16 FLOP/s per jax device, which MFU is relative to."""
        return self.bf16 / self.devices


def _tpu(name, kinds, bf16, hbm, bandwidth, links, pod, dollars, spot, dcn=6.25, devices=1, **more) -> Chip:
    """Return a TPU. `links` is (number, GB/s of one in one direction)."""
    network = links[0] * links[1] * GIGA
    options: dict[str, Any] = {"source": f"docs.cloud.google.com/tpu/docs/{name}, 2026-08"} | more
    return Chip(
        name, kinds, bf16 * TERA, hbm * GIB, bandwidth * TERA, network, pod,
        dollars, spot, dcn * GIGA, devices, **options,
    )  # fmt: skip


def _gpu(name, kinds, bf16, hbm, bandwidth, nvlink, dollars, spot, card, sheet, domain=8) -> Chip:
    """Return a GPU.

    `nvlink` is NVIDIA's figure, which adds both directions; `card` is the Gb/s of each GPU's network card. Memory sold
    as GB is, within 1%, GiB as CUDA counts it, except on B200 (sold as 192, CUDA shows about 179 GiB), where the
    difference stays within the margin of plans.
    """
    return Chip(
        name, kinds, bf16 * TERA, hbm * GIB, bandwidth * TERA, nvlink / 2 * GIGA, None, dollars, spot,
        card / 8 * GIGA, domain=domain, source=f"NVIDIA, {sheet}",
    )  # fmt: skip


_JOUPPI = "Jouppi et al., Communications of the ACM 63(7), 2020; HBM: docs.cloud.google.com/tpu/docs, 2026-08"
_EIGHTH = (
    "Google Cloud Next, 2026-04: HBM, its bandwidth, the pod, 19.2 Tb/s of links and FP4 peak ({} PF); "
    "bf16 is assumed to be a quarter of that, which is not published"
)
# TF/s bf16; GiB; TB/s; links; pod; $/h on demand and spot (August 2026)
CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        _tpu("v2", ("TPU v2",), 46, 16, 0.7, (4, 62), 256, 1.13, 0.34, devices=2, source=_JOUPPI),
        _tpu("v3", ("TPU v3",), 123, 32, 0.9, (4, 82), 1024, 2.00, 0.51, devices=2, source=_JOUPPI),
        _tpu("v4", ("TPU v4",), 275, 32, 1.2, (6, 45), 4096, 3.22, 0.92),
        _tpu("v5e", ("TPU v5 lite", "TPU v5e"), 197, 16, 0.82, (4, 45), 256, 1.20, 0.34, dcn=3.1),
        _tpu("v5p", ("TPU v5", "TPU v5p"), 459, 95, 2.77, (6, 90), 8960, 4.20, 0.81),
        # spot between 0.28 and 1.54 by region: the dearer one
        _tpu("v6e", ("TPU v6 lite", "TPU v6e"), 918, 32, 1.64, (4, 90), 256, 2.70, 1.54, dcn=12.5),
        # 1,200 GB/s per chip, both directions together, over six links; priced by contract
        _tpu("TPU7x", ("TPU7x",), 2307, 192, 7.4, (6, 100), 9216, None, None, devices=2),
        _tpu("TPU8t", ("TPU8t",), 3150, 216, 6.5, (6, 200), 9600, None, None, provisional=True,
             source=_EIGHTH.format(12.6)),
        # its network is not a torus: it is planned as one, with more hops than it has
        _tpu("TPU8i", ("TPU8i",), 2525, 288, 8.6, (6, 200), 1024, None, None, devices=2, provisional=True,
             source=_EIGHTH.format(10.1)),
        _gpu("A100-40GB", ("NVIDIA A100-SXM4-40GB",), 312, 40, 1.6, 600, 3.93, 2.27, 200,
             "A100 data sheet, 2021-06; DGX A100's cards"),
        _gpu("A100", ("NVIDIA A100-SXM4-80GB",), 312, 80, 2.0, 600, 3.93, 2.27, 200,
             "A100 data sheet, 2021-06; DGX A100's cards"),
        _gpu("H100", ("NVIDIA H100 80GB HBM3",), 989, 80, 3.35, 900, 9.80, 4.85, 400,
             "H100 data sheet, 2023-04; DGX H100's cards"),
        _gpu("H200", ("NVIDIA H200",), 989, 141, 4.8, 900, 9.31, 5.38, 400,
             "H200 data sheet, 2024-11; DGX H200's cards"),
        _gpu("B200", ("NVIDIA B200",), 2250, 192, 8.0, 1800, 11.28, 4.08, 400,
             "DGX B200 data sheet, 2024-11, halved where it is with sparsity"),
        # sold by the rack of 72, by contract
        _gpu("GB200", ("NVIDIA GB200",), 2500, 186, 8.0, 1800, None, None, 400,
             "GB200 NVL72 page, 2025-03, halved where it is with sparsity", domain=72),
    )
}  # fmt: skip
# A CPU's core, in f32 and from memory: measured on a 2-core aarch64 server (2026-11; 63 GFLOP/s and 16 GB/s together).
CORE_FLOPS, CORE_BANDWIDTH = 31.5e9, 8e9
_BY_KIND = {kind.lower(): chip for chip in CHIPS.values() for kind in chip.kinds}


def chip_of(device: Any) -> Chip | None:
    """Return the chip of a jax device by its device_kind; None for a CPU and for a device that is not in the table.

    An H100 on a PCIe card, for example, has another peak than the listed one, so no share of a peak is shown for it.
    """
    return _BY_KIND.get(str(getattr(device, "device_kind", device)).strip().lower())


def chip_named(name: str) -> Chip:
    """Return the chip of a name such as `h200`, `v5e` or `TPU7x`; raise UserError for an unknown one."""
    by_name = {known.lower(): chip for known, chip in CHIPS.items()}
    chip = by_name.get(name.strip().lower()) or _BY_KIND.get(name.strip().lower())
    if chip is None:
        raise UserError(f"no chip {name!r}.{did_you_mean(name, CHIPS)} Known: {', '.join(CHIPS)}", param="chip")
    return chip


def cpu_chip(cores: int, memory: int) -> Chip:
    """Return a host without accelerators as a chip to plan on; it computes in f32.

    CPUs of two machines differ by more than two chips of one kind: a calibration of this machine takes precedence.
    """
    source = f"{cores} cores of 31.5 GFLOP/s (f32) and 8 GB/s, as measured of one on 2026-11"
    return Chip("CPU", (), cores * CORE_FLOPS, memory, cores * CORE_BANDWIDTH, None, dcn=1.25 * GIGA, source=source)


def logit_chunks(tokens: int, most: int) -> tuple[int, int]:
    """Return in how many chunks the logits of a device's tokens are computed, and the tokens of each.

    A chunk has at most `most` tokens; all have as many if at most twice as many chunks allow that.
    """
    fewest = -(-tokens // most)
    chunks = next((n for n in range(fewest, 2 * fewest) if tokens % n == 0), fewest)
    return chunks, -(-tokens // chunks)


def usable_bytes(device: Any) -> int | None:
    """Return the memory that this process may use on a device; None on a CPU, or where the driver does not say.

    On a GPU jax's XLA_CLIENT_MEM_FRACTION is already subtracted.
    """
    stats = device.memory_stats() if getattr(device, "platform", "cpu") != "cpu" else None
    return (stats or {}).get("bytes_limit")


CUBE = 4  # the side of a 3-D pod's building block: from one block on, every side is a multiple of it


@dataclass(frozen=True)
class ChipFamily:
    """Describe how the clouds name a chip and group it into machines."""

    prefix: str  # of the cloud's name of a slice
    spellings: tuple[str, ...]  # as people type it, besides
    gke: str | None  # the value of GKE's node label; None: GKE does not have it
    machine: str | None  # the type of a machine, with {} for its number of chips
    hosts: tuple[int, ...]  # chips that a single machine may have
    sides: int = 0  # of the torus; 0: a GPU
    cores: int = 1  # of one chip
    counts: Literal["chips", "cores"] = "chips"  # what the number in its name means
    runtime: str | None = None  # the software of a TPU VM; None: not to be had as a TPU VM


BASE = "tpu-ubuntu2204-base"
FAMILIES: dict[str, ChipFamily] = {
    "v2": ChipFamily("v2", (), None, None, (4,), 2, 2, "cores", BASE),
    "v3": ChipFamily("v3", (), "tpu-v3-slice", "ct3p-hightpu-{}t", (4,), 2, 2, "cores", BASE),
    "v4": ChipFamily("v4", (), "tpu-v4-podslice", "ct4p-hightpu-{}t", (4,), 3, 2, "cores", BASE),
    "v5e": ChipFamily(
        "v5litepod", ("v5e", "v5lite"), "tpu-v5-lite-podslice", "ct5lp-hightpu-{}t", (1, 4, 8), 2,
        runtime="v2-alpha-tpuv5-lite",
    ),
    "v5p": ChipFamily("v5p", (), "tpu-v5p-slice", "ct5p-hightpu-{}t", (4,), 3, 2, "cores", "v2-alpha-tpuv5"),
    "v6e": ChipFamily("v6e", (), "tpu-v6e-slice", "ct6e-standard-{}t", (1, 4, 8), 2, runtime="v2-alpha-tpuv6e"),
    "TPU7x": ChipFamily("tpu7x", ("7x", "v7x"), "tpu7x", "tpu7x-standard-{}t", (1, 4), 3, 2, "cores"),
    "TPU8t": ChipFamily("tpu8t", ("8t", "v8t"), None, None, (1, 4), 3),
    "TPU8i": ChipFamily("tpu8i", ("8i", "v8i"), None, None, (1, 4), 3, 2),
    "A100-40GB": ChipFamily("a100-40gb", (), "nvidia-tesla-a100", "a2-highgpu-{}g", (1, 2, 4, 8)),
    "A100": ChipFamily("a100", ("a100-80gb",), "nvidia-a100-80gb", "a2-ultragpu-{}g", (1, 2, 4, 8)),
    "H100": ChipFamily("h100", ("h100-80gb",), "nvidia-h100-80gb", "a3-highgpu-{}g", (1, 2, 4, 8)),
    "H200": ChipFamily("h200", ("h200-141gb",), "nvidia-h200-141gb", "a3-ultragpu-{}g", (8,)),
    "B200": ChipFamily("b200", (), "nvidia-b200", "a4-highgpu-{}g", (8,)),
    "GB200": ChipFamily("gb200", (), "nvidia-gb200", "a4x-highgpu-{}g", (4,)),
}  # fmt: skip
CPU = ChipFamily("cpu", (), None, None, (1,))  # a machine without accelerators: counted as one chip, itself


def usual_sides(chip: Chip, chips: int) -> tuple[int, ...] | None:
    """Return the default topology of this many chips; None if there is no such slice."""
    family = FAMILIES[chip.name]
    if family.sides == 0:
        return (chips,)
    if chips < 1 or (chip.pod and chips > chip.pod):
        return None
    if family.sides == 2:
        return _flat(chips) if chips in family.hosts or (_power(chips) and chips >= 16) else None
    return _cube(chips) if chips in family.hosts or chips >= 8 else None


def _flat(chips: int) -> tuple[int, int]:
    short = 2 ** (int(math.log2(chips)) // 2)
    return short, chips // short


def _cube(chips: int) -> tuple[int, ...] | None:
    """Return powers of two up to a block of 4x4x4, and from there on whole blocks, as near to a cube as possible."""
    small = {1: (1, 1, 1), 4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4)}
    if chips in small or chips % CUBE**3:
        return small.get(chips)
    blocks = chips // CUBE**3
    stacks = ((a, b, blocks // a // b) for a in _divisors(blocks) for b in _divisors(blocks // a))
    return tuple(CUBE * side for side in sorted(min(stacks, key=sum)))


def _divisors(number: int) -> Iterator[int]:
    return (one for one in range(1, number + 1) if number % one == 0)


def _power(number: int) -> bool:
    return number & (number - 1) == 0


def in_order(sides: tuple[int, ...], family: ChipFamily) -> tuple[int, ...]:
    """Return the sides with the shortest first and a height of 1 last.

    A 2-D torus may be given with a third side of 1.
    """
    if family.sides == 2 and len(sides) == 3 and sides[2] == 1:
        sides = sides[:2]
    ordered = tuple(sorted(sides))
    return (*ordered[1:], 1) if len(ordered) == 3 and ordered[0] == 1 else ordered


def is_slice(chip: Chip, sides: tuple[int, ...]) -> bool:
    """Return whether the clouds have a slice with these sides."""
    chips = math.prod(sides)
    if len(sides) != FAMILIES[chip.name].sides or (chip.pod and chips > chip.pod):
        return False
    blocks = len(sides) == 3 and chips > 0 and all(side % CUBE == 0 for side in sides)
    return blocks or sides == usual_sides(chip, chips)
