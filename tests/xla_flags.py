"""XLA's flags in the tests.

Compiling takes most of the suite's time, and tiny models run for milliseconds, so LLVM's optimisations and the slowest
emitters are off. They do not change what is tested.
"""

from __future__ import annotations

from importlib.metadata import version

# name -> (here, what XLA does by itself)
QUICK: dict[str, tuple[int, int]] = {
    "xla_backend_optimization_level": (0, 3),
    "xla_cpu_use_fusion_emitters": (False, True),
    "xla_cpu_parallel_codegen_split_count": (1, 32),
}
if not version("jaxlib").startswith("0.10."):  # XLA ends the process at a flag that it does not know
    QUICK.clear()


def flags(devices: int, quick: bool = True) -> str:
    """XLA_FLAGS of a process with so many CPU devices; without `quick` its programs are optimised as usual."""
    asked = {"xla_force_host_platform_device_count": devices}
    asked |= {name: int(here) for name, (here, _) in QUICK.items()} if quick else {}
    return " ".join(f"--{name}={value}" for name, value in asked.items())
