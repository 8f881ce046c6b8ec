"""Read and write the files of a tokenizer: tokenizer.json and the configs and templates beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from dovetail.core.errors import MissingFileError, UserError

# tokenizer_config.json's names for what Tokenizer's arguments hold.
_NAMED = {"bos": "bos_token", "eos": "eos_token", "pad": "pad_token", "unk": "unk_token"}
_MORE_TEMPLATES = "additional_chat_templates"


class SavedTokenizer(Protocol):
    """Describe what is saved of a tokenizer (io.tokenizer.Tokenizer)."""

    backend: Backend
    extra: dict[str, Any]
    eos_ids: tuple[int, ...]

    @property
    def special_tokens(self) -> dict[str, str]:
        """Return special tokens by name."""
        ...

    @property
    def chat_templates(self) -> dict[str, str]:
        """Return chat templates by name."""
        ...

    @property
    def add_bos(self) -> bool | None:
        """Return whether a text begins with BOS."""
        ...

    @property
    def add_eos(self) -> bool | None:
        """Return whether a text ends with EOS."""
        ...


def read(folder: Path) -> dict[str, Any]:
    """Return the arguments of a Tokenizer from a folder."""
    backend = _backend(folder)
    config = _config(folder)
    arguments = {argument: token_text(config.pop(key, None)) for argument, key in _NAMED.items()}
    return {
        **arguments,
        "backend": backend,
        "eos_ids": _eos_ids(folder, backend),
        "chat_template": _templates(folder, config.pop("chat_template", None)),
        "extra": config,
    }


def _backend(folder: Path) -> Backend:
    path = folder / "tokenizer.json"
    if not folder.is_dir():
        raise MissingFileError(f"there is no folder {folder}: give one with a tokenizer.json")
    if not path.is_file():
        other = [name for name in ("tokenizer.model", "vocab.json", "tekken.json") if (folder / name).is_file()]
        has = f"; it has {', '.join(other)}, which transformers' AutoTokenizer can read and save again" if other else ""
        raise MissingFileError(f"no such file: {path}; a tokenizer is read from its tokenizer.json{has}")
    try:
        return Backend.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception
        raise UserError(
            f"{path} is not a valid tokenizer.json ({error}); it may be cut short: fetch it again"
        ) from error


def _json(path: Path) -> dict[str, Any]:
    """Return the object in a file; {} if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}); it may be cut short: fetch it again") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, got {type(value).__name__}; fetch the file again")
    return value


def _config(folder: Path) -> dict[str, Any]:
    config = _json(folder / "tokenizer_config.json")
    # Here a token may be an object; tokenizer.json already holds its flags, and its text is all the config needs.
    special = {
        key: [token_text(token) for token in value] if isinstance(value, list) else token_text(value)
        for key, value in _json(folder / "special_tokens_map.json").items()
        if isinstance(value, list) or token_text(value) is not None
    }
    # The map is the older of the two files: configs that list added_tokens_decoder are complete in themselves.
    return special | config if "added_tokens_decoder" in config else config | special


def _eos_ids(folder: Path, backend: Backend) -> list[int]:
    """Return the ids that end a generation, of generation_config.json, else of config.json (or its text part)."""
    config = _json(folder / "config.json")
    text_config = config.get("text_config") or {}
    for source in (_json(folder / "generation_config.json"), config, text_config):
        found = source.get("eos_token_id")
        if found is not None:
            ids = found if isinstance(found, list) else [found]
            # A model's config may name an id its tokenizer has no token for; no generation can end on text of it.
            return [i for i in ids if isinstance(i, int) and i >= 0 and backend.id_to_token(i) is not None]
    return []


def read_templates(folder: Path) -> dict[str, str]:
    """Return the chat templates of a folder by name; empty if it has none."""
    return _templates(folder, _json(folder / "tokenizer_config.json").get("chat_template"))


def _templates(folder: Path, configured: Any) -> dict[str, str]:
    """Return chat templates by name.

    Files take precedence over tokenizer_config.json, and chat_template.json comes last.
    """
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted((folder / _MORE_TEMPLATES).glob("*.jinja"))}
    found = {name: path.read_text(encoding="utf-8") for name, path in files.items() if path.is_file()}
    if found:
        return found
    if configured is None:
        configured = _json(folder / "chat_template.json").get("chat_template")
    if isinstance(configured, list):
        configured = {entry["name"]: entry["template"] for entry in configured}
    if configured is None:
        return {}
    return dict(configured) if isinstance(configured, Mapping) else {"default": configured}


# --- tokens in a tokenizer_config.json ----------------------------------------------------------------------------


def token_text(value: Any) -> str | None:
    """Return a special token's text, which is given as text or as an object with 'content'."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def named_tokens(extra: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that have a name: *_token keys, and extra_special_tokens if it is an object."""
    named = {key: token_text(value) for key, value in extra.items() if key.endswith("_token")}
    more = extra.get("extra_special_tokens")
    if isinstance(more, Mapping):
        named |= {key: token_text(value) for key, value in more.items()}
    return {key: token for key, token in named.items() if token is not None}


def extra_special_tokens(extra: Mapping[str, Any]) -> list[str]:
    """Return the special tokens without a name, under the key's new or old spelling."""
    listed = extra.get("extra_special_tokens") or extra.get("additional_special_tokens") or []
    if isinstance(listed, Mapping):
        return []
    return [text for text in map(token_text, listed) if text is not None]


def added_tokens(extra: Mapping[str, Any]) -> dict[str, AddedToken]:
    """Return tokenizer_config.json's added tokens in the order of their ids; they override tokenizer.json's."""
    listed = extra.get("added_tokens_decoder") or {}
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return {
        token["content"]: AddedToken(token["content"], **{flag: token[flag] for flag in flags if flag in token})
        for _, token in sorted(listed.items(), key=lambda item: int(item[0]))
    }


# --- writing --------------------------------------------------------------------------------------------------------


def write(tokenizer: SavedTokenizer, folder: Path) -> None:
    """Write the files of a tokenizer into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    _dump(_config_of(tokenizer), folder / "tokenizer_config.json")
    unnamed = extra_special_tokens(tokenizer.extra)
    listed = {"additional_special_tokens": unnamed} if unnamed else {}
    _dump(tokenizer.special_tokens | listed, folder / "special_tokens_map.json")
    _write_templates(tokenizer.chat_templates, folder)
    generation = folder / "generation_config.json"
    # Stop ids have no other home. A model's own file, if it is there already, is not ours to change.
    if len(tokenizer.eos_ids) > 1 and not generation.exists():
        _dump({"eos_token_id": list(tokenizer.eos_ids)}, generation)


def _config_of(tokenizer: SavedTokenizer) -> dict[str, Any]:
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | tokenizer.extra
    config |= {key: getattr(tokenizer, argument) for argument, key in _NAMED.items()}
    flags = {"add_bos_token": tokenizer.add_bos, "add_eos_token": tokenizer.add_eos}
    return config | {key: flag for key, flag in flags.items() if flag is not None}


def _write_templates(templates: dict[str, str], folder: Path) -> None:
    default = folder / "chat_template.jinja"
    default.unlink(missing_ok=True)  # a template left from before would be read back as this tokenizer's
    for name, source in templates.items():
        if not re.fullmatch(r"[\w.-]+", name):
            raise UserError(f"expected a chat template's name to be a plain word, got {name!r}: it names a file")
        path = default if name == "default" else folder / _MORE_TEMPLATES / f"{name}.jinja"
        path.parent.mkdir(exist_ok=True)
        path.write_text(source, encoding="utf-8")


def _dump(value: Any, path: Path) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
