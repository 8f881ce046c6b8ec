"""`dovetail convert`: any checkpoint Dovetail reads, to a Hugging Face folder."""

import re

import typer

from dovetail.core.errors import UserError

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def convert(
    src: str = typer.Argument(help="A Hugging Face folder, a .gguf file, a hub id or a catalogue name."),
    dst: str = typer.Argument(help="The folder to write: a new or an empty one."),
    dtype: str = typer.Option(None, help="bfloat16, float32 or float16; what the source has if not given."),
    max_shard_size: str = typer.Option("5GB", help="The largest safetensors file to write, as 500MB or 2GiB."),
    special_token: list[str] = typer.Option(
        None, help="A special token to add to the vocabulary, with a row of the embeddings; may be repeated."
    ),
) -> None:
    """Write any checkpoint as a Hugging Face folder."""
    max_shard_bytes = parse_bytes(max_shard_size)
    from dovetail.cli.progress import bar
    from dovetail.io.load import convert as write

    with bar() as progress:
        write(src, dst, dtype, max_shard_bytes, progress, special_token or ())
    typer.echo(dst)


def parse_bytes(text: str) -> int:
    """'5GB' -> 5_000_000_000, '2GiB' -> 2 * 2**30, '1000' -> 1000."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = match and UNITS.get(match[2].upper())
    if not match or not unit or float(match[1]) * unit < 1:
        raise UserError(f"a size is a number and a unit, as 500MB, 5GB or 2GiB; got {text!r}")
    return int(float(match[1]) * unit)
