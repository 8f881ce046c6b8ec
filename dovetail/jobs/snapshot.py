"""The code of a job as it was when the job was created: an archive, named by the digest of its contents.

The same tree gives the same archive, byte for byte, on every machine. Files that look like secrets, and files that are
too large to be code, are refused before anything leaves the machine. git decides which files belong to the code;
without git, the .gitignore files do.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import shutil
import subprocess
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from dovetail.core.errors import MissingFileError, NotPermittedError, UserError
from dovetail.core.files import check_own_folder
from dovetail.jobs import files
from dovetail.jobs.secrets import holds_token
from dovetail.jobs.spec import CodeSpec

SECRET_FILES = re.compile(
    r"(^|/)(\.env(\.(?!example|sample|template)[\w.-]+)?|\.netrc|\.pypirc|\.npmrc|id_(rsa|dsa|ecdsa|ed25519)|"
    r"credentials(\.json)?|application_default_credentials\.json|kubeconfig|[^/]*\.(pem|p12|pfx|key|keystore))$"
)
SEARCHED = 1 << 20  # bytes of a file that are searched for tokens
SHOWN = 5
DAMAGED = (tarfile.TarError, EOFError, zlib.error)  # raised by reading a damaged archive
ALWAYS = (".git/", "__pycache__/", "*.pyc", ".venv/", "venv/", ".ruff_cache/", ".pytest_cache/", "node_modules/")


# --- taking -----------------------------------------------------------------------------------------------------------


def source(code: CodeSpec, base: Path | None = None) -> Path:
    """Return the folder that the code is taken from; `code.path` is relative to `base`."""
    root = (base or Path()) / Path(code.path).expanduser()
    if not root.is_dir():
        raise MissingFileError(f"`code.path` must be a folder; there is no {root}", param="code.path")
    return root


def command_folder(code: CodeSpec, base: Path | None = None) -> Path | None:
    """Return the folder of this machine that corresponds to the command's working directory; None without code."""
    if not code.path:
        return None
    folder = source(code, base) / code.cwd
    if not folder.is_dir():
        raise MissingFileError(f"`code.cwd` must be a folder of the code; there is no {folder}", param="code.cwd")
    return folder


def settled(code: CodeSpec, base: Path | None = None) -> CodeSpec:
    """Return the code that is taken for a subfolder of a git repository: the repository, with `cwd` the subfolder.

    So scripts in the subfolder can import the repository's own packages.
    """
    if not code.path or code.cwd:
        return code
    root = source(code, base).resolve()
    top = repository(root)
    if top is None or top == root or not code_files(root, code.exclude):  # git may ignore the folder itself
        return code
    return replace(code, path=str(top), cwd=str(PurePosixPath(root.relative_to(top))))


def take(code: CodeSpec, folder: Path, base: Path | None = None) -> str:
    """Write the archive into `folder`, unless it exists; return its digest."""
    root = source(code, base)
    command_folder(code, base)
    paths = code_files(root, code.exclude)
    _check_sizes(root, paths, code)
    _check_secrets(root, paths, code)
    digest = _digest(root, paths)
    target = folder / f"{digest}.tar.gz"
    files.make_folder(folder, files.OWN)
    if files.has_group(folder.parent):
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
        raise NotPermittedError(f"{error}, and the code of your jobs would be kept there: remove it") from None


def _check_sizes(root: Path, paths: Sequence[PurePosixPath], code: CodeSpec) -> None:
    sizes = {path: (root / path).stat().st_size for path in paths}
    large = [f"{path} ({size / 1e6:.0f} MB)" for path, size in sizes.items() if size > code.file_mb * 1e6]
    how = f"add them to .gitignore or `code.exclude`{_how_to_narrow(code)}"
    if large:
        raise UserError(
            f"code: files of more than {code.file_mb:g} MB are data, not code: {_some(large)}; {how}",
            param="code.file_mb",
        )
    if sum(sizes.values()) > code.total_mb * 1e6:
        top = sorted(sizes, key=lambda path: -sizes[path])[:SHOWN]
        raise UserError(
            f"code: {sum(sizes.values()) / 1e6:.0f} MB in {len(paths)} files exceed `code.total_mb`, {code.total_mb:g} "
            f"MB; the largest are {', '.join(map(str, top))}: {how}, or raise `code.total_mb`",
            param="code.total_mb",
        )


