"""`dovetail serve`: a model behind the OpenAI API."""

import json
import os
from pathlib import Path
from typing import Any

import typer

from dovetail.cli.options import takes_engine_options, takes_options
from dovetail.core.errors import UserError
from dovetail.engine.options import EngineOptions
from dovetail.serve.config import ServerConfig, ServerLimits

_ACCESS = "Access"
_HELP = {
    "max_num_batched_tokens": "Maximum number of tokens per step. Default: 8192. On a CPU: as many as fit into 0.3 s.",
    "seed": "Seed of requests without a seed. Default: a new one at every start.",
}


@takes_options(ServerConfig, "server", panel=None)
@takes_options(ServerLimits, "limits")
@takes_engine_options(defaults={"seed": None}, help=_HELP)
def serve(
    server: dict[str, Any],
    limits: dict[str, Any],
    engine: dict[str, Any],
    model: str = typer.Argument("smollm2-135m", help="Folder, .gguf file, hub id or catalogue name."),
    served_model_name: list[str] = typer.Option([], help="Name of the model in requests; may be repeated."),
    api_key: str = typer.Option("", help="API key that requests must send. Visible in `ps`: prefer the file.",
                                envvar="DOVETAIL_API_KEY", show_envvar=True, rich_help_panel=_ACCESS),
    api_key_file: Path | None = typer.Option(None, help="File with one API key per line.", rich_help_panel=_ACCESS),
    admin: bool = typer.Option(False, help="Enable the routes that sleep, pause and change weights.",
                               rich_help_panel=_ACCESS),
    admin_key: str = typer.Option("", envvar="DOVETAIL_ADMIN_KEY", show_envvar=True, help="Key for admin routes.",
                                  rich_help_panel=_ACCESS),
    admin_key_file: Path | None = typer.Option(None, help="File with the admin key.", rich_help_panel=_ACCESS),
    generation_config: str = typer.Option("auto", metavar="auto|none", rich_help_panel="Format",
                                          help="auto: sampling defaults from the model's generation_config.json."),
) -> None:  # fmt: skip
    """Serve a model over the OpenAI API."""
    from dataclasses import replace
    from functools import partial

    from dovetail.core.reporter import bar
    from dovetail.io.adapter_folder import base_of
    from dovetail.io.hub import resolve
    from dovetail.serve.http.server import run
    from dovetail.serve.http.server import serve as serving
    from dovetail.serve.http.start import check_start, listening_socket, read_defaults

    in_file = _set_up_logging()
    keys = _keys(api_key, api_key_file, "--api-key-file")
    admin_keys = _keys(admin_key, admin_key_file, "--admin-key-file")
    _check_access(keys, admin_keys if admin else None, server["protect_metrics"])
    if not all(name.strip() for name in served_model_name):
        raise UserError("--served-model-name must not be empty", param="--served-model-name")
    if generation_config not in ("auto", "none"):
        raise UserError(
            f"--generation-config must be auto or none, got {generation_config!r}", param="--generation-config"
        )
    of_base: dict[str, str] = {}
    if base := base_of(model):  # an adapter's folder: serve its base, and the adapter under the given name
        if len(served_model_name) > 1:
            raise UserError(f"{model} is an adapter, which is served under one name: give --served-model-name once")
        of_base = {(served_model_name or [model])[0]: model}
        model, served_model_name = base, [base]
    config = ServerConfig(
        names=tuple(served_model_name) or (model,), api_keys=keys, admin_key=admin_keys[0] if admin else None,
        limits=ServerLimits(**limits), **server,
    )  # fmt: skip
    for name in engine["lora_modules"]:
        if name in (*config.names, *of_base):
            raise UserError(
                f"--lora-modules: the name {name!r} is already used: choose another one", param="--lora-modules"
            )
    options = EngineOptions.of(engine | {"lora_modules": of_base | engine["lora_modules"]})
    check_start(config, options)
    with listening_socket(config.host, config.port) as sock, bar() as progress:
        path = resolve(model, progress)
        if generation_config == "auto":
            config = replace(config, defaults=read_defaults(path))
        shown = next(iter(options.lora_modules)) if base else config.names[0]
        run(serving(path, options, config, sock, partial(_show, shown), None if in_file else progress))


