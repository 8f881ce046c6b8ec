"""How a machine is set up: what makes jax fail, run on the wrong chip, or run slowly, found before it does."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from dovetail.doctor.finding import Finding

GIB = 1 << 30
LOCKS = ("tmp/libtpu_lockfile",)  # below the root
CHIP_FILES = ("dev/accel*", "dev/vfio/[0-9]*", "dev/nvidia[0-9]*")


def system(root: Path = Path("/"), coordinator: str = "") -> list[Finding]:
    """`root`: where this machine's /proc, /sys and /dev are; `coordinator`: host:port of a run with several hosts."""
    found = [*_versions(), *_backend(root), *_holders(root), *_locks(root), *_limits(), *_kernel(root)]
    return [*found, *_coordinator(coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS", ""))]


# --- software ---------------------------------------------------------------------------------------------------------


def _versions() -> Iterator[Finding]:
    jax, jaxlib = _version("jax"), _version("jaxlib")
    told = f"jax {jax}, jaxlib {jaxlib}" + "".join(f", {p} {_version(p)}" for p in ("libtpu",) if _version(p))
    if jaxlib and jax and jax != jaxlib:
        yield Finding("fault", "versions", f"{told}: not of one release", f"pip install jax=={jax} jaxlib=={jax}")
    else:
        yield Finding("good", "versions", told)
    plugins = {name: _version(name) for name in ("jax-cuda13-plugin", "jax-cuda12-plugin")}
    for name, has in plugins.items():
        if has and jax and has != jax:
            yield Finding("fault", "versions", f"{name} {has} beside jax {jax}", f"pip install {name}=={jax}")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _backend(root: Path) -> Iterator[Finding]:
    """An accelerator in the machine and jax on the CPU: the commonest and the quietest of faults."""
    import jax

    backend = jax.default_backend()
    kinds = sorted({device.device_kind for device in jax.devices()})
    told = f"jax runs on {jax.device_count()} x {', '.join(kinds)} ({backend})"
    wanted = os.environ.get("JAX_PLATFORMS", "")
    for name, pattern, extra in (("NVIDIA GPU", "dev/nvidia[0-9]*", "cuda"), ("TPU", "dev/accel*", "tpu")):
        if backend == "cpu" and any(root.glob(pattern)):
            how = f"unset JAX_PLATFORMS, which is {wanted!r}" if wanted else f"pip install 'dovetail[{extra}]'"
            yield Finding("warning", "backend", f"{told}, and this machine has a {name}", how)
            return
    yield Finding("good", "backend", told)


# --- who is there already ---------------------------------------------------------------------------------------------


def _holders(root: Path) -> Iterator[Finding]:
    """Processes that hold a chip open, other than this one: a TPU has room for one program, a GPU's memory too."""
    chips = {str(path) for pattern in CHIP_FILES for path in root.glob(pattern)}
    holders: dict[int, str] = {}
    for process in root.glob("proc/[0-9]*") if chips else ():
        if int(process.name) not in (os.getpid(), os.getppid()) and _opens(process, chips):
            holders[int(process.name)] = _command(process)
    for pid, command in sorted(holders.items()):
        yield Finding(
            "warning", "who holds a chip", f"process {pid}: {command}", f"end it (kill {pid}), or wait for it"
        )
    if chips and not holders:
        yield Finding("good", "who holds a chip", "nobody else")


def _opens(process: Path, chips: set[str]) -> bool:
    try:
        return any(os.readlink(one) in chips for one in (process / "fd").iterdir())
    except OSError:  # it ended meanwhile, or is another user's
        return False


def _command(process: Path) -> str:
    try:
        return (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:80]
    except OSError:
        return "it ended"


def _locks(root: Path) -> Iterator[Finding]:
    for path in (root / name for name in LOCKS):
        if path.exists():
            yield Finding(
                "warning", "lock file", f"{path} is left from a program on the TPU",
                f"if none runs: rm {path}",
            )  # fmt: skip


# --- the kernel -------------------------------------------------------------------------------------------------------


def _limits() -> Iterator[Finding]:
    locked, files = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if locked != resource.RLIM_INFINITY and locked < 64 << 20:
        yield Finding(
            "note", "memlock", f"{locked >> 10:,} KiB may be locked; transfers to a TPU or over RDMA want more",
            "ulimit -l unlimited, or a line in /etc/security/limits.conf",
        )  # fmt: skip
    if files != resource.RLIM_INFINITY and files < 4096:
        yield Finding(
            "warning", "open files", f"at most {files:,}; many shards and streams need more", "ulimit -n 65536"
        )


def _kernel(root: Path) -> Iterator[Finding]:
    pages = root / "sys/kernel/mm/transparent_hugepage/enabled"
    if pages.exists() and "[never]" in pages.read_text():
        yield Finding(
            "note", "huge pages", "transparent huge pages are off: checkpoints load more slowly, TPU hosts more so",
            f"echo always > {pages}",
        )  # fmt: skip
    shared = root / "dev/shm"
    if shared.exists():
        free = shutil.disk_usage(shared).free
        good = free >= GIB
        yield Finding(
            "good" if good else "warning", "/dev/shm", f"{free / GIB:.1f} GiB free",
            "" if good else "start the container with --shm-size=8g: processes pass arrays through it",
        )  # fmt: skip


def _coordinator(address: str) -> Iterator[Finding]:
    """The name and port that all processes of a run meet at."""
    if not address:
        return
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal():
        yield Finding("fault", "coordinator", f"{address!r} is no host:port", "give it as 10.0.0.2:8476")
        return
    try:
        place = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0][4]
    except OSError as error:
        yield Finding("fault", "coordinator", f"no address for {host!r} ({error})", "check its DNS name, or give an IP")
        return
    try:
        socket.create_connection((str(place[0]), int(port)), timeout=3).close()
        yield Finding("good", "coordinator", f"{address} answers")
    except OSError as error:
        yield Finding(
            "note", "coordinator", f"nobody listens at {address} now ({error})",
            "in a run, process 0 must be there first, and a firewall must let its port through",
        )  # fmt: skip


def driver() -> str | None:
    """NVIDIA's driver and the highest CUDA it knows, as nvidia-smi says."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout.split()
    return told[0] if told else None
