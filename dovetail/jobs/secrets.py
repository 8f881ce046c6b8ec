"""The secrets of a job, and how secrets are recognised elsewhere.

Values are read when the job is created, kept until it is over in a file that only its owner can read, and given to its
processes in their environment. They are never in the database and never shown.

Tokens are recognised by the prefixes of their issuers, variables by their names. Tokens are refused in code and specs.
Values of variables with secret names are masked when a spec is shown, and such variables of the supervisor's own
environment are not passed on to jobs.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dovetail.core import recipe as recipes
from dovetail.core.errors import FileError, NotPermittedError, UserError
from dovetail.core.files import write_atomic
from dovetail.jobs import call
from dovetail.jobs.job import CALL_FOLDER
from dovetail.jobs.spec import Spec, to_text

FILE = "secrets.json"  # in the job's folder
# A unique prefix with enough characters after it.
TOKEN = re.compile(
    rb"-----BEGIN (?:RSA |EC |OPENSSH |DSA )?PRIVATE KEY-----|\bAKIA[0-9A-Z]{16}\b|\bhf_[A-Za-z0-9]{30,}\b|"
    rb"\bgh[pousr]_[A-Za-z0-9]{36,}\b|\bsk-(?:ant-|proj-)?[A-Za-z0-9_-]{32,}\b|\bAIza[0-9A-Za-z_-]{35}\b|"
    rb'"private_key_id"\s*:\s*"[0-9a-f]{20,}"'
)
# Whole words of a name, so that MAX_TOKENS, TOKENIZERS_PARALLELISM and KEYBOARD are ordinary variables.
NAME = re.compile(r"(^|_)(API)?(TOKEN|KEY|SECRETS?|PASSWORD|PASSWD|PASSPHRASE)(_|$)|PASSWORD$", re.IGNORECASE)
ORDINARY = ("JAX_", "XLA_")  # settings such as JAX_COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY
MASK = "***"


# --- values -----------------------------------------------------------------------------------------------------------


def names(spec: Spec) -> list[str]:
    """Return the variables whose values are kept on this machine; TPU VMs read `gcp:` secrets themselves."""
    return [name for name, kind, _ in _parts(spec) if kind != "gcp"]


def take(spec: Spec) -> dict[str, str]:
    """Read the values from this process's environment and files."""
    found = {}
    for name, kind, where in _parts(spec):
        if kind == "env":
            if where not in os.environ:
                raise UserError(f"secret {name} is read from ${where}, which is not set: set it", param="secrets")
            found[name] = os.environ[where]
        elif kind == "file":
            found[name] = _from_file(name, where)
        elif spec.backend != "gcp-tpu":
            raise UserError(
                f"secret {name} is in Google's Secret Manager, which backend {spec.backend} cannot read: give it as "
                f"{name}=env:{name} or {name}=file:PATH",
                param="secrets",
            )
    return found


def _parts(spec: Spec) -> list[tuple[str, str, str]]:
    """Return (name, env or file or gcp, where) of each secret."""
    found = []
    for pair in spec.secrets:
        name, _, reference = pair.partition("=")
        kind, _, where = reference.partition(":")
        found.append((name, kind, where))
    return found


def _from_file(name: str, where: str) -> str:
    try:
        return Path(where).expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise FileError(
            f"secret {name} is read from the file {where}, which cannot be read: {why}", param="secrets"
        ) from None


def keep(home: Path, values: dict[str, str]) -> None:
    """Write the values into the job's folder; without values, remove earlier ones."""
    if not values:
        forget(home)
        return
    if home.stat().st_uid != os.geteuid():  # the job's supervisor could not read our file
        raise NotPermittedError(f"{home} is another user's job: only that user can give it the secrets that it needs")
    write_atomic(home / FILE, json.dumps(values), opener=_opener)


def _opener(path: str, flags: int) -> int:
    file = os.open(path, flags, 0o600)
    os.fchmod(file, 0o600)  # whatever the umask, and for a file that a killed process left
    return file


def read(home: Path, spec: Spec) -> dict[str, str]:
    """Return the values for a process that starts now, and the key of a remote function."""
    key = {call.VARIABLE: call.read_key(home / CALL_FOLDER)} if (home / CALL_FOLDER).is_dir() else {}
    return _kept(home, spec) | key


def _kept(home: Path, spec: Spec) -> dict[str, str]:
    wanted = names(spec)
    if not wanted:
        return {}
    path = home / FILE
    try:
        held = json.loads(path.read_text())
    except FileNotFoundError:
        held = {}
    except PermissionError:
        raise UserError(
            f"{path} can be read only by the user who created the job: `dovetail job supervise --restart` as that user"
        ) from None
    if missing := [name for name in wanted if name not in held]:
        raise UserError(
            f"the value of secret {', '.join(missing)} is not kept here: create the job again", param="secrets"
        )
    return {name: held[name] for name in wanted}


def forget(home: Path) -> None:
    """Delete the values, once the job is over."""
    (home / FILE).unlink(missing_ok=True)


# --- recognition ------------------------------------------------------------------------------------------------------


def holds_token(text: str | bytes) -> bool:
    """Return whether the text contains a token."""
    return TOKEN.search(text.encode(errors="replace") if isinstance(text, str) else text) is not None


def is_secret_name(name: str) -> bool:
    """Return whether a variable of this name usually holds a secret."""
    return NAME.search(name) is not None and not name.startswith(ORDINARY)


def refuse_tokens(spec: Spec) -> None:
    """Raise UserError for a token in a spec, because specs are stored in a database and shown."""
    for field, text in _texts(recipes.dump(spec)):
        if holds_token(text):
            name = text.partition("=")[0] if field == "env" else "NAME"
            where = f"the value of {name} in env" if field == "env" else field
            raise UserError(
                f"{where} looks like a token, and a job's spec is stored and shown: set ${name} in your shell, and "
                f"give `secrets: [{name}=env:{name}]`",
                param=field,
                code="token_in_spec",
            )


def _texts(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted path, text) for every text in nested mappings and lists."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _texts(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner, path)
    elif isinstance(value, str):
        yield path, value


def shown(spec: Spec) -> str:
    """Return the spec as YAML, with secret values masked."""
    return TOKEN.sub(MASK.encode(), to_text(masked(spec)).encode()).decode()


def masked(spec: Spec) -> Spec:
    """Return the spec with the values of secret variables masked."""
    return replace(spec, env=tuple(_masked(pair) for pair in spec.env))


def _masked(pair: str) -> str:
    name, equals, _ = pair.partition("=")
    return f"{name}{equals}{MASK}" if is_secret_name(name) else pair


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the part of the supervisor's environment that a job on this machine or on Slurm gets: all but secrets.

    DOVETAIL_JOBS loses its password but stays: without it a `dovetail job` command in the job would silently use
    another store.
    """
    kept = {name: text for name, text in environ.items() if not is_secret_name(name) and not holds_token(text)}
    if "DOVETAIL_JOBS" in kept:
        kept["DOVETAIL_JOBS"] = without_password(kept["DOVETAIL_JOBS"])
    return kept


def without_password(url: str) -> str:
    """Remove the password of a Postgres URL; other text is returned as it is."""
    if not url.startswith(("postgres:", "postgresql:")):
        return url
    bare = re.sub(r"^(\w+://[^:/?#@]*):[^@/?#]*@", r"\1@", url)
    return re.sub(r"[?&]password=[^&]*$|(?<=[?&])password=[^&]*&", "", bare)
