"""Trace and lower an engine's steps in other processes, so that many are lowered at once.

Lowering holds Python's lock for two to five seconds for each step with kernels, and a start has three dozen steps:
threads alone would take turns. A process lowers for the GPU of this one, without using it (`JAX_PLATFORMS=cpu`), and
returns a module of StableHLO, which this process compiles. Messages are pickles in pipes: a process ends when its
parent does. `python -m dovetail.engine.device.lowering` is such a process.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import pickle
import subprocess
import sys
import threading
import traceback
from contextlib import suppress
from typing import Any, NamedTuple, cast

import jax
from jax import export
from jax.sharding import AbstractDevice, AbstractMesh

from dovetail.core.host import available_memory
from dovetail.ops.capabilities import Imitated, imitate, is_hopper, is_one_gpu
from dovetail.ops.dispatch import log_once

log = logging.getLogger(__name__)
MOST = 8  # processes
PROCESS_BYTES = 2 * 2**30  # that each may take, generously
SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_threefry_partitionable", "jax_numpy_rank_promotion")
# Calls whose form jax does not promise to keep: both processes have the same jax
CALLS = ("mosaic_gpu_v2", "mosaic_gpu", "__gpu$xla.gpu.triton", "triton_kernel_call")


class LoweringSetup(NamedTuple):
    """Hold what a process must know before it lowers the first step."""

    programs: Any  # Programs
    params: Any  # abstract weights
    pages: Any  # abstract
    device: Imitated
    settings: dict[str, Any]


class SerializedStep(NamedTuple):
    """Hold a lowered step."""

    fields: dict[str, Any]  # of jax.export.Exported
    results: Any  # a tree of numbers, for its structure
    donated: tuple[int, ...]  # arguments
    chosen: list[tuple[str, str]]  # operations and their implementations, for `log_once`


class Lowering:
    """Lower the steps of an engine with these weights and pages.

    Args:
        programs: The engine's programs.
        params: Its weights, which may be abstract.
        pages: Its abstract pages.
    """

    def __init__(self, programs: Any, params: Any, pages: Any):
        settings = {name: getattr(jax.config, name) for name in SETTINGS}
        self._setup = LoweringSetup(programs, programs.abstract(params), pages, described(), settings)
        self._room = threading.Semaphore(max(1, min(MOST, (os.cpu_count() or 2) // 2, _processes_that_fit())))
        self._idle: list[_Process] = []
        self._is_closed = False

    def lower(self, program: Any) -> Any | None:
        """Return a StepProgram, lowered; None if that failed, so that the caller lowers it itself."""
        try:
            return _lowered(program, self.module(program.shape))
        except Exception as error:
            log.info("%s is lowered in this process: %s", program.title, error)
            return None

    def module(self, shape: Any) -> SerializedStep:
        """Return the module of a step."""
        with self._room:
            process = self._taken()
            try:
                reply = process.ask(shape)
            except Exception:
                process.close()
                raise
            self._idle.append(process)
        if self._is_closed:
            self.close()
        if isinstance(reply, str):
            raise RuntimeError(reply)
        for operation, name in reply.chosen:
            log_once(operation, name)
        return reply

    def close(self) -> None:
        """End the processes; one that is at work ends after it."""
        self._is_closed = True
        with suppress(IndexError):
            while True:
                self._idle.pop().close()

    def _taken(self) -> _Process:
        with suppress(IndexError):
            return self._idle.pop()
        return _Process(pickle.dumps(self._setup))


class _Process:
    """Talk to a process that lowers steps."""

    def __init__(self, setup: bytes):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "JAX_PLATFORMS": "cpu"}
        # -P: a file of the working directory does not shadow a module
        command = sys.executable, "-P", "-c", f"from {__name__} import main; main()"
        pipe = subprocess.PIPE
        self._popen = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        self._requests: Any = self._popen.stdin
        self._replies: Any = self._popen.stdout
        self._requests.write(setup)

    def ask(self, shape: Any) -> Any:
        """Return a SerializedStep, or a traceback."""
        self._requests.write(pickle.dumps(shape))
        self._requests.flush()
        return pickle.load(self._replies)

    def close(self) -> None:
        """End the process, which has no state."""
        self._popen.kill()
        with suppress(OSError):  # what it has not read is lost
            self._requests.close()
        self._replies.close()
        self._popen.wait()


def described() -> Imitated:
    """Return the description of this process's device."""
    device = jax.devices()[0]
    return Imitated(*(getattr(device, name, None) for name in Imitated._fields))


