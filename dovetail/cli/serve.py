"""`dovetail serve`: a model behind OpenAI's API."""

import json
import os
from pathlib import Path
from typing import Any

import typer

from dovetail.core.errors import UserError
from dovetail.engine.options import EngineOptions

_ENGINE, _SAFETY, _NAMES = "Engine", "Safety", "Format"
_OWN: Any = object()


def engine_option(name: str, default: Any = _OWN, help: str = "", **bounds: float) -> Any:
    """One of EngineOptions: its default and help are the option's own, unless a server's differ."""
    default = getattr(EngineOptions, name) if default is _OWN else default
    return typer.Option(default, help=help or EngineOptions.help(name), rich_help_panel=_ENGINE, **bounds)  # type: ignore[arg-type]


ADAPTER = typer.Option(
    [], help="A LoRA adapter, name=DIR; requests name it as their model; may be repeated.", rich_help_panel=_ENGINE
)


def serve(
    model: str = typer.Argument("smollm2-135m", help="A folder, .gguf file, hub id or catalogue name."),
    host: str = typer.Option("127.0.0.1", help="Where to listen; 0.0.0.0 is every interface, and needs a key."),
    port: int = typer.Option(8000, min=0, max=65535, help="0: any that is free."),
    served_model_name: list[str] = typer.Option([], help="What requests call the model; may be repeated."),
    api_key: str = typer.Option("", help="Requests must bring it. Seen by `ps`: prefer the file or the variable.",
                                envvar="DOVETAIL_API_KEY", show_envvar=True, rich_help_panel=_SAFETY),
    api_key_file: Path | None = typer.Option(None, help="Keys, one per line.", rich_help_panel=_SAFETY),
    allow_unauthenticated: bool = typer.Option(False, help="Serve without a key on --host other than localhost.",
                                               rich_help_panel=_SAFETY),
    share_prefix_cache: bool = typer.Option(False, help="Requests of one API key find the prefixes of another's.",
                                            rich_help_panel=_SAFETY),
    protect_metrics: bool = typer.Option(False, help="/metrics needs a key too; otherwise it is open, as vLLM's is.",
                                         rich_help_panel=_SAFETY),
    admin: bool = typer.Option(False, help="Routes that sleep, pause and change weights.", rich_help_panel=_SAFETY),
    admin_key: str = typer.Option("", envvar="DOVETAIL_ADMIN_KEY", show_envvar=True, help="For those.",
                                  rich_help_panel=_SAFETY),
    admin_key_file: Path | None = typer.Option(None, help="Likewise, from a file.", rich_help_panel=_SAFETY),
    allow_origin: list[str] = typer.Option([], help="Web pages that may ask; may be repeated.",
                                           rich_help_panel=_SAFETY),
    allow_request_template: bool = typer.Option(False, help="Run templates that requests bring.",
                                                rich_help_panel=_SAFETY),
    special_tokens_in_text: bool = typer.Option(True, help="Text of requests that spells a special token, such as "
                                                "<|im_end|>, becomes that token; otherwise it stays text.",
                                                rich_help_panel=_SAFETY),
    profile_dir: Path | None = typer.Option(None, help="Let admin routes write traces here.",
                                            rich_help_panel=_SAFETY),
    max_body_mb: float = typer.Option(16.0, min=0.001, help="The largest request.", rich_help_panel=_SAFETY),
    max_prompt_tokens: int = typer.Option(0, min=0, help="0: what the model takes.", rich_help_panel=_SAFETY),
    max_n: int = typer.Option(64, min=1, help="The most answers to one prompt.", rich_help_panel=_SAFETY),
    max_queue: int = typer.Option(1024, min=1, help="Prompts that may wait; then 429.", rich_help_panel=_SAFETY),
    max_connections: int = typer.Option(4096, min=1, help="Open connections; then idle ones make room, or 503.",
                                        rich_help_panel=_SAFETY),
    request_timeout: float = typer.Option(600.0, min=0.1, help="Seconds a request may take.", rich_help_panel=_SAFETY),
    drain_timeout: float = typer.Option(30.0, min=0.0, help="Seconds to end what is under way at SIGTERM.",
                                        rich_help_panel=_SAFETY),
    step_timeout: float = typer.Option(300.0, min=0.0, help="Seconds a step may take before the engine counts as "
                                       "hung and is started again; 0: any.", rich_help_panel=_SAFETY),
    generation_config: str = typer.Option("auto", help="auto: the sampling defaults that come with the model; none.",
                                          rich_help_panel=_NAMES),
    tool_format: str = typer.Option("", help="Of tool calls; otherwise by the template.", rich_help_panel=_NAMES),
    reasoning_format: str = typer.Option("", help="Of reasoning, likewise.", rich_help_panel=_NAMES),
    dtype: str = engine_option("dtype"),
    max_model_len: int = engine_option("max_model_len", min=0),
    max_num_seqs: int = engine_option("max_num_seqs", min=1),
    max_num_batched_tokens: int = engine_option("max_num_batched_tokens", None,
                                                "Most tokens in one step; otherwise 8192, and on a CPU as many as take "
                                                "about 0.3 s.", min=1),
    memory_fraction: float = engine_option("memory_fraction", min=0.01, max=1.0),
    tensor_parallel: int = engine_option("tensor_parallel", min=1),
    prefix_caching: bool = engine_option("prefix_caching"),
    policy: str = engine_option("policy"),
    adapter: list[str] = ADAPTER,
    max_adapters: int = engine_option("max_adapters", min=0),
    max_adapter_rank: int = engine_option("max_adapter_rank", min=1),
    seed: int = engine_option("seed", None,
                              "Seeds the requests that bring no seed; otherwise differently at each start.",
                              min=0),
) -> None:  # fmt: skip
    """Serve a model to any OpenAI client."""
    import logging
    import math
    import sys
    from dataclasses import replace
    from functools import partial

    from dovetail.cli.progress import bar
    from dovetail.io.adapter_folder import base_of
    from dovetail.io.hub import resolve
    from dovetail.serve.config import ServerConfig, ServerLimits
    from dovetail.serve.http.server import listening_socket, run
    from dovetail.serve.http.server import serve as serving
    from dovetail.serve.http.start import check_start, read_defaults

    # A log file has the time of each line, and a line for each stage of the start; a terminal has a bar.
    in_file = not sys.stderr.isatty()
    when = "%(asctime)s " if in_file else ""
    logging.basicConfig(level=logging.WARNING, format=f"{when}%(levelname)s %(name)s: %(message)s", force=True)
    logging.getLogger("dovetail").setLevel(logging.INFO if in_file else logging.WARNING)
    keys = _keys(api_key, api_key_file, "--api-key-file")
    admin_keys = _keys(admin_key, admin_key_file, "--admin-key-file")
    if admin and len(admin_keys) != 1:
        raise UserError("--admin needs a key of its own: set DOVETAIL_ADMIN_KEY, or --admin-key-file with one line")
    if admin and admin_keys[0] in keys:
        raise UserError("the admin key must differ from the API keys: those let clients ask, and not control")
    if not all(name.strip() for name in served_model_name):
        raise UserError("--served-model-name must not be empty")
    if protect_metrics and not keys:
        raise UserError("--protect-metrics needs an API key to ask for: set DOVETAIL_API_KEY, or --api-key-file")
    if generation_config not in ("auto", "none"):
        raise UserError(f"--generation-config is auto or none; got {generation_config!r}")
    if not all(math.isfinite(each) for each in (max_body_mb, request_timeout, drain_timeout, step_timeout)):
        raise UserError("--max-body-mb, --request-timeout, --drain-timeout and --step-timeout take finite numbers")
    of_base: dict[str, str] = {}
    if base := base_of(model):  # an adapter's folder: its base is served, and the adapter under the name that was given
        if len(served_model_name) > 1:
            raise UserError(f"{model} is an adapter, which is served under one name: give --served-model-name once")
        of_base = {(served_model_name or [model])[0]: model}
        model, served_model_name = base, [base]
    limits = ServerLimits(
        body_bytes=int(max_body_mb * 2**20), prompt_tokens=max_prompt_tokens or None, n=max_n, queue=max_queue,
        connections=max_connections,
        request_seconds=request_timeout, drain_seconds=drain_timeout,
        step_seconds=step_timeout,
    )  # fmt: skip
    config = ServerConfig(
        names=tuple(served_model_name) or (model,), host=host, port=port, api_keys=keys,
        admin_key=admin_keys[0] if admin else None, profile_dir=str(profile_dir) if profile_dir else None,
        allow_origins=tuple(allow_origin), allow_request_template=allow_request_template,
        special_tokens_in_text=special_tokens_in_text,
        tool_format=tool_format or None, reasoning_format=reasoning_format or None, limits=limits,
        protect_metrics=protect_metrics, allow_unauthenticated=allow_unauthenticated,
        share_prefix_cache=share_prefix_cache,
    )  # fmt: skip
    options = EngineOptions.of(dict(
        dtype=dtype or None, max_model_len=max_model_len or None, max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens, memory_fraction=memory_fraction,
        tensor_parallel=tensor_parallel, prefix_caching=prefix_caching, policy=policy, seed=seed,
        adapters=of_base | adapters_named(adapter, (*config.names, *of_base)), max_adapters=max_adapters,
        max_adapter_rank=max_adapter_rank,
    ))  # fmt: skip
    check_start(config, options)
    with listening_socket(host, port) as sock, bar() as progress:
        path = resolve(model, progress)
        if generation_config == "auto":
            config = replace(config, defaults=read_defaults(path))
        shown = next(iter(options.adapters)) if base else config.names[0]
        run(serving(path, options, config, sock, partial(_show, shown), None if in_file else progress))


