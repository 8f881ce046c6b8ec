"""The code of a job as it was when the job was made: an archive named by the digest of what is in it.

The same tree gives the same archive, byte for byte, whenever and wherever it is taken. What looks like a secret, and
what is too large to be code, is refused before anything leaves the machine.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import shutil
import tarfile
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from dovetail.core.errors import UserError
from dovetail.core.files import check_own_folder
from dovetail.jobs import ignore, modes
from dovetail.jobs.archive import extract
from dovetail.jobs.sensitive import holds_token
from dovetail.jobs.spec import Code

SECRET_FILES = re.compile(
    r"(^|/)(\.env(\.(?!example|sample|template)[\w.-]+)?|\.netrc|\.pypirc|\.npmrc|id_(rsa|dsa|ecdsa|ed25519)|"
    r"credentials(\.json)?|application_default_credentials\.json|kubeconfig|[^/]*\.(pem|p12|pfx|key|keystore))$"
)
LOOKED_AT = 1 << 20  # bytes of a file that are searched
SHOWN = 5
DAMAGED = (tarfile.TarError, EOFError, zlib.error)  # what reading a torn archive raises


def source(code: Code, base: Path | None = None) -> Path:
    """Return the folder that the code is taken from. `base`: what `code.path` is relative to."""
    root = (base or Path()) / Path(code.path).expanduser()
    if not root.is_dir():
        raise UserError(f"code.path must be a folder; there is no {root}")
    return root


def command_folder(code: Code, base: Path | None = None) -> Path | None:
    """Return the folder of this machine that the command will see as its own; None for a job without code."""
    if not code.path:
        return None
    folder = source(code, base) / code.cwd
    if not folder.is_dir():
        raise UserError(f"code.cwd must be a folder of the code; there is no {folder}")
    return folder


def settled(code: Code, base: Path | None = None) -> Code:
    """Return `code` as it is taken: from a subfolder of a git repository the repository, with the command run in that
    subfolder, so that scripts find the repository's own packages."""
    if not code.path or code.cwd:
        return code
    root = source(code, base).resolve()
    top = ignore.repository(root)
    if top is None or top == root or not ignore.files(root, code.exclude):  # git may ignore the folder itself
        return code
    return replace(code, path=str(top), cwd=str(PurePosixPath(root.relative_to(top))))


def take(code: Code, folder: Path, base: Path | None = None) -> str:
    """Write the archive into `folder`, unless it is there; its digest."""
    root = source(code, base)
    command_folder(code, base)
    paths = ignore.files(root, code.exclude)
    _check_sizes(root, paths, code)
    _check_secrets(root, paths, code)
    digest = _digest(root, paths)
    target = folder / f"{digest}.tar.gz"
    modes.make_folder(folder, modes.OWN)
    if modes.has_group(folder.parent):
        _check_own(folder)
    if not os.access(target, os.R_OK):
        beside = target.with_suffix(f".{os.getpid()}.part")
        _write(root, paths, beside)
        beside.replace(target)
    return digest


def _check_own(folder: Path) -> None:
    try:
        check_own_folder(folder)
    except PermissionError as error:
        raise UserError(f"{error}, and the code of your jobs would be kept there: remove it") from None


def _check_sizes(root: Path, paths: Sequence[PurePosixPath], code: Code) -> None:
    sizes = {path: (root / path).stat().st_size for path in paths}
    large = [f"{path} ({size / 1e6:.0f} MB)" for path, size in sizes.items() if size > code.file_mb * 1e6]
    how = f"add them to .gitignore or code.exclude{_narrower(code)}"
    if large:
        raise UserError(f"code: files of more than {code.file_mb:g} MB are data, not code: {_some(large)}; {how}")
    if sum(sizes.values()) > code.total_mb * 1e6:
        top = sorted(sizes, key=lambda path: -sizes[path])[:SHOWN]
        raise UserError(
            f"code: {sum(sizes.values()) / 1e6:.0f} MB in {len(paths)} files, and {code.total_mb:g} MB is the most; "
            f"the largest are {', '.join(map(str, top))}: {how}, or raise code.total_mb"
        )


def _narrower(code: Code) -> str:
    """How to take less than a whole repository."""
    return f" (the repository {code.path} is taken; code.cwd=. takes the folder {code.cwd} alone)" if code.cwd else ""


def _check_secrets(root: Path, paths: Sequence[PurePosixPath], code: Code) -> None:
    found = [str(path) for path in paths if SECRET_FILES.search(str(path)) or _holds_secret(root / path)]
    if found:
        raise UserError(
            f"code: what looks like a secret would be taken along: {_some(found)}; add it to .gitignore or "
            f"code.exclude{_narrower(code)}, and give its value as `secrets: [NAME=env:NAME]`"
        )


def _holds_secret(path: Path) -> bool:
    with path.open("rb") as file:
        return holds_token(file.read(LOOKED_AT))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _digest(root: Path, paths: Sequence[PurePosixPath]) -> str:
    """Of names, the executable bit and contents: not of times or owners."""
    whole = hashlib.sha256()
    for path in paths:
        contents = hashlib.sha256((root / path).read_bytes()).hexdigest()
        whole.update(f"{path}\0{int(_is_executable(root / path))}\0{contents}\n".encode())
    return whole.hexdigest()[:32]


def _is_executable(path: Path) -> bool:
    return bool(path.stat().st_mode & 0o100)


def _write(root: Path, paths: Sequence[PurePosixPath], target: Path) -> None:
    with (
        open(target, "wb", opener=modes.opener) as raw,
        gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for path in paths:
            info = tarfile.TarInfo(str(path))
            info.size = (root / path).stat().st_size
            info.mode = 0o755 if _is_executable(root / path) else 0o644
            with (root / path).open("rb") as file:
                archive.addfile(info, file)


def names(archive: Path) -> list[str]:
    """Return the paths of the files in it; none where it cannot be read."""
    try:
        with tarfile.open(archive) as packed:
            return packed.getnames()
    except (OSError, *DAMAGED):
        return []


def unpack(archive: Path, folder: Path) -> None:
    """Extract `archive` to `folder`, unless that exists: beside it first, then renamed."""
    if folder.exists():
        return
    beside = folder.with_name(f"{folder.name}.{os.getpid()}.part")
    shutil.rmtree(beside, ignore_errors=True)
    modes.make_folder(beside)
    try:
        beside.chmod(0o700)  # the umask may let a group write what is extracted
        with tarfile.open(archive) as packed:
            for member in packed:
                extract(packed, member, beside)
        for path in beside.rglob("*"):
            path.chmod(path.stat().st_mode & ~0o022)
        beside.chmod(modes.folder_mode(beside))
    except DAMAGED as error:
        raise UserError(f"the code of the job, {archive}, cannot be unpacked: {error}") from error
    try:
        beside.rename(folder)
    except OSError:  # another was first
        shutil.rmtree(beside, ignore_errors=True)
        if not folder.exists():
            raise