def why_not_apart(placement: Any) -> str | None:
    """Return why steps are lowered in this process, or None."""
    if not is_one_gpu(None, placement) or not is_hopper():
        return "Mosaic lowers for a Hopper GPU in a process that has none, and for no other"
    return "too little memory for another process" if _processes_that_fit() < 1 else None


def _processes_that_fit() -> int:
    memory = available_memory()
    return MOST if memory is None else memory // PROCESS_BYTES


def _lowered(program: Any, module: SerializedStep) -> Any:
    """Return the step as jax.jit lowers it: with its trees of arguments and results, and donated arguments."""
    exported = export.Exported(**module.fields, _get_vjp=None)
    results = jax.tree.structure(module.results)

    def step(*arguments: Any) -> Any:
        return jax.tree.unflatten(results, exported.call(*jax.tree.leaves(arguments)))

    return jax.jit(step, donate_argnums=module.donated).lower(*program.abstract)


# --- the other process ------------------------------------------------------------------------------------------------


class _Chosen(logging.Handler):
    """Keep what `log_once` logs."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.found: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(cast(Any, record.args))


def module_of(program: Any, chosen: list[tuple[str, str]]) -> SerializedStep:
    """Return a StepProgram's module."""
    leaves, structure = jax.tree.flatten(program.abstract)
    found: list[Any] = []

    def step(*leaves: Any) -> list[Any]:
        results, kind = jax.tree.flatten(program.function(*jax.tree.unflatten(structure, leaves), **program.static))
        found.append(jax.tree.unflatten(kind, range(len(results))))
        return results

    platform = "cuda" if jax.default_backend() == "gpu" else jax.default_backend()  # as export names it
    # which Triton's lowering asks, from jax 0.11 on
    device = AbstractDevice(*(getattr(jax.devices()[0], name) for name in ("device_kind", "core_count", "platform")))
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in CALLS]
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        exported = export.export(jax.jit(step), platforms=[platform], disabled_checks=checks)(*leaves)
        donated = donated_of(program)
    fields = {field.name: getattr(exported, field.name) for field in dataclasses.fields(exported)}
    del fields["_get_vjp"]
    return SerializedStep(fields, found[0], donated, chosen)


def donated_of(program: Any) -> tuple[int, ...]:
    """Return which of a StepProgram's arguments are donated, each as a whole."""
    traced = program.function.trace(*program.abstract, **program.static)  # which the export has traced already
    arguments, _ = traced.args_info
    return tuple(i for i, part in enumerate(arguments) if any(x.donated for x in jax.tree.leaves(part)))


def main() -> None:
    """Lower the steps whose shapes come on the standard input."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is not a reply
    setup: LoweringSetup = pickle.load(sys.stdin.buffer)
    imitate(setup.device)
    for name, value in setup.settings.items():
        jax.config.update(name, value)
    logger, kept = logging.getLogger(log_once.__module__), _Chosen()
    logger.setLevel(logging.INFO)
    logger.addHandler(kept)
    while shape := _next():
        try:
            reply = module_of(setup.programs.of(shape, setup.params, setup.pages), kept.found)
        except Exception:
            reply = traceback.format_exc()
        pickle.dump(reply, replies)
        replies.flush()


def _next() -> Any:
    try:
        return pickle.load(sys.stdin.buffer)
    except EOFError:  # the parent has closed the pipe, or ended
        return None


if __name__ == "__main__":
    main()
