"""Parse a TPU topology such as `v5e:16x16`, and return abstract devices of it that a step can be compiled for.

libtpu compiles for any TPU on a machine without one. This module imports nothing heavy, so that it can set the
environment before jax is imported.
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
from dovetail.core.errors import MissingPackageError, UnsupportedError, UserError
from dovetail.core.host import NO_CHIPS

# name in core.chips -> (libtpu's name, sides of the torus)
TPUS = {
    "v2": ("v2", 2), "v3": ("v3", 2), "v4": ("v4", 3), "v5e": ("v5e", 2), "v5p": ("v5p", 3), "v6e": ("v6e", 2),
    "TPU7x": ("tpu7x", 3),
}  # fmt: skip
ALSO = {"7x": "TPU7x", "tpu7x": "TPU7x", "v5litepod": "v5e", "v5lite": "v5e"}
# Several such processes may run at the same time, because none of them uses a chip.
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", **NO_CHIPS, "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


@dataclass(frozen=True)
class Topology:
    """Describe one slice: a grid of chips of one kind."""

    chip: Chip
    sides: tuple[int, ...]

    @property
    def chips(self) -> int:
        """Return the number of chips."""
        return math.prod(self.sides)

    def __str__(self) -> str:
        return f"{self.chip.name}:{'x'.join(map(str, self.sides))}"


def parse(text: str) -> Topology:
    """Parse a topology such as `v5e:16x16`, `v4:2x2x1` or `7x:4x4x4`.

    Raises:
        UserError: The text is not a topology, the chip is unknown, or the slice is larger than a pod.
    """
    match = re.fullmatch(r"([\w-]+):(\d+(?:x\d+)*)", text.strip().lower())
    if match is None:
        raise UserError(
            f"a topology must be a chip and its grid, such as v5e:16x16 or v5p:2x2x2, or gpu, got {text!r}",
            param="--topology",
        )
    chip, sides = _chip(match[1]), tuple(int(side) for side in match[2].split("x"))
    dims = TPUS[chip.name][1]
    # a torus with two sides may be written with a third side of 1
    if dims == 2 and len(sides) == 3 and sides[2] == 1:
        sides = sides[:2]
    if len(sides) != dims or 0 in sides:
        example = "x".join(["4"] * dims)
        raise UserError(
            f"a slice of {chip.name} must have {dims} sides, such as {chip.name}:{example}, got {text!r}",
            param="--topology",
        )
    topology = Topology(chip, sides)
    if chip.pod and topology.chips > chip.pod:
        raise UserError(
            f"a slice of {chip.name} must have at most {chip.pod:,} chips, got {topology.chips:,} ({text}): use a "
            "smaller slice, and several of them with --slices",
            param="--topology",
        )
    return topology


def _chip(name: str) -> Chip:
    known = {chip.lower(): chip for chip in TPUS} | ALSO
    if name not in known:
        hint = did_you_mean(name, known)
        raise UserError(
            f"there is no TPU {name!r} to compile for.{hint} Known: {', '.join(TPUS)}; on a machine with a GPU, gpu",
            param="--topology",
        )
    return CHIPS[known[name]]


def without_hardware() -> None:
    """Set the environment of a process that compiles for absent TPUs. Call it before jax is imported."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def tpu_devices(topology: Topology, slices: int = 1) -> list[Any]:
    """Return the abstract devices of `slices` slices, which can only be compiled for.

    Raises:
        MissingPackageError: libtpu is not installed.
        UserError: libtpu does not know the topology.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise MissingPackageError(
            f"compiling for {topology} needs libtpu, which is not installed: pip install 'dovetail[tpu]' (Linux; no "
            "TPU is needed)"
        )
    from jax.errors import JaxRuntimeError
    from jax.experimental import topologies

    options: dict[str, Any] = {"num_slices": slices} if slices > 1 else {}
    if topology.chip.name == "v4":
        options["chip_config_name"] = "megacore"  # a chip's two cores are one device, as in jax on a v4
    name = f"{TPUS[topology.chip.name][0]}:{'x'.join(map(str, topology.sides))}"
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices)
    except JaxRuntimeError as error:
        reason = str(error).partition(":")[2].strip().splitlines()[0]
        raise UserError(f"libtpu does not know a slice {topology}: {reason}", param="--topology") from error


def gpu_devices() -> list[Any]:
    """Return the GPUs of this machine. XLA times kernels while it compiles for a GPU, so the GPU must be there.

    Raises:
        UnsupportedError: This machine has no GPU.
    """
    import jax

    devices = jax.devices()
    if devices[0].platform != "gpu":
        raise UnsupportedError(
            f"compiling for gpu needs a GPU on this machine, and jax sees {len(devices)} x {devices[0].device_kind}: "
            "run it on a machine with GPUs, or use a TPU slice such as v5e:4x4, which needs no TPU",
            param="--topology",
        )
    return list(devices)
