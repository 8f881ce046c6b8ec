"""Parse the names of accelerators: `v4-64`, `v5litepod-16`, `tpu7x-2x2x2`, `h200x8`, `2 x v5p-128`, `cpu`.

`parse` returns how many chips, cores, jax devices and hosts a name means, the topology, and the names that the clouds
use. A *slice* is a set of chips joined by their own links: a TPU slice, the GPUs of one machine, or (GB200) of one
rack.

The suffix of a TPU's name counts cores on some generations and chips on others; `Accelerator.explain` says which.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from dovetail.core.chips import CHIPS, CPU, FAMILIES, Chip, ChipFamily, in_order, is_slice, usual_sides
from dovetail.core.choice import did_you_mean
from dovetail.core.errors import UserError

GPUS_OF_A_HOST = 8


_SPELT = {word: name for name, family in FAMILIES.items() for word in (family.prefix, *family.spellings)}
_EXAMPLES = "v5litepod-16, v4-64, tpu7x-2x2x2, h200x8 or 2 x v5p-128"


@dataclass(frozen=True)
class Accelerator:
    """Describe a number of equal slices. A number without `total_` is that of one slice."""

    chip: Chip | None  # None: a CPU
    sides: tuple[int, ...]  # of the torus; for GPUs, (how many,)
    slices: int = 1

    @property
    def family(self) -> ChipFamily:
        """Return how the clouds name and group the chip."""
        return FAMILIES.get(self.chip.name, CPU) if self.chip else CPU

    @property
    def is_tpu(self) -> bool:
        """Return whether the chips are TPUs."""
        return self.family.sides > 0

    @property
    def chips(self) -> int:
        """Return the number of chips."""
        return math.prod(self.sides)

    @property
    def cores(self) -> int:
        """Return the number of cores."""
        return self.chips * self.family.cores

    @property
    def chips_per_host(self) -> int:
        """Return the chips of one host: a small slice is one host, the hosts of a larger one have four chips each."""
        fits = self.chips in self.family.hosts or (not self.is_tpu and self.chips <= max(self.family.hosts))
        return self.chips if fits else 4

    @property
    def hosts(self) -> int:
        """Return the number of hosts: the VMs of a TPU slice, the pods of a GKE job, the processes of a run."""
        return self.chips // self.chips_per_host

    @property
    def total_chips(self) -> int:
        """Return the chips of all slices."""
        return self.chips * self.slices

    @property
    def total_hosts(self) -> int:
        """Return the hosts of all slices."""
        return self.hosts * self.slices

    @property
    def total_devices(self) -> int:
        """Return the jax devices of all slices, as `jax.device_count()` counts them."""
        return self.total_chips * (self.chip.devices if self.chip else 1)

    @property
    def topology(self) -> str:
        """Return the topology, such as `2x4x4`, as GKE's node label and Cloud TPU spell it; for GPUs, their number."""
        return "x".join(map(str, self.sides))

    @property
    def slice_name(self) -> str:
        """Return the name of one slice, the cloud's own where it has one."""
        if self.family is CPU:
            return self.family.prefix
        if not self.is_tpu:
            return f"{self.family.prefix}x{self.chips}"
        return self.accelerator_type or f"{self.family.prefix}-{self.topology}"

    @property
    def name(self) -> str:
        """Return the canonical name: `parse(a.name) == a`."""
        return self.slice_name if self.slices == 1 else f"{self.slices} x {self.slice_name}"

    @property
    def accelerator_type(self) -> str | None:
        """Return the Cloud TPU API's name of a slice.

        None if the API has no name for it: GPUs, TPU7x, and a topology that is not the default for its number of chips.
        """
        if not self.chip or not self.runtime_version or self.sides != usual_sides(self.chip, self.chips):
            return None
        return f"{self.family.prefix}-{getattr(self, self.family.counts)}"

    @property
    def runtime_version(self) -> str | None:
        """Return the software version of a TPU VM.

        None if there is no TPU VM (GPUs, and TPU7x, which is on GKE only).
        """
        return self.family.runtime

    @property
    def gke_label(self) -> str | None:
        """Return the value of GKE's node label `gke-tpu-accelerator`, or of `gke-accelerator` for a GPU."""
        return self.family.gke

    @property
    def gke_resource(self) -> str | None:
        """Return the resource that a pod requests, `chips_per_host` of it."""
        return "google.com/tpu" if self.is_tpu else "nvidia.com/gpu" if self.chip else None

    @property
    def machine_type(self) -> str | None:
        """Return Google Cloud's machine type with one host's chips; None where it has none."""
        here = self.family.machine if self.chips_per_host in self.family.hosts else None
        return here.format(self.chips_per_host) if here else None

    def dollars(self, spot: bool = False) -> float | None:
        """Return the price of all slices per hour; None where no price is published."""
        price = None if self.chip is None else self.chip.spot if spot else self.chip.dollars
        return None if price is None else price * self.total_chips

    def explain(self) -> str:
        """Return one line that says what the name counts, and what follows from it."""
        if self.chip is None or self.family is CPU:
            return f"{self.name}: no accelerator, on {_count(self.total_hosts, 'machine')}"
        chips = f"{_count(self.chips, 'chip')} of {self.chip.name}"
        if self.is_tpu:
            number = getattr(self, self.family.counts)
            counted = f"{self.family.prefix}-{number} counts {self.family.counts}"
            chips += f" ({counted}, {self.family.cores} per chip)" if self.family.cores > 1 else f" ({counted})"
            chips += f" as {self.topology}"
        each = "each on" if self.slices > 1 else "on"
        where = (
            f"{each} {_count(self.hosts, 'VM' if self.is_tpu else 'machine')} of {_count(self.chips_per_host, 'chip')}"
        )
        total = f"; together {_count(self.total_chips, 'chip')}, {self.total_hosts} hosts" if self.slices > 1 else ""
        return (
            f"{self.name}: {_count(self.slices, 'slice')} of {chips} {where}{total}; "
            f"{_count(self.total_devices, 'jax device')}"
        )

    def __str__(self) -> str:
        return self.name


