"""Checks before a job is created.

`check` refuses a job that can never start, because something that its spec names does not exist. `dovetail job create`,
its `--dry-run`, `@dt.remote` and `resume` call it. Checks of one backend are in its own `check`, which the supervisor
calls again at every start.

`check_place` refuses zones that do not exist and requests that Slurm can never satisfy. `check_fit` checks whether a
recipe fits its accelerator: with the planner, and for pretraining with the TPU compiler if libtpu is installed (which
needs no TPU).
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path, PurePosixPath

from dovetail.core import cloud
from dovetail.core import recipe as recipes
from dovetail.core.accelerator import Accelerator, parse
from dovetail.core.errors import MissingFileError, RecipeError, UserError
from dovetail.jobs import cost, files, secrets
from dovetail.jobs.backends import chooser, slurm_script
from dovetail.jobs.snapshot import code_files
from dovetail.jobs.spec import Spec

SAME_FILES = ("local", "slurm")  # backends whose machines see the files of this one
NEEDED = ("jax", "optax")  # to read the settings of a recipe
READ_S = 120.0
FIT_S = 1800.0
ANYWAY = "--no-check creates it without this check"


# --- can it start? ----------------------------------------------------------------------------------------------------


def check(spec: Spec, code: Path | None = None) -> None:
    """Raise UserError if the job can never start.

    Args:
        spec: The job's spec.
        code: The folder that its code is taken from; None if it is not known, then files in it are not checked.
    """
    cost.check_ceiling(spec)
    secrets.refuse_tokens(spec)
    secrets.take(spec)
    chooser(files.jobs_home(), "")(spec.backend).check(spec)
    _check_environment(spec, code)
    if spec.recipe:
        _check_recipe(spec, code)


def _check_environment(spec: Spec, code: Path | None) -> None:
    given = spec.environment
    if given.lock:
        _refuse_missing(spec, "environment.lock", given.lock, code)
    if given.venv and spec.backend == "local":
        _refuse_missing(spec, "environment.venv", f"{given.venv.rstrip('/')}/bin/activate", code)


def _refuse_missing(spec: Spec, field: str, text: str, code: Path | None) -> None:
    """Raise UserError if the processes would not find a file: an absolute path, or one relative to the code."""
    path = Path(text).expanduser()
    if path.is_absolute():
        if spec.backend in SAME_FILES and not path.is_file():
            raise MissingFileError(f"{field}: there is no file {text}", param=field)
        return
    if not spec.code.path:
        raise UserError(
            f"{field}: {text} is relative to the job's code, and `code.path` is empty: give an absolute path",
            param=field,
        )
    if code is None:
        return
    if not (code / path).is_file():
        raise MissingFileError(
            f"{field}: there is no file {text} in the job's code, which is {code.resolve()}", param=field
        )
    if PurePosixPath(os.path.normpath(path)) not in code_files(code, spec.code.exclude):
        raise UserError(
            f"{field}: {text} is not part of the job's code, because .gitignore or `code.exclude` excludes it: give an "
            "absolute path, or include it",
            param=field,
        )


def _check_recipe(spec: Spec, code: Path | None) -> None:
    only_overrides = spec.recipe == "-" and spec.training != "pretrain"
    shipped_for = recipes.training_of(spec.recipe)
    if shipped_for and shipped_for != spec.training:
        raise RecipeError(
            f"recipe {spec.recipe} is for training={shipped_for}, and training is {spec.training}: set "
            f"training={shipped_for}",
            param="training",
        )
    if not only_overrides and not shipped_for:
        is_elsewhere = Path(spec.recipe).expanduser().is_absolute() and spec.backend not in SAME_FILES
        if is_elsewhere or (code is None and spec.code.path):
            return
        recipes.find(spec.recipe, code)
        _refuse_missing(spec, "recipe", spec.recipe, code)
    _read_settings(spec, code)


def _read_settings(spec: Spec, code: Path | None) -> None:
    """Read the recipe with `dovetail recipes --check` in the code's folder, as the job will.

    A process of its own, because jobs do not import the packages with the settings classes. Skipped where those are not
    installed.
    """
    if any(importlib.util.find_spec(name) is None for name in NEEDED):
        return
    words = ["--check", "--training", spec.training, "--", spec.recipe, *spec.overrides]
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "dovetail", "recipes", *words], cwd=code, env=os.environ | {"PYTHONPATH": path},
            capture_output=True, text=True, timeout=READ_S, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:  # the machine is busy: not the recipe's fault
        return
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"recipe {spec.recipe}: `dovetail recipes --check` failed"]
        raise RecipeError(lines[-1].removeprefix("error: "), param="recipe")


# --- does the place exist, and does the recipe fit? -------------------------------------------------------------------


def check_place(spec: Spec, anyway: str = "") -> str:
    """Check zones, regions and Slurm requests; return a note, or "".

    Raise UserError for a place that does not exist, or that can never satisfy the request. `anyway` is added to the
    message: how to skip the check.
    """
    try:
        if spec.backend == "slurm":
            return slurm_script.check_request(spec)
        if spec.backend in ("gcp-tpu", "gke"):
            for zone in spec.zones:
                cloud.check_zone("zones", zone)
            for mount in spec.mounts:
                if mount.region:
                    cloud.check_place("mounts.region", mount.region)
    except UserError as error:
        message = f"{str(error).removesuffix('.')} ({anyway})" if anyway else str(error)
        raise UserError(message, param=error.param, code=error.code) from None
    return ""


def check_fit(spec: Spec, code: Path | None = None, compiles: bool = True) -> str:
    """Check whether a recipe fits its accelerator; return a note, or "".

    Raise UserError with the reason if it does not. Only trainings on a chip of another machine are checked. `code` is
    the folder of the recipe's file. Compiling may take minutes.
    """
    if not spec.recipe or spec.device.chip is None or spec.backend == "local":
        return ""
    if importlib.util.find_spec("jax") is None:
        return "not planned: jax is not installed here"
    for name in (spec.accelerator, *spec.others):
        _run_dovetail(spec, parse(name), _plan(spec, parse(name)), code)
    if not spec.device.is_tpu or spec.training != "pretrain":
        return ""
    if importlib.util.find_spec("libtpu") is None:
        return "planned, and not compiled: libtpu is not installed here (pip install 'dovetail[tpu]' on x86-64 Linux)"
    return _run_dovetail(spec, spec.device, _compile(spec), code) if compiles else "planned; `create` compiles it too"


def _plan(spec: Spec, device: Accelerator) -> list[str]:
    """Return the command that plans the memory: seconds."""
    assert device.chip is not None
    many = device.total_chips * device.chip.devices * spec.slices
    words = ["recipes", spec.recipe, *spec.overrides, "--chip", device.chip.name, "--devices", str(many)]
    words += ["--training", spec.training] if spec.training != "pretrain" else []
    return [*words, "--slices", str(spec.slices * device.slices)]


def _compile(spec: Spec) -> list[str]:
    """Return the command that compiles the step: a minute or more."""
    device = spec.device
    assert device.chip is not None
    topology, many = f"{device.chip.name.lower()}:{device.topology}", spec.total_slices
    words = ["compile", "recipe", spec.recipe, *spec.overrides, "--topology", topology, "--json"]
    return words + (["--slices", str(many)] if many > 1 else [])


def _run_dovetail(spec: Spec, device: Accelerator, words: list[str], code: Path | None) -> str:
    command = [sys.executable, "-m", "dovetail", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FIT_S, check=False, cwd=code)
    except subprocess.TimeoutExpired:
        return f"not compiled: it took more than {FIT_S / 60:.0f} minutes"
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1].removeprefix("error: ")
        raise UserError(f"{spec.recipe} does not run on {device}: {reason}; {ANYWAY}", param="recipe")
    return ""