def _how_to_narrow(code: CodeSpec) -> str:
    """Say how to take less than a whole repository."""
    return f" (the repository {code.path} is taken; code.cwd=. takes the folder {code.cwd} alone)" if code.cwd else ""


def _check_secrets(root: Path, paths: Sequence[PurePosixPath], code: CodeSpec) -> None:
    found = [str(path) for path in paths if SECRET_FILES.search(str(path)) or _holds_secret(root / path)]
    if found:
        raise UserError(
            f"code: these files look like secrets: {_some(found)}; add them to .gitignore or "
            f"`code.exclude`{_how_to_narrow(code)}, and give the values as `secrets: [NAME=env:NAME]`",
            param="code.exclude",
            code="secret_in_code",
        )


def _holds_secret(path: Path) -> bool:
    with path.open("rb") as file:
        return holds_token(file.read(SEARCHED))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _digest(root: Path, paths: Sequence[PurePosixPath]) -> str:
    """Hash names, executable bits and contents, but not times or owners."""
    whole = hashlib.sha256()
    for path in paths:
        contents = hashlib.sha256((root / path).read_bytes()).hexdigest()
        whole.update(f"{path}\0{int(_is_executable(root / path))}\0{contents}\n".encode())
    return whole.hexdigest()[:32]


def _is_executable(path: Path) -> bool:
    return bool(path.stat().st_mode & 0o100)