def _set_up_logging() -> bool:
    """Log to stderr; return whether that is a file, which gets the time and one line per stage in place of a bar."""
    import logging
    import sys

    in_file = not sys.stderr.isatty()
    when = "%(asctime)s " if in_file else ""
    logging.basicConfig(level=logging.WARNING, format=f"{when}%(levelname)s %(name)s: %(message)s", force=True)
    logging.getLogger("dovetail").setLevel(logging.INFO if in_file else logging.WARNING)
    return in_file


def _check_access(keys: tuple[str, ...], admin_keys: tuple[str, ...] | None, protect_metrics: bool) -> None:
    if admin_keys is not None and len(admin_keys) != 1:
        raise UserError("--admin needs one admin key: set DOVETAIL_ADMIN_KEY, or --admin-key-file with one line")
    if admin_keys and admin_keys[0] in keys:
        raise UserError("the admin key must differ from the API keys: clients must not control the server")
    if protect_metrics and not keys:
        raise UserError("--protect-metrics needs an API key: set DOVETAIL_API_KEY, or --api-key-file")


def _keys(given: str, file: Path | None, flag: str) -> tuple[str, ...]:
    try:
        lines = [given, *(file.read_text().splitlines() if file else ())]
    except OSError as error:
        raise UserError(f"{flag}: {file} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise UserError(f"{flag}: {file} must be a text file with one key per line") from None
    keys = tuple(line.strip() for line in lines if line.strip())
    if file and not keys:
        raise UserError(f"{flag}: {file} has no key")
    if not all(key.isascii() and key.isprintable() for key in keys):
        raise UserError("a key must consist of printable ASCII characters, because it is sent in an HTTP header")
    return keys


def _show(shown: str, config, info) -> None:
    """Print the address of the server and commands that try the model `shown`."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    from dovetail.serve.http.server import url as address

    url, name = address(config), json.dumps(shown)
    header, start, key = "", "", '"none"'
    if config.api_keys:  # the variable, not the key: this output ends in logs
        header = '-H "Authorization: Bearer $DOVETAIL_API_KEY" '
        start, key = "import os\n", 'os.environ["DOVETAIL_API_KEY"]'
    text = Text()
    text.append(f"{url}/v1", style="bold cyan").append(f"  {shown}\n", style="bold")
    if shown not in config.names:
        text.append(f"an adapter of {config.names[0]}, which is served too\n")
    text.append(f"started in {info.start_seconds:.1f} s; {info.description}", style="dim")
    if info.prediction:
        text.append(f"\n{info.prediction}", style="dim")
    if config.defaults:
        values = ", ".join(f"{name} {value}" for name, value in config.defaults.items())
        text.append(f"\nsampling defaults: {values}", style="dim")
    console = Console(highlight=False)
    console.print(Panel(text, title="dovetail serve", title_align="left", expand=False))
    # Outside the frame and unwrapped, so that it can be copied.
    message = '[{"role": "user", "content": "Hello!"}]'
    console.print(
        f"curl {url}/v1/chat/completions {header}-H 'Content-Type: application/json' \\\n"
        f"  -d '{{\"model\": {name}, \"messages\": {message}}}'\n\n"
        f'{start}from openai import OpenAI\nclient = OpenAI(base_url="{url}/v1", api_key={key})\n'
        f"client.chat.completions.create(model={name}, messages={message})\n",
        style="dim", markup=False, soft_wrap=True,
    )  # fmt: skip
    if config.api_keys and os.environ.get("DOVETAIL_API_KEY") not in config.api_keys:
        console.print("Both read the key from DOVETAIL_API_KEY.", style="dim")
    if config.is_open:
        console.print(
            "Anyone who can reach this address may use the server: set DOVETAIL_API_KEY to require a key.",
            style="yellow",
        )
    if os.environ.get("DOVETAIL_ADMIN_KEY") and config.admin_key is None:
        console.print("DOVETAIL_ADMIN_KEY is set, but without --admin there are no admin routes.", style="dim")
