"""Refuse a job that can never start, before it is created: what its spec names must be there.

`dovetail job create`, its `--dry-run`, `@dt.remote` and `resume` all ask here. What belongs to one place where jobs run
is its backend's own `check`, which the supervisor calls again at every start.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path, PurePosixPath

from dovetail.core import recipe as recipes
from dovetail.core.errors import UserError
from dovetail.jobs import ignore, price, secrets, sensitive
from dovetail.jobs.backends.backend import Unavailable
from dovetail.jobs.backends.choose import chooser
from dovetail.jobs.home import jobs_home
from dovetail.jobs.spec import Spec

SAME_FILES = ("local", "slurm")  # backends whose machines see this one's files
NEEDED = ("jax", "optax")  # to read a recipe's settings
TIMEOUT_S = 120.0


def check(spec: Spec, code: Path | None = None) -> None:
    """Raise ValueError or ImportError where the job could never start.

    `code`: the folder that its code is taken from; None where that is not known, and files in it are not looked for.
    """
    price.refuse_blind_ceiling(spec)
    sensitive.refuse_tokens(spec)
    secrets.take(spec)
    _check_backend(spec)
    _check_environment(spec, code)
    if spec.recipe:
        _check_recipe(spec, code)


def _check_backend(spec: Spec) -> None:
    try:
        chooser(jobs_home(), "")(spec.backend).check(spec)
    except Unavailable as error:  # a supervisor would try again; a person is told, and can
        raise UserError(str(error)) from error


def _check_environment(spec: Spec, code: Path | None) -> None:
    given = spec.environment
    if given.lock:
        _refuse_missing(spec, "environment.lock", given.lock, code)
    if given.venv and spec.backend == "local":
        _refuse_missing(spec, "environment.venv", f"{given.venv.rstrip('/')}/bin/activate", code)


def _refuse_missing(spec: Spec, field: str, text: str, code: Path | None) -> None:
    """Raise where the processes would not find a file: relative to the job's code, or an absolute path."""
    path = Path(text).expanduser()
    if path.is_absolute():
        if spec.backend in SAME_FILES and not path.is_file():
            raise UserError(f"{field}: there is no file {text}")
        return
    if not spec.code.path:
        raise UserError(
            f"{field}: {text} is relative to the job's code, and `code.path` is empty: give an absolute path"
        )
    if code is None:
        return
    if not (code / path).is_file():
        raise UserError(f"{field}: there is no file {text} in the job's code, which is {code.resolve()}")
    if PurePosixPath(os.path.normpath(path)) not in ignore.files(code, spec.code.exclude):
        raise UserError(
            f"{field}: {text} is not taken along with the code, since .gitignore or `code.exclude` leaves it out: give "
            "an absolute path, or include it"
        )


def _check_recipe(spec: Spec, code: Path | None) -> None:
    is_none = spec.recipe == "-" and spec.training != "pretrain"  # its overrides say everything
    shipped_for = recipes.training_of(spec.recipe)
    if shipped_for and shipped_for != spec.training:
        raise UserError(
            f"recipe {spec.recipe} is for training={shipped_for}, and training is {spec.training}: set "
            f"training={shipped_for}"
        )
    if not is_none and not shipped_for:
        is_elsewhere = Path(spec.recipe).expanduser().is_absolute() and spec.backend not in SAME_FILES
        if is_elsewhere or (code is None and spec.code.path):
            return
        recipes.find(spec.recipe, code)
        _refuse_missing(spec, "recipe", spec.recipe, code)
    _read_settings(spec, code)


def _read_settings(spec: Spec, code: Path | None) -> None:
    """Let `dovetail recipes --check` read it as the job will, in the code's folder: the classes of settings belong to
    packages that jobs do not import. Skipped where those are not installed."""
    if any(importlib.util.find_spec(name) is None for name in NEEDED):
        return
    words = ["--check", "--training", spec.training, "--", spec.recipe, *spec.overrides]
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "dovetail", "recipes", *words], cwd=code, env=os.environ | {"PYTHONPATH": path},
            capture_output=True, text=True, timeout=TIMEOUT_S, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:  # a busy machine says nothing about the recipe
        return
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"recipe {spec.recipe}: `dovetail recipes --check` failed"]
        raise UserError(lines[-1].removeprefix("error: "))
