"""The current use of each chip of this machine: from NVML for NVIDIA, tpu-info for TPUs, the kernel for CPUs.

No chip is opened, so this works beside a program that holds all of them.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from dovetail.core.host import available_memory, host_memory

GPU_FIELDS = "index,name,memory.used,memory.total,utilization.gpu,temperature.gpu,power.draw"


@dataclass(frozen=True)
class ChipUsage:
    """Hold the use of one chip."""

    chip: str  # "GPU 0", "TPU 3", "CPU"
    kind: str
    used: int  # bytes of memory
    total: int
    busy: float | None  # share of the time, 0.4 is 40%; None: not known
    more: str = ""  # temperature and power, if they are known


def usages() -> list[ChipUsage]:
    """Return the use of the accelerators, then of the CPU."""
    return [*_gpus(), *_tpus(), _cpu()]


def _gpus() -> list[ChipUsage]:
    if importlib.util.find_spec("pynvml") is not None:
        found = _by_nvml(importlib.import_module("pynvml"))
        if found is not None:
            return found
    return _by_nvidia_smi()


def _by_nvml(nvml) -> list[ChipUsage] | None:
    """Return None if the library is installed but the driver is not."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        return [_nvml_usage(nvml, i) for i in range(nvml.nvmlDeviceGetCount())]
    finally:
        nvml.nvmlShutdown()


def _nvml_usage(nvml, index: int) -> ChipUsage:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    name, memory = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetMemoryInfo(handle)
    busy, more = None, []
    with contextlib.suppress(nvml.NVMLError):  # not available for a MIG partition
        busy = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    with contextlib.suppress(nvml.NVMLError):
        more.append(f"{nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)} °C")
    with contextlib.suppress(nvml.NVMLError):
        more.append(f"{nvml.nvmlDeviceGetPowerUsage(handle) / 1000:.0f} W")
    name = name.decode() if isinstance(name, bytes) else name
    return ChipUsage(f"GPU {index}", name, int(memory.used), int(memory.total), busy, ", ".join(more))


def _by_nvidia_smi() -> list[ChipUsage]:
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={GPU_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [_smi_usage(line) for line in text.splitlines() if line.count(",") == GPU_FIELDS.count(",")]


def _smi_usage(line: str) -> ChipUsage:
    index, name, used, total, busy, heat, power = (word.strip() for word in line.split(","))
    more = [f"{heat} °C"] * (heat.isdecimal()) + [f"{power} W"] * (power[:1].isdecimal())
    share = int(busy) / 100 if busy.isdecimal() else None
    return ChipUsage(f"GPU {index}", name, _mib(used), _mib(total), share, ", ".join(more))


def _mib(text: str) -> int:
    return int(text) << 20 if text.isdecimal() else 0


def _tpus() -> list[ChipUsage]:
    """Read the metrics that a program on the chips reports; without one the chips are listed as unused."""
    if importlib.util.find_spec("tpu_info") is None:
        return []
    device = importlib.import_module("tpu_info.device")
    kind, count = device.get_local_chips()
    if not count:
        return []
    metrics = importlib.import_module("tpu_info.metrics")
    try:
        text = metrics.get_chip_usage(kind)
    except Exception as error:  # a gRPC error if no program answers; the library does not name it
        why = f"no program reports ({type(error).__name__})"
        return [ChipUsage(f"TPU {i}", str(kind), 0, 0, None, why) for i in range(count)]
    return [
        ChipUsage(f"TPU {x.device_id}", str(kind), x.memory_usage, x.total_memory, x.duty_cycle_pct / 100) for x in text
    ]


def _cpu() -> ChipUsage:
    """Return the use of the CPU and of the memory, of the container if there is one."""
    total, available = host_memory() or 0, available_memory() or 0
    return ChipUsage("CPU", f"{os.cpu_count()} cores", max(0, total - available), total, _cpu_busy())


def _cpu_busy(seconds: float = 0.2) -> float | None:
    """Measure for a moment: the kernel counts from its start."""
    before = _ticks()
    if before is None:
        return None
    time.sleep(seconds)
    after = _ticks() or before
    whole = sum(after) - sum(before)
    idle = sum(after[3:5]) - sum(before[3:5])  # idle, and waiting for a disk
    return (whole - idle) / whole if whole else 0.0


def _ticks() -> list[int] | None:
    path = Path("/proc/stat")
    return [int(word) for word in path.read_text().split("\n")[0].split()[1:9]] if path.exists() else None
