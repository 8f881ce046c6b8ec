"""What is checked before a job is created: whether its zones exist and Slurm can meet it; and, by command, whether a
recipe fits its accelerator: the planner everywhere, and for pretraining the TPU's own compiler where it is installed,
which needs no TPU."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

from dovetail.core import regions
from dovetail.core.accelerator import Accelerator, parse
from dovetail.core.errors import UserError
from dovetail.jobs.backends import slurm_check
from dovetail.jobs.spec import Spec

TIMEOUT_S = 1800.0
ANYWAY = "--no-check creates it all the same"


def applies(spec: Spec) -> bool:
    """A training on a chip that is not this machine's own."""
    return bool(spec.recipe) and spec.device.chip is not None and spec.backend != "local"


def check_place(spec: Spec, anyway: str = "") -> str:
    """Return a remark, or ""; ValueError where no such place exists, or it can never give what is asked for.

    `anyway`: how to go on all the same, for the end of the sentence.
    """
    try:
        if spec.backend == "slurm":
            return slurm_check.check(spec)
        if spec.backend in ("gcp-tpu", "gke"):
            for zone in spec.zones:
                regions.check_zone("zones", zone)
            for mount in spec.mounts:
                if mount.region:
                    regions.check_place("mounts.region", mount.region)
    except ValueError as error:
        raise UserError(f"{str(error).removesuffix('.')} ({anyway})" if anyway else str(error)) from None
    return ""


def check(spec: Spec, code: Path | None = None, compiles: bool = True) -> str:
    """A remark, or ""; ValueError with the reason where it will not run. `code`: where a recipe's file is. Compiling
    may take minutes."""
    if not applies(spec):
        return ""
    if importlib.util.find_spec("jax") is None:
        return "not planned beforehand: jax is not installed here"
    for name in (spec.accelerator, *spec.others):
        _ask(spec, parse(name), _plan(spec, parse(name)), code)
    if not spec.device.is_tpu or spec.training != "pretrain":
        return ""
    if importlib.util.find_spec("libtpu") is None:
        return "planned, and not compiled: libtpu is not installed here (pip install 'dovetail[tpu]' on x86-64 Linux)"
    return _ask(spec, spec.device, _compile(spec), code) if compiles else "planned; `create` compiles it too"


def _plan(spec: Spec, device: Accelerator) -> list[str]:
    """Memory by arithmetic: seconds."""
    assert device.chip is not None
    many = device.total_chips * device.chip.devices * spec.slices
    words = ["recipes", spec.recipe, *spec.overrides, "--chip", device.chip.name, "--devices", str(many)]
    words += ["--training", spec.training] if spec.training != "pretrain" else []
    return [*words, "--slices", str(spec.slices * device.slices)]


def _compile(spec: Spec) -> list[str]:
    """The step itself: a minute or more."""
    device = spec.device
    assert device.chip is not None
    topology, many = f"{device.chip.name.lower()}:{device.topology}", spec.slices * device.slices
    words = ["compile", "recipe", spec.recipe, *spec.overrides, "--topology", topology, "--json"]
    return words + (["--slices", str(many)] if many > 1 else [])


def _ask(spec: Spec, device: Accelerator, words: list[str], code: Path | None) -> str:
    command = [sys.executable, "-m", "dovetail", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, cwd=code)
    except subprocess.TimeoutExpired:
        return f"not compiled beforehand: it took more than {TIMEOUT_S / 60:.0f} minutes"
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1].removeprefix("error: ")
        raise UserError(f"{spec.recipe} does not run on {device}: {reason}; {ANYWAY}")
    return ""
