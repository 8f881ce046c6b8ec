"""Make the kernels of engine steps available: those of a CPU are compiled once on a machine, in processes of their own.

numba compiles for most of a minute and keeps two hundred megabytes, which end with the process that compiled. It keeps
the machine code on disk, which takes this process a second to load.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from importlib.metadata import version

import jax

from dovetail.io.compiled import once, program_key
from dovetail.ops import dispatch
from dovetail.ops.capabilities import has_numba
from dovetail.ops.dispatch import import_kernels

log = logging.getLogger(__name__)


def prepare_kernels(platform: str | None, quantized: bool = False) -> None:
    """Register the kernels of engine steps with XLA; compile a CPU's if this machine has not.

    Args:
        platform: The platform of the steps; None for jax's default.
        quantized: Whether some weights are quantised.
    """
    compile_kernels(platform, quantized)
    import_kernels(platform, quantized)


def compile_kernels(platform: str | None = None, quantized: bool = False) -> None:
    """Compile the kernels that `prepare_kernels` registers, if they are a CPU's and this machine has not."""
    if (platform or jax.default_backend()) == "cpu" and has_numba():
        modules = dispatch.cpu_kernels(quantized)
        place = dispatch.__file__, os.environ.get("NUMBA_CACHE_DIR"), version("numba"), version("llvmlite")
        once(program_key("kernels", modules, *place), lambda: compile_apart(modules))


def compile_apart(modules: tuple[tuple[str, ...], ...]) -> None:
    """Import modules that compile at import, each group in a process of its own, and wait for all.

    What fails there is compiled here, at the import, and its error is seen.
    """
    log.info("compiling the kernels of this CPU; they are kept for later starts")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "JAX_PLATFORMS": "cpu"}
    for process in [_importing(group, environment) for group in modules]:
        _, error = process.communicate()
        if process.returncode:
            log.info("the kernels are compiled in this process: %s", error.decode(errors="replace")[-300:])


def _importing(modules: tuple[str, ...], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a process that imports these modules."""
    code = "import gc; gc.disable(); "  # it would visit the objects of jax and numba again and again
    command = sys.executable, "-P", "-c", code + "".join(f"import {name};" for name in modules)
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
