"""Datasets on the hub, as the local files that they become: `org/name`, or `hf://datasets/org/name/FILES`.

`org/name` means the files of the train split, or all where no file is named after a split. Which files a dataset has,
and in which folders its configurations are, is for the user to say by FILES: a folder or a pattern.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from pathlib import Path

from dovetail.core.errors import UserError
from dovetail.io.hub import HUB_ID, fetch_dataset

PREFIX = "hf://datasets/"
CARD = ".md"  # describes a dataset on the hub, and is no text to train on
SPLIT = re.compile(r"(?:^|[-_./])(train|validation|valid|dev|test)(?=[-_./]|$)")


def is_hub_dataset(path: str, endings: Sequence[str]) -> bool:
    """Whether a source's path names a dataset on the hub. `org/name` does if nothing here has that path, and if it does
    not end as a file of data does."""
    if path.startswith(PREFIX):
        return True
    return bool(HUB_ID.fullmatch(path)) and not path.lower().endswith(tuple(endings)) and not Path(path).exists()


def folder_of(path: str, endings: Sequence[str]) -> tuple[Path, str, str]:
    """Return the local folder of a dataset with its files of data, its hub id, and which FILES the path names."""
    org, _, rest = path.removeprefix(PREFIX).partition("/")
    name, _, wanted = rest.partition("/")
    hub_id = f"{org}/{name}"
    if not HUB_ID.fullmatch(hub_id):
        raise UserError(f"expected a dataset as org/name, {PREFIX}org/name or {PREFIX}org/name/FILES, got {path!r}")
    return fetch_dataset(hub_id, [f"*{ending}" for ending in endings if ending != CARD]), hub_id, wanted


def fetch(path: str, endings: Sequence[str]) -> list[Path]:
    """Return the files of a dataset, fetched or from the hub's cache, in the order of their names."""
    folder, hub_id, wanted = folder_of(path, endings)
    below = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    files = [file for file in below if file.lower().endswith(tuple(endings)) and not file.endswith(CARD)]
    chosen = _named(files, wanted) if wanted else _train(files)
    if not chosen:
        raise UserError(
            f"expected files ending in {' '.join(endings)} in the dataset {path!r}, found none; it holds "
            f"{', '.join(files[:8]) or 'no such file'}"
        )
    folders = sorted({str(Path(file).parent) for file in chosen})
    if len(folders) > 1 and not wanted:
        raise UserError(
            f"the dataset {hub_id} has data in several folders ({', '.join(folders)}): name one, such as "
            f"{PREFIX}{hub_id}/{folders[0]}"
        )
    return [folder / file for file in chosen]


def _named(files: list[str], wanted: str) -> list[str]:
    """Those that a pattern matches, or those of the train split below a folder."""
    wanted = wanted.rstrip("/")
    inside = [file for file in files if file.startswith(f"{wanted}/")]
    return _train(inside) if inside else [file for file in files if fnmatch.fnmatch(file, wanted)]


def _train(files: list[str]) -> list[str]:
    splits = {file: found[-1] if (found := SPLIT.findall(file.lower())) else "" for file in files}
    return [file for file in files if splits[file] == "train"] or [file for file in files if not splits[file]]
