"""Checks of a server's configuration that need neither its model nor an engine, so that a wrong option is reported
within a second.

A model's own sampling defaults, from its generation_config.json, for fields that a request leaves out."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail.core.errors import UserError
from dovetail.engine.options import EngineOptions
from dovetail.engine.request.params import SamplingParams
from dovetail.io.adapter_folder import check_servable
from dovetail.io.tool_formats.formats import format_for, reasoning_for
from dovetail.serve.config import ServerConfig

_ORIGIN = re.compile(r"https?://[^/\s*]+")


def check_start(config: ServerConfig, options: EngineOptions) -> None:
    """Raise ValueError, with a sentence for the person who starts the server, for what could not be served."""
    for flag, find, name in (
        ("--tool-call-parser", format_for, config.tool_call_parser),
        ("--reasoning-parser", reasoning_for, config.reasoning_parser),
    ):
        try:
            find(name=name)
        except UserError as error:
            raise UserError(f"{flag}: {error}") from None
    for origin in config.allowed_origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise UserError(
                f"--allowed-origins must be * or a scheme, host and port, such as https://example.com:8443, "
                f"got {origin!r}"
            )
    if config.is_open and not config.allow_unauthenticated:
        raise UserError(
            f"--host {config.host} without an API key lets everybody who reaches this machine use the model: set "
            "DOVETAIL_API_KEY or --api-key-file, or pass --allow-unauthenticated if that is meant"
        )
    if config.profile_dir is not None and config.admin_key is None:
        raise UserError("--profile-dir needs --admin: /start_profile and /stop_profile take the admin key")
    _check_adapters(options)
    if config.profile_dir is not None:  # the last one: it makes the folder
        _check_profile_dir(Path(config.profile_dir))


def _check_adapters(options: EngineOptions) -> None:
    for name, folder in options.lora_modules.items():
        try:
            check_servable(Path(folder), options.max_lora_rank)
        except (ValueError, OSError) as error:
            raise UserError(f"--lora-modules {name}: {error}") from None


def _check_profile_dir(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"--profile-dir {folder} cannot be written to ({error.strerror}); choose a folder that can"
        ) from None


# Their names there, and ours. The tokenizer brings the ids that end an answer. do_sample is not read: a server samples
# unless a request has temperature 0.
_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def read_defaults(path: Path) -> Mapping[str, Any]:
    """SamplingParams' fields; empty where the model has no such file."""
    file = path / "generation_config.json"
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text())
        values = {ours: found[theirs] for theirs, ours in _NAMES.items() if found.get(theirs) is not None}
        SamplingParams(**values)
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{file} cannot be used ({error}); mend it, or start with --generation-config none") from None
    return values
