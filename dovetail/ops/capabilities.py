"""Tell what the devices and the installed packages can do; ops.dispatch chooses by it."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any, NamedTuple

import jax

from dovetail.core.mesh import Placement

NVIDIA = ("cuda", "gpu")
ARM, X86 = ("aarch64", "arm64"), ("x86_64", "amd64")  # names of `platform.machine`


class Imitated(NamedTuple):
    """Describe a device by attributes of jax's."""

    platform: Any
    device_kind: Any
    compute_capability: Any
    core_count: Any


def imitate(device: Imitated) -> None:
    """Let kernels be chosen for this device in a process that does not have it, and lowers programs alone."""
    jax.devices = lambda *_: [device]  # type: ignore[assignment]
    jax.default_backend = lambda: device.platform


def is_one_gpu(platform: str | None, placement: Placement | None) -> bool:
    """Return whether a call runs on a single NVIDIA GPU: our kernels there support one device."""
    return (platform or jax.default_backend()) in NVIDIA and (placement is None or placement.mesh.size == 1)


@functools.cache
def has_cudnn() -> bool:
    """Return whether cuDNN is loaded: its call is built against the library and cannot be lowered without it."""
    return any(device.platform == "gpu" for device in jax.devices())


@functools.cache
def is_hopper() -> bool:
    """Return whether the devices are of compute capability 9.0: kernels with its instructions run on no other."""
    return all(getattr(device, "compute_capability", "") == "9.0" for device in jax.devices())


@functools.cache
def has_fp8() -> bool:
    """Return whether the devices multiply fp8 numbers: compute capability 8.9 and later."""
    found = [getattr(device, "compute_capability", "0.0") for device in jax.devices()]
    return all(tuple(map(int, each.split("."))) >= (8, 9) for each in found)


@functools.cache
def has_triton() -> bool:
    """Return whether Pallas has its Triton dialect, which JAX deprecates since 0.11 and will remove."""
    return importlib.util.find_spec("jax.experimental.pallas.triton") is not None


@functools.cache
def has_numba() -> bool:
    """Return whether numba, which compiles the kernels of CPUs, is installed."""
    return importlib.util.find_spec("numba") is not None


@functools.cache
def has_tokamax() -> bool:
    """Return whether tokamax, the `kernels` extra with further kernels for TPUs, is installed."""
    return importlib.util.find_spec("tokamax") is not None
