"""Check and read what a server needs before it starts: its options, its socket, its tokenizer, the sampling defaults.

A wrong option is reported within a second, before an engine is started.
"""

from __future__ import annotations

import errno
import json
import re
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.core.errors import CheckpointError, FileError, RecipeError, UserError, as_user_error
from dovetail.engine.options import EngineOptions
from dovetail.engine.request.params import SamplingParams
from dovetail.io.adapter_folder import check_servable
from dovetail.io.tokenizer import Tokenizer
from dovetail.io.tool_formats.formats import format_for, reasoning_for
from dovetail.serve.config import ServerConfig
from dovetail.serve.media.address import AllowedHosts

if TYPE_CHECKING:
    from dovetail.io.images.processor import ImageProcessor

_ORIGIN = re.compile(r"https?://[^/\s*]+")
# Names in generation_config.json -> names of SamplingParams. The tokenizer has the ids that end an answer. do_sample is
# not read: a server samples unless a request has temperature 0.
_DEFAULTS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def check_start(config: ServerConfig, options: EngineOptions) -> None:
    """Check the options of a server.

    Raises:
        UserError: An option is wrong; the message names its flag.
    """
    for flag, find, name in (
        ("--tool-call-parser", format_for, config.tool_call_parser),
        ("--reasoning-parser", reasoning_for, config.reasoning_parser),
    ):
        try:
            find(name=name)
        except UserError as error:
            raise RecipeError(f"{flag}: {error}", param=flag.strip("-").replace("-", "_")) from None
    for origin in config.allowed_origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise RecipeError(
                f"--allowed-origins must be * or an origin such as https://example.com:8443, got {origin!r}",
                param="allowed_origins",
            )
    AllowedHosts(config.allowed_media_domains)
    folder = config.allowed_local_media_path
    if folder is not None and not Path(folder).is_dir():
        message = f"--allowed-local-media-path must be a folder, got {folder}"
        raise FileError(message, param="allowed_local_media_path")
    if config.is_open and not config.allow_unauthenticated:
        raise RecipeError(
            f"--host {config.host} without an API key lets everyone who reaches this machine use the model: set "
            "DOVETAIL_API_KEY or --api-key-file, or pass --allow-unauthenticated",
            param="host",
        )
    if config.profile_dir is not None and config.admin_key is None:
        message = "--profile-dir requires --admin: /start_profile and /stop_profile take the admin key"
        raise RecipeError(message, param="profile_dir")
    _check_adapters(options)
    if config.profile_dir is not None:  # last, because it makes the folder
        _check_profile_dir(Path(config.profile_dir))


def _check_adapters(options: EngineOptions) -> None:
    for name, folder in options.lora_modules.items():
        try:
            check_servable(Path(folder), options.max_lora_rank)
        except (UserError, OSError) as error:
            user = as_user_error(error)
            if user is None:
                raise
            raise CheckpointError(f"--lora-modules {name}: {user}", param="lora_modules") from None


def _check_profile_dir(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        message = f"--profile-dir must be a folder that can be written to, got {folder} ({error.strerror})"
        raise FileError(message, param="profile_dir") from None


def read_defaults(path: Path) -> Mapping[str, Any]:
    """Return the model's own sampling defaults, from its generation_config.json; empty if it has none."""
    file = path / "generation_config.json"
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text())
        values = {ours: found[theirs] for theirs, ours in _DEFAULTS.items() if found.get(theirs) is not None}
        SamplingParams(**values)
    except (ValueError, TypeError, AttributeError) as error:  # not JSON, not an object, or a value of a wrong type
        message = f"{file} cannot be used ({error}): correct it, or start with --generation-config none"
        raise CheckpointError(message, param="generation_config") from None
    return values


def read_tokenizer(path: Path) -> Tokenizer:
    """Read the model's tokenizer; the engine's process loads the weights."""
    if path.suffix == ".gguf":
        from dovetail.io.gguf import GgufCheckpoint

        return GgufCheckpoint(path).tokenizer()
    if not (path / "tokenizer.json").exists():
        raise CheckpointError(f"{path} must have a tokenizer.json: a server needs it to read and write text")
    return Tokenizer.from_folder(path)


def read_image_processor(path: Path, tokenizer: Tokenizer) -> ImageProcessor | None:
    """Return the model's image processor, or None for a model that reads text only."""
    if not any((path / name).is_file() for name in ("preprocessor_config.json", "processor_config.json")):
        return None
    from dovetail.io.images.processor import read_processor  # these load jax
    from dovetail.models.registry import read_config

    vision = read_config(path).vision
    return None if vision is None else read_processor(path, vision, tokenizer)


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that is bound and does not listen yet: until the server is ready, clients are refused."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named because asyncio turns off Nagle's delay, 40 ms per event, only for a socket that names it.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host.strip("[]"), port))
    except OSError as error:
        sock.close()
        raise FileError(f"cannot listen on {host}:{port}: {_reason(error)}", param="port") from None
    return sock


def _reason(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "another program listens there; stop it, or choose another --port (0: any free one)"
    if error.errno == errno.EACCES:
        return "ports below 1024 are reserved for the system; choose a higher --port"
    return f"{error.strerror}; choose another --host or --port"