def adapters_named(given: list[str], names: tuple[str, ...] = ()) -> dict[str, str]:
    """name=DIR, each."""
    found: dict[str, str] = {}
    for each in given:
        name, equals, folder = each.partition("=")
        if not (name and equals and folder):
            raise UserError(f"--adapter takes name=DIR; got {each!r}")
        if name in found or name in names:
            raise UserError(f"--adapter {each}: {name!r} is taken already; give the adapter another name")
        found[name] = str(Path(folder).expanduser())  # after the = a shell leaves a ~ as it is
    return found


def _keys(given: str, file: Path | None, flag: str) -> tuple[str, ...]:
    try:
        lines = [given, *(file.read_text().splitlines() if file else ())]
    except OSError as error:
        raise UserError(f"{flag}: {file} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise UserError(f"{flag}: {file} is not a text file with one key per line") from None
    keys = tuple(line.strip() for line in lines if line.strip())
    if file and not keys:
        raise UserError(f"{flag}: {file} holds no key")
    if not all(key.isascii() and key.isprintable() for key in keys):
        raise UserError("a key is made of printable ASCII characters, for it travels in a header")
    return keys


def _show(shown: str, config, info) -> None:
    """Print the address of the server, and commands that try the model called `shown`."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    from dovetail.serve.http.server import url as address

    url, name = address(config), json.dumps(shown)
    header, start, key = "", "", '"none"'
    if config.api_keys:  # by the variable's name: what is printed here ends in logs
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
        said = ", ".join(f"{name} {value}" for name, value in config.defaults.items())
        text.append(f"\nunless a request says otherwise: {said}", style="dim")
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
        console.print("Both read the key from DOVETAIL_API_KEY: export it where you run them.", style="dim")
    if config.is_open:
        console.print("Everybody who can reach this machine may use it: set DOVETAIL_API_KEY.", style="yellow")
    if os.environ.get("DOVETAIL_ADMIN_KEY") and config.admin_key is None:
        console.print("DOVETAIL_ADMIN_KEY is set, but without --admin there are no admin routes.", style="dim")
