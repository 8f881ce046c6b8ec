"""Devices that are not here: what `v5e:16x16` means, and the devices of it that a step can be compiled for.

libtpu compiles for any TPU on a machine that has none. This module imports nothing heavy, so that the environment it
sets is there before jax is.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
from dataclasses import dataclass
from typing import Any

from dovetail.core.chips import CHIPS, Chip
from dovetail.core.choice import did_you_mean
from dovetail.core.errors import MissingPackageError, UserError
from dovetail.core.host import NO_CHIPS

# a chip of core.chips -> (libtpu's name of it, sides of its torus)
TPUS = {
    "v2": ("v2", 2), "v3": ("v3", 2), "v4": ("v4", 3), "v5e": ("v5e", 2), "v5p": ("v5p", 3), "v6e": ("v6e", 2),
    "TPU7x": ("tpu7x", 3),
}  # fmt: skip
ALSO = {"7x": "TPU7x", "tpu7x": "TPU7x", "v5litepod": "v5e", "v5lite": "v5e"}
# Several such processes may run at once, for none holds a chip.
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", **NO_CHIPS, "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


@dataclass(frozen=True)
class Topology:
    """One slice: chips of a kind in a grid."""

    chip: Chip
    sides: tuple[int, ...]

    @property
    def chips(self) -> int:
        return math.prod(self.sides)

    def __str__(self) -> str:
        return f"{self.chip.name}:{'x'.join(map(str, self.sides))}"


def parse(text: str) -> Topology:
    """`v5e:16x16`, `v4:2x2x1`, `7x:4x4x4`."""
    match = re.fullmatch(r"([\w-]+):(\d+(?:x\d+)*)", text.strip().lower())
    if match is None:
        raise UserError(f"a topology is a chip and its grid, such as v5e:16x16 or v5p:2x2x2, or gpu; got {text!r}")
    chip, sides = _chip(match[1]), tuple(int(side) for side in match[2].split("x"))
    dims = TPUS[chip.name][1]
    # a flat torus may be written with a third side of 1
    if dims == 2 and len(sides) == 3 and sides[2] == 1:
        sides = sides[:2]
    if len(sides) != dims or 0 in sides:
        example = "x".join(["4"] * dims)
        raise UserError(f"a slice of {chip.name} has {dims} sides, such as {chip.name}:{example}; got {text!r}")
    topology = Topology(chip, sides)
    if chip.pod and topology.chips > chip.pod:
        raise UserError(
            f"{text} has {topology.chips:,} chips and a slice of {chip.name} at most {chip.pod:,}: name a smaller one, "
            "and say with --slices 2 that there are several"
        )
    return topology


def _chip(name: str) -> Chip:
    known = {chip.lower(): chip for chip in TPUS} | ALSO
    if name not in known:
        hint = did_you_mean(name, known)
        raise UserError(f"no TPU {name!r} to compile for.{hint} Known: {', '.join(TPUS)}; on a machine with one, gpu")
    return CHIPS[known[name]]


def without_hardware() -> None:
    """Set the environment of a process that compiles for TPUs it does not have: before jax is imported."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def tpu_devices(topology: Topology, slices: int = 1) -> list[Any]:
    """The devices of so many slices: they can be compiled for, and nothing else."""
    if importlib.util.find_spec("libtpu") is None:
        raise MissingPackageError(
            f"compiling for {topology} needs libtpu, which is not installed: pip install 'dovetail[tpu]' (Linux; no "
            "TPU is needed)"
        )
    from jax.errors import JaxRuntimeError
    from jax.experimental import topologies

    options: dict[str, Any] = {"num_slices": slices} if slices > 1 else {}
    if topology.chip.name == "v4":
        options["chip_config_name"] = "megacore"  # a chip's two cores as one device, as every program has it
    name = f"{TPUS[topology.chip.name][0]}:{'x'.join(map(str, topology.sides))}"
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices)
    except JaxRuntimeError as error:
        reason = str(error).partition(":")[2].strip().splitlines()[0]
        raise UserError(f"libtpu does not know a slice {topology}: {reason}") from error


def gpu_devices() -> list[Any]:
    """The GPUs that are here: XLA times kernels while it compiles for one, so it must be there."""
    import jax

    devices = jax.devices()
    if devices[0].platform != "gpu":
        raise UserError(
            f"compiling for gpu needs a GPU on this machine, and jax sees {len(devices)} x {devices[0].device_kind}: "
            "run it where the GPUs are, or name a TPU slice such as v5e:4x4, which needs none"
        )
    return list(devices)
