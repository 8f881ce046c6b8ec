"""Recognise secrets: tokens by the prefixes that their issuers use, variables by their names.

Tokens are refused in code and in a job's spec. Values of variables with secret names are masked where a spec is shown,
and such variables of the supervisor's own environment are not passed on to jobs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from dovetail.core import recipe as recipes
from dovetail.core.errors import UserError
from dovetail.jobs.spec import Spec, to_text

# A prefix that nothing else has, and enough characters after it.
TOKEN = re.compile(
    rb"-----BEGIN (?:RSA |EC |OPENSSH |DSA )?PRIVATE KEY-----|\bAKIA[0-9A-Z]{16}\b|\bhf_[A-Za-z0-9]{30,}\b|"
    rb"\bgh[pousr]_[A-Za-z0-9]{36,}\b|\bsk-(?:ant-|proj-)?[A-Za-z0-9_-]{32,}\b|\bAIza[0-9A-Za-z_-]{35}\b|"
    rb'"private_key_id"\s*:\s*"[0-9a-f]{20,}"'
)
# Whole words of a name, so that MAX_TOKENS, TOKENIZERS_PARALLELISM and KEYBOARD are ordinary variables.
NAME = re.compile(r"(^|_)(API)?(TOKEN|KEY|SECRETS?|PASSWORD|PASSWD|PASSPHRASE)(_|$)|PASSWORD$", re.IGNORECASE)
ORDINARY = ("JAX_", "XLA_")  # settings such as JAX_COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY
MASK = "***"


def holds_token(text: str | bytes) -> bool:
    return TOKEN.search(text.encode(errors="replace") if isinstance(text, str) else text) is not None


def is_secret_name(name: str) -> bool:
    """Whether a variable of this name usually holds a secret."""
    return NAME.search(name) is not None and not name.startswith(ORDINARY)


def refuse_tokens(spec: Spec) -> None:
    """Raise ValueError for a token in a spec, which is stored in a database and shown to all who read that."""
    for field, text in _texts(recipes.dump(spec)):
        if holds_token(text):
            name = text.partition("=")[0] if field == "env" else "NAME"
            where = f"the value of {name} in env" if field == "env" else field
            raise UserError(
                f"{where} looks like a token, and a job's spec is stored and shown: set ${name} in your shell, and "
                f"give `secrets: [{name}=env:{name}]`"
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