def parse(text: str) -> Accelerator:
    """Return the accelerator of a name: `v5e-16` (or `v5litepod-16`), `v5e:4x4`, `h200x8`, `2 x v5p-128`.

    Sides may be given in any order and are stored as the clouds write them, the shortest first. `cpu` and an empty text
    mean a machine without accelerators.
    """
    words = re.sub(r"\s+", "", str(text).lower())
    many = re.match(r"(\d+)[x×*](?=[a-z]|7x|8[ti])", words)
    slices, rest = (int(many[1]), words[many.end() :]) if many else (1, words)
    if slices < 1:
        raise UserError(f"accelerator {text!r} has no slices: expected 1 or more, as in 2 x v5p-128")
    if rest in ("", CPU.prefix):
        return Accelerator(None, (1,), slices)
    chip, size = _split(rest, text)
    one = _gpus(chip, size, text) if FAMILIES[chip.name].sides == 0 else _tpu(chip, size, text)
    return replace(one, slices=one.slices * slices)


def of_devices(chip: Chip, devices: int, slices: int = 1) -> Accelerator | None:
    """Return the default accelerator with this many jax devices in `slices` slices; None if there is none."""
    family = FAMILIES.get(chip.name)
    if family is None:
        return None
    if family.sides == 0:
        near = devices if devices <= chip.domain else math.gcd(devices, chip.domain)
        return Accelerator(chip, (near,), devices // near)
    chips, left = divmod(devices, chip.devices * slices)
    sides = usual_sides(chip, chips) if not left else None
    return Accelerator(chip, sides, slices) if sides else None


def _split(words: str, text: str) -> tuple[Chip, str]:
    """Split a name into its chip and the rest; a leading `tpu-`, as in `tpu-v5e-4`, is dropped."""
    words = re.sub(r"^tpu-?(?=v\d)", "", words)
    for spelt in sorted(_SPELT, key=len, reverse=True):
        match = re.fullmatch(re.escape(spelt) + r"(?:[-:x](\d+(?:x\d+)*))?", words)
        if match:
            return CHIPS[_SPELT[spelt]], match[1] or ""
    hint = did_you_mean(re.split(r"[-:]", words)[0], _SPELT)
    raise UserError(f"no accelerator {text!r}.{hint} Expected a chip and a size, such as {_EXAMPLES}")


def _gpus(chip: Chip, size: str, text: str) -> Accelerator:
    if "x" in size:
        raise UserError(f"accelerator {text!r}: a GPU has a count and no topology; write {chip.name.lower()}x8")
    count, host, domain = int(size or 1), max(FAMILIES[chip.name].hosts), chip.domain
    whole, left = divmod(count, domain)
    parts = count <= host or (count < domain and count % host == 0)
    if count < 1 or not (parts or (whole and not left)):
        racks = f", multiples of {host} up to {domain}" if domain > host else ""
        raise UserError(
            f"accelerator {text!r}: expected 1 to {host} GPUs{racks}, or whole {_domains(chip)} of {domain}; write "
            f"{chip.name.lower()}x{max(whole, 1) * domain}, or 3 x {chip.name.lower()}x4 for parts of them"
        )
    return Accelerator(chip, (count if parts else domain,), 1 if parts else whole)


def _domains(chip: Chip) -> str:
    """Describe what NVLink joins."""
    return "machines" if chip.domain <= GPUS_OF_A_HOST else "racks"


def _tpu(chip: Chip, size: str, text: str) -> Accelerator:
    family = FAMILIES[chip.name]
    if not size:
        raise UserError(f"accelerator {text!r} has no size: name a slice, such as {_nearest(chip, 16)}")
    if "x" in size:
        sides = in_order(tuple(int(side) for side in size.split("x")), family)
        chips = math.prod(sides)
        if not is_slice(chip, sides):
            raise UserError(
                f"accelerator {text!r}: {chip.name} has no slice {size}; the nearest by chips: {_nearest(chip, chips)}"
            )
        return Accelerator(chip, sides)
    per_chip = family.cores if family.counts == "cores" else 1
    chips, left = divmod(int(size), per_chip)
    usual = usual_sides(chip, chips) if not left else None
    if usual is None:
        means = f"the number counts {family.counts}" + (f", {per_chip} per chip" if per_chip > 1 else "")
        raise UserError(
            f"accelerator {text!r}: no slice of {chip.name} has that size ({means}); the nearest: "
            f"{_nearest(chip, chips)}"
        )
    return Accelerator(chip, usual)


def _nearest(chip: Chip, chips: int) -> str:
    """Return the names of the slices just below and just above this many chips."""
    pod = chip.pod or GPUS_OF_A_HOST
    down = next((n for n in range(min(chips, pod), 0, -1) if usual_sides(chip, n)), None)
    up = next((n for n in range(max(chips, 1), pod + 1) if usual_sides(chip, n)), None)
    found = [Accelerator(chip, usual_sides(chip, n) or ()).slice_name for n in dict.fromkeys((down, up)) if n]
    return " and ".join(found)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
