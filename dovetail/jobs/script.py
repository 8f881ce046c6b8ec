"""The script of sh that every process of an attempt runs: environment, code's folder, setup, command.

It is the same on every backend. What differs is told to it in variables: DOVETAIL_JOB_DIR (a folder that all attempts
of the job see) and, with several processes, who this one is (train/distributed.py reads Slurm's and GKE's own).
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from dovetail.jobs.spec import Environment, Spec

# At SIGTERM, which the command gets too, the shell waits for it, so that it can save, and ends with its code; a shell
# that died of the signal would leave the command behind. Nothing further of the line runs: the code must not be 0.
STOP = "trap 'code=$?; trap : TERM INT; wait; exit $((code ? code : 143))' TERM INT"


def script(spec: Spec, python: str = "") -> str:
    """`python`: an interpreter whose folder is searched first, where the spec names no environment."""
    lines = ["#!/bin/sh"]
    lines += [f"export {name}={shlex.quote(value)}" for name, _, value in (pair.partition("=") for pair in spec.env)]
    lines += _folder(spec.code.cwd)
    lines += _environment(spec.environment, python)
    lines += [f"{{ {line}\n}} || exit 91" for line in spec.environment.setup]
    lines += [STOP, spec.line]
    return "\n".join(lines) + "\n"


def _folder(cwd: str) -> list[str]:
    """Lines that enter the code's folder. From a subfolder, scripts find the packages of the whole."""
    if cwd in ("", "."):
        return ['cd "${DOVETAIL_CODE_DIR:-$DOVETAIL_JOB_DIR}" || exit 90']
    path = '"$DOVETAIL_CODE_DIR:$DOVETAIL_CODE_DIR/src${PYTHONPATH:+:$PYTHONPATH}"'
    return [f'cd "$DOVETAIL_CODE_DIR"/{shlex.quote(cwd)} || exit 90', f"export PYTHONPATH={path}"]


def _environment(environment: Environment, python: str) -> list[str]:
    if environment.venv:
        return [f". {_path(environment.venv)}/bin/activate || exit 91"]
    if environment.conda:
        return [f'eval "$(conda shell.posix hook)" && conda activate {shlex.quote(environment.conda)} || exit 91']
    if environment.lock:
        return _locked(environment)
    return [f"export PATH={shlex.quote(str(Path(python).parent))}:$PATH"] if python else []


def _locked(environment: Environment) -> list[str]:
    """A venv for each digest of the lock file, made once per machine: beside, then renamed."""
    lock = _path(environment.lock)
    hashes = f"$(grep -q -e --hash= {lock} && echo --require-hashes)"  # then every package must have one
    make = (
        f'{shlex.quote(environment.python)} -m venv "$venv.$$" && "$venv.$$/bin/pip" install --quiet {hashes} -r {lock}'
    )
    return [
        f"venv=${{DOVETAIL_HOME:-$HOME/.cache/dovetail}}/venvs/$(sha256sum {lock} | cut -c1-16)",
        'mkdir -p "$(dirname "$venv")"',
        # a venv cannot be moved: its scripts name its folder. The link is what is renamed.
        f'[ -e "$venv" ] || {{ {make} && ln -sfn "$venv.$$" "$venv"; }} || exit 91',
        '. "$venv/bin/activate" || exit 91',
    ]


def _path(text: str) -> str:
    """Quoted for sh, with ~ left to it."""
    if text.startswith("~/"):
        return '"$HOME"/' + shlex.quote(text[2:])
    return shlex.quote(text)


def interpreter(spec: Spec) -> str:
    """The Python that runs this, for backends that share its file system."""
    given = spec.environment
    return "" if given.venv or given.conda or given.lock or given.image else sys.executable
