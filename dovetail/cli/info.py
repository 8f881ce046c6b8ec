"""`dovetail info` and `dovetail report`: describe this machine, a model or a run."""

import typer

from dovetail.cli.tables import framed, pairs

PACKAGES = (
    "jax",
    "jaxlib",
    "numpy",
    "optax",
    "orbax-checkpoint",
    "safetensors",
    "tokenizers",
    "huggingface_hub",
    "gguf",
)


def info(
    model: str = typer.Argument(
        None, help="Folder, .gguf file, hub id (only its config is downloaded), catalogue name or shipped architecture."
    ),
    backend: str = typer.Option(
        "jax", metavar="jax|torch", help="torch: a model that Dovetail does not implement, as a PyTorch module."
    ),
    kernels: str = typer.Option("", help="tpu: the attention kernels of each TPU generation."),
    watch: bool = typer.Option(False, "--watch", help="Show the use of each chip every second until Ctrl-C."),
) -> None:
    """Show versions, devices, dtypes and kernels; with MODEL, describe it."""
    from rich.console import Console

    from dovetail.core.choice import one_of

    console = Console(highlight=False)
    if model is not None:
        one_of("--backend", backend, ("jax", "torch"))
        console.print(pairs(model, _torch_model(model) if backend == "torch" else _model(model)))
        return
    if kernels:
        one_of("--kernels", kernels, ("tpu",))
        console.print(_kernels_of_tpus())
        return
    if watch:
        _watch(console)
        return
    console.print(pairs("versions", _versions()))
    console.print(pairs("devices", _devices()))
    console.print(_usages())
    console.print(pairs("dtypes here", _dtypes()))
    console.print(_kernels())


def _model(name: str) -> list[tuple[str, str]]:
    """Describe a model without reading its weights; a catalogue name is downloaded first."""
    import os

    from dovetail.core.compute import compute_of
    from dovetail.core.reporter import bar
    from dovetail.io import hub
    from dovetail.io.adapter_folder import base_of
    from dovetail.io.load import formats_in, outline, own_dtype, summary

    if base := base_of(name):
        return [*_adapter(name), *_model(base)[:-1]]
    where = name
    if name in hub.CATALOGUE:
        with bar() as progress:
            where = os.fspath(hub.resolve(name, progress))
    cfg, stored = outline(where)
    stored = compute_of(stored or "bf16")
    compute = compute_of(own_dtype(stored.name))
    return [*summary(cfg, stored.dtype, compute, formats_in(where)), ("from", name)]


def _torch_model(name: str) -> list[tuple[str, str]]:
    """Describe a model that is run as a PyTorch module; its weights are read."""
    from dovetail.core.reporter import bar
    from dovetail.io.load import load

    with bar() as progress:
        return load(name, progress=progress, backend="torch").summary()


def _adapter(folder: str) -> list[tuple[str, str]]:
    """Describe an adapter."""
    import math
    from pathlib import Path

    from dovetail.io.adapter_folder import read_adapter_config
    from dovetail.io.safetensor_folder import SafetensorFolder

    path = Path(folder).expanduser()
    raw, stored = read_adapter_config(path), SafetensorFolder(path)
    count = sum(math.prod(shape) for shape, _ in stored.tensors().values())
    targets = raw.get("target_modules") or raw.get("target_parameters") or "all-linear"
    return [
        ("adapter", f"{'DoRA' if raw.get('use_dora') else 'LoRA'} of rank {raw['r']}, alpha {raw['lora_alpha']:g}"),
        ("adapted", targets if isinstance(targets, str) else ", ".join(targets)),
        ("its parameters", f"{count / 1e6:,.2f} M"),
        ("base", str(raw["base_model_name_or_path"])),
    ]


def _versions() -> list[tuple[str, str]]:
    import platform
    from importlib.metadata import PackageNotFoundError, version

    from dovetail import __version__

    def of(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "not installed"

    rows = [("dovetail", __version__), ("python", f"{platform.python_version()} on {platform.platform()}")]
    return rows + [(package, of(package)) for package in PACKAGES]


def _devices() -> list[tuple[str, str]]:
    import os

    import jax

    from dovetail.core.chips import chip_of

    kinds: dict[str, int] = {}
    for device in jax.devices():
        kinds[device.device_kind] = kinds.get(device.device_kind, 0) + 1
    devices = ", ".join(f"{count} × {kind}" for kind, count in kinds.items())
    hosts = f"{jax.process_index() + 1} of {jax.process_count()}"
    chip = chip_of(jax.devices()[0])
    peak = [("peak of each chip", _peak(chip))] if chip else []
    found = [("backend", jax.default_backend()), ("devices", devices), ("host", hosts), ("CPUs", str(os.cpu_count()))]
    return found + peak


def _peak(chip) -> str:
    memory = f"{chip.hbm / 2**30:.0f} GiB at {chip.bandwidth / 1e12:.3g} TB/s"
    return f"{chip.bf16 / 1e12:,.0f} TFLOP/s bf16, {memory} ({chip.source})"


def _usages():
    from dovetail.doctor.usage import usages

    out = framed("in use now", "chip", "kind", "memory", "busy", "")
    for one in usages():
        memory = f"{one.used / 2**30:.1f} of {one.total / 2**30:.1f} GiB" if one.total else "not known"
        out.add_row(one.chip, one.kind, memory, "not known" if one.busy is None else f"{one.busy:.0%}", one.more)
    return out


def _watch(console) -> None:
    import time

    from rich.live import Live

    with Live(_usages(), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(1)
            live.update(_usages(), refresh=True)


def _dtypes() -> list[tuple[str, str]]:
    from dovetail.core.compute import COMPUTES

    return [(name, compute.describe()) for name, compute in COMPUTES.items()]


def _kernels():
    from dovetail.ops.describe import describe

    out = framed("kernels", "operation", "platform", "implementation")
    for row in describe():
        out.add_row(*map(str, row))
    return out


def _kernels_of_tpus():
    """Return the attention kernels of TPUs; generations with the same kernels share a row."""
    import re

    from dovetail.ops.describe import describe_tpu

    shared: dict[tuple[str, ...], list[str]] = {}
    for what, generation, packed, paged, why in describe_tpu():
        why = re.sub(r", and this is TPU \w+", "", why)  # the row says so
        shared.setdefault((what, packed, paged, why), []).append(generation)
    out = framed(
        "attention on TPUs", "what", "generation", "packed (training)", "paged (serving)", "why not a better one"
    )
    for (what, packed, paged, why), generations in shared.items():
        out.add_row(what, ", ".join(generations), packed, paged, why)
    return out


def report(
    run_dir: str = typer.Argument(help="Folder of a run, finished or not."),
    out: str = typer.Option("", help="File to write the page to. Default: RUN_DIR/report.html."),
) -> None:
    """Show a run's metrics and write its HTML report with the curves."""
    from rich.console import Console

    from dovetail.train.report.page import write
    from dovetail.train.report.summary import read, summary

    run = read(run_dir)
    page = write(run_dir, out or None)
    console = Console(highlight=False)
    console.print(pairs(run.name, summary(run)))
    console.print(f"report with curves, lost time and recipe: {page}", markup=False, soft_wrap=True)
