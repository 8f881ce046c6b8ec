"""Whether a recipe fits the accelerator, asked before anything is paid for: the compiler is, by command."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

from dovetail.jobs.spec import Spec

TIMEOUT_S = 1800.0


def applies(spec: Spec) -> bool:
    """A pretraining on a TPU slice: its step is compiled here by libtpu, which needs no TPU."""
    return bool(spec.recipe) and spec.training == "pretrain" and spec.device.is_tpu


def check(spec: Spec) -> str:
    """A remark, or ""; ValueError with the compiler's reason where it will not run."""
    if not applies(spec):
        return ""
    if importlib.util.find_spec("libtpu") is None:
        return "not compiled beforehand: libtpu is not installed here (pip install 'dovetail[tpu]')"
    device = spec.device
    assert device.chip is not None
    command = [sys.executable, "-m", "dovetail", "compile", "recipe", spec.recipe, *spec.overrides]
    command += ["--topology", f"{device.chip.name.lower()}:{device.topology}", "--json"]
    many = spec.slices * device.slices
    command += ["--slices", str(many)] if many > 1 else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"not compiled beforehand: it took more than {TIMEOUT_S / 60:.0f} minutes"
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1].removeprefix("error: ")
        raise ValueError(f"{spec.recipe} does not run on {device}: {reason}; --no-check creates it all the same")
    return ""
