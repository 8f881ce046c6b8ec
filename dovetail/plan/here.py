"""The chip of a device that is here, to plan with."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import jax

from dovetail.core.chips import Chip, chip_of, cpu_chip
from dovetail.core.host import host_memory


def chip_here(device: Any) -> Chip | None:
    """None for one that the table does not know. Of a CPU: its cores, which all devices of this process share."""
    if getattr(device, "platform", "") != "cpu":
        return chip_of(device)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return replace(cpu_chip(cores, host_memory() or 0), devices=jax.local_device_count())