def _write(root: Path, paths: Sequence[PurePosixPath], target: Path) -> None:
    with (
        open(target, "wb", opener=files.opener) as raw,
        gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for path in paths:
            info = tarfile.TarInfo(str(path))
            info.size = (root / path).stat().st_size
            info.mode = 0o755 if _is_executable(root / path) else 0o644
            with (root / path).open("rb") as file:
                archive.addfile(info, file)


# --- unpacking --------------------------------------------------------------------------------------------------------


def names(archive: Path) -> list[str]:
    """Return the paths of the files in an archive; [] if it cannot be read."""
    try:
        with tarfile.open(archive) as packed:
            return packed.getnames()
    except (OSError, *DAMAGED):
        return []


def unpack(archive: Path, folder: Path) -> None:
    """Extract an archive to `folder` atomically, unless that exists."""
    if folder.exists():
        return
    beside = folder.with_name(f"{folder.name}.{os.getpid()}.part")
    shutil.rmtree(beside, ignore_errors=True)
    files.make_folder(beside)
    try:
        beside.chmod(0o700)  # the umask may let a group write the extracted files
        with tarfile.open(archive) as packed:
            for member in packed:
                extract(packed, member, beside)
        for path in beside.rglob("*"):
            path.chmod(path.stat().st_mode & ~0o022)
        beside.chmod(files.folder_mode(beside))
    except DAMAGED as error:
        raise UserError(f"the code of the job, {archive}, cannot be unpacked: {error}") from error
    try:
        beside.rename(folder)
    except OSError:  # another process was first
        shutil.rmtree(beside, ignore_errors=True)
        if not folder.exists():
            raise


def extract(packed: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    """Write one file or folder below `folder`; raise tarfile.TarError for links, devices and paths that leave it.

    `tarfile` has such a filter from Python 3.11.4 on. Only the owner's executable bit of the mode is kept.
    """
    target = _target(member.name, folder)
    if member.isdir():
        target.mkdir(parents=True, exist_ok=True)
        return
    held = packed.extractfile(member) if member.isreg() else None
    if held is None:
        raise tarfile.ExtractError(f"{member.name!r} in the archive is neither a file nor a folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    with held, target.open("wb") as file:
        shutil.copyfileobj(held, file)
    if member.mode & 0o100:
        target.chmod(target.stat().st_mode | 0o111)


def _target(name: str, folder: Path) -> Path:
    path = PurePosixPath(name)
    target = folder / path
    if path.is_absolute() or ".." in path.parts or not target.resolve().is_relative_to(folder.resolve()):
        raise tarfile.ExtractError(f"{name!r} in the archive leads out of its folder")
    return target


# --- which files belong to the code -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class IgnoreRule:
    """Hold one line of a .gitignore, for paths below the file's folder."""

    base: PurePosixPath
    pattern: re.Pattern[str]
    only_folders: bool
    negated: bool

    def matches(self, path: PurePosixPath, is_folder: bool) -> bool:
        """Return whether the rule applies to a path."""
        if (self.only_folders and not is_folder) or not path.is_relative_to(self.base):
            return False
        return self.pattern.fullmatch(str(path.relative_to(self.base))) is not None


def parse_rule(line: str, base: PurePosixPath = PurePosixPath()) -> IgnoreRule | None:
    """Parse a line of a .gitignore; None for a comment or an empty line."""
    text = line.rstrip("\n").rstrip()
    if not text or text.startswith("#"):
        return None
    negated, text = text.startswith("!"), text.removeprefix("!")
    only_folders, text = text.endswith("/"), text.rstrip("/")
    anchored, text = "/" in text, text.lstrip("/")
    inner = _regex(text)
    return IgnoreRule(base, re.compile(inner if anchored else f"(?:.*/)?{inner}"), only_folders, negated)


def _regex(text: str) -> str:
    """Translate git's wildcards: * and ? do not match a slash, ** does."""
    out, i = "", 0
    while i < len(text):
        if text.startswith("**/", i):
            out, i = out + "(?:.*/)?", i + 3
        elif text.startswith("**", i):
            out, i = out + ".*", i + 2
        elif text[i] == "[" and "]" in text[i + 2 :]:
            end = text.index("]", i + 2)
            inner = text[i + 1 : end].replace("\\", r"\\")
            out, i = out + "[" + ("^" + inner[1:] if inner[0] == "!" else inner) + "]", end + 1
        else:
            out, i = out + {"*": "[^/]*", "?": "[^/]"}.get(text[i], re.escape(text[i])), i + 1
    return out


def code_files(root: Path, exclude: Sequence[str] = ()) -> list[PurePosixPath]:
    """Return the sorted paths below `root` that are neither ignored nor excluded."""
    own = [made for made in map(parse_rule, (*ALWAYS, *exclude)) if made]
    listed = _listed_by_git(root)
    if listed is None:
        return sorted(_walk(root, PurePosixPath(), own))
    return sorted(path for path in listed if not _is_below_ignored(path, own) and (root / path).is_file())


def repository(root: Path) -> Path | None:
    """Return the top folder of the git repository that contains `root`; None without one, or without git."""
    found = _git(root, "rev-parse", "--show-toplevel")
    return Path(found.rstrip("\n")).resolve() if found and found.rstrip("\n") else None


def _listed_by_git(root: Path) -> list[PurePosixPath] | None:
    """Return the tracked files and those that are not ignored; None outside a repository, or without git."""
    found = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    return None if found is None else sorted({PurePosixPath(name) for name in found.split("\0") if name})


def _git(root: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, check=False)
    except OSError:
        return None
    return None if done.returncode else os.fsdecode(done.stdout)


def _is_below_ignored(path: PurePosixPath, rules: Sequence[IgnoreRule]) -> bool:
    folders = [folder for folder in path.parents if folder != PurePosixPath()]
    return _is_ignored(path, False, rules) or any(_is_ignored(folder, True, rules) for folder in folders)


def _is_ignored(path: PurePosixPath, is_folder: bool, rules: Sequence[IgnoreRule]) -> bool:
    """Apply the last rule that matches."""
    decided = [one for one in rules if one.matches(path, is_folder)]
    return bool(decided) and not decided[-1].negated


def _walk(root: Path, at: PurePosixPath, rules: list[IgnoreRule]) -> Iterator[PurePosixPath]:
    ignore = root / at / ".gitignore"
    if ignore.is_file():
        rules = rules + [made for made in (parse_rule(line, at) for line in ignore.read_text().splitlines()) if made]
    for entry in sorted(os.scandir(root / at), key=lambda e: e.name):
        path, is_folder = at / entry.name, entry.is_dir(follow_symlinks=False)
        if _is_ignored(path, is_folder, rules):
            continue
        if is_folder:
            yield from _walk(root, path, rules)
        elif entry.is_file():
            yield path
