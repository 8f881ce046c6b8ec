"""The shell script that every process of an attempt runs: environment, code folder, setup, command.

It is the same on every backend. Differences are in environment variables: DOVETAIL_JOB_DIR (a folder that all attempts
of the job share) and, with several processes, the rank (train/distributed.py reads those of Slurm and GKE).
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from dovetail.jobs.spec import EnvironmentSpec, Spec

# The command receives SIGTERM too. The shell waits for it, so that it can save, and exits with its code: a shell that
# died of the signal would leave the command behind. The rest of the line does not run, so the code must not be 0.
STOP = "trap 'code=$?; trap : TERM INT; wait; exit $((code ? code : 143))' TERM INT"


def script(spec: Spec, python: str = "") -> str:
    """Return the script; the folder of `python` comes first in PATH if the spec names no environment."""
    lines = ["#!/bin/sh"]
    lines += [f"export {name}={shlex.quote(value)}" for name, _, value in (pair.partition("=") for pair in spec.env)]
    lines += _enter_code(spec.code.cwd)
    lines += _environment(spec.environment, python)
    lines += [f"{{ {line}\n}} || exit 91" for line in spec.environment.setup]
    lines += [STOP, spec.line]
    return "\n".join(lines) + "\n"


def _enter_code(cwd: str) -> list[str]:
    """Return lines that enter the code's folder. Scripts in a subfolder can import the packages of the whole."""
    if cwd in ("", "."):
        return ['cd "${DOVETAIL_CODE_DIR:-$DOVETAIL_JOB_DIR}" || exit 90']
    path = '"$DOVETAIL_CODE_DIR:$DOVETAIL_CODE_DIR/src${PYTHONPATH:+:$PYTHONPATH}"'
    return [f'cd "$DOVETAIL_CODE_DIR"/{shlex.quote(cwd)} || exit 90', f"export PYTHONPATH={path}"]


def _environment(environment: EnvironmentSpec, python: str) -> list[str]:
    if environment.venv:
        return [f". {_path(environment.venv)}/bin/activate || exit 91"]
    if environment.conda:
        return [f'eval "$(conda shell.posix hook)" && conda activate {shlex.quote(environment.conda)} || exit 91']
    if environment.lock:
        return _locked(environment)
    return [f"export PATH={shlex.quote(str(Path(python).parent))}:$PATH"] if python else []


def _locked(environment: EnvironmentSpec) -> list[str]:
    """Return lines that make one venv per digest of the lock file, once per machine."""
    lock = _path(environment.lock)
    hashes = f"$(grep -q -e --hash= {lock} && echo --require-hashes)"  # then every package must have one
    make = (
        f'{shlex.quote(environment.python)} -m venv "$venv.$$" && "$venv.$$/bin/pip" install --quiet {hashes} -r {lock}'
    )
    return [
        f"venv=${{DOVETAIL_HOME:-$HOME/.cache/dovetail}}/venvs/$(sha256sum {lock} | cut -c1-16)",
        'mkdir -p "$(dirname "$venv")"',
        # A venv cannot be renamed, because its scripts contain its path. A link to it can.
        f'[ -e "$venv" ] || {{ {make} && ln -sfn "$venv.$$" "$venv"; }} || exit 91',
        '. "$venv/bin/activate" || exit 91',
    ]


def _path(text: str) -> str:
    """Quote a path for sh, but let the shell expand ~."""
    if text.startswith("~/"):
        return '"$HOME"/' + shlex.quote(text[2:])
    return shlex.quote(text)


def interpreter(spec: Spec) -> str:
    """Return this process's Python for backends that share its file system; "" if the spec names an environment."""
    given = spec.environment
    return "" if given.venv or given.conda or given.lock or given.image else sys.executable
