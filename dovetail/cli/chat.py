"""`dovetail chat`: chat in the terminal with an engine in this process or with a server."""

from __future__ import annotations

import base64
import json
import mimetypes
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dovetail.cli.options import takes_engine_options
from dovetail.core.errors import UserError

if TYPE_CHECKING:
    from dovetail.cli.chat_partner import ChatOptions, Messages, Partner


QUOTES = '"""'


@dataclass(frozen=True)
class TypedInput:
    """Hold a message or command that the user typed."""

    text: str
    is_command: bool = False


def read_input(read: Callable[[bool], str]) -> TypedInput:
    """Read one message of one or more lines.

    A line that ends with a backslash continues on the next one. A message in triple quotes may have many lines. Lines
    pasted into a terminal arrive together.

    Args:
        read: Returns the next line, given whether it continues a message; raises EOFError at the end.
    """
    first = read(False).strip()
    if first.startswith(QUOTES):
        return TypedInput(_quoted(first.removeprefix(QUOTES), read))
    lines = [first]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(_next(read, "").rstrip())
    text = "\n".join(lines).strip()
    return TypedInput(text, is_command=len(lines) == 1 and text.startswith("/") and "\n" not in text)


def _quoted(first: str, read: Callable[[bool], str]) -> str:
    lines = [first]
    while not lines[-1].rstrip().endswith(QUOTES):
        lines.append(_next(read, QUOTES))
    return "\n".join(lines).rstrip().removesuffix(QUOTES).strip("\n")


def _next(read: Callable[[bool], str], at_end: str) -> str:
    """Return the next line, or `at_end` if the input ends inside a message."""
    try:
        return read(True)
    except EOFError:
        return at_end


MODEL = "smollm2-135m"
COMMANDS = {
    "/system TEXT": "set the system message; without TEXT, remove it",
    "/image FILE": "send an image with the next message",
    "/save FILE": "write the conversation as JSON",
    "/clear": "clear the conversation but keep the system message",
    "/help": "show this list",
    "/quit": "quit; so does ctrl-D",
    '"""': "start a message of several lines, up to the next three quotes; a \\ at the end of a line continues it too",
}
# Control characters are removed from a model's text, so that it cannot send escape sequences to the terminal.
_UNPRINTABLE = {code: None for code in (*range(32), 127, *range(128, 160)) if chr(code) not in "\n\t"}


@takes_engine_options(defaults={"max_num_seqs": 1, "seed": None})
def chat(
    engine: dict[str, Any],
    place: str = typer.Argument("", metavar="MODEL_OR_URL", help=f"Model to load ({MODEL}), or http://HOST:PORT."),
    url: str = typer.Option("", help="Address of a server; the same as MODEL_OR_URL."),
    model: str = typer.Option("", help="Name of the model on the server. Default: the first one."),
    system: str = typer.Option("", help="System message."),
    temperature: float = typer.Option(0.7, min=0.0, help="Sampling temperature; 0: greedy."),
    max_tokens: int = typer.Option(None, min=1, help="Maximum tokens of an answer. Default: up to the context length."),
    api_key: str = typer.Option("", envvar="DOVETAIL_API_KEY", show_envvar=True, help="API key of the server."),
) -> None:
    """Chat with a model in the terminal."""
    from dovetail.cli.chat_partner import ChatOptions

    partner = _partner(place, url, model, api_key, engine)
    try:
        ok = Chat(partner, ChatOptions(temperature, max_tokens), system).run()
    finally:
        partner.close()
    if not ok:
        raise typer.Exit(1)


def _partner(place: str, url: str, model: str, api_key: str, engine: dict[str, Any]) -> Partner:
    from dovetail.cli.chat_partner import Local, Remote

    if place.startswith(("http://", "https://")):
        if url:
            raise UserError(f"got two servers, {place} and --url {url}: give one", param="--url")
        place, url = "", place
    if place and model:
        raise UserError(f"got two models, {place} and --model {model}: give one", param="--model")
    return Remote(url, place or model, api_key) if url else Local(place or model or MODEL, **engine)


class Chat:
    """Run the conversation; answers go to stdout, everything else to stderr."""

    def __init__(self, partner: Partner, options: ChatOptions, system: str = ""):
        from rich.console import Console

        self._partner, self._options = partner, options
        self.system, self.turns = system, []
        self._images: list[dict[str, Any]] = []  # parts of the next message
        self._unreachable = False  # the last request found no server
        self._is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self._out, self._err = Console(highlight=False), Console(stderr=True, highlight=False)

    @property
    def messages(self) -> Messages:
        """Return the system message and the turns."""
        return ([{"role": "system", "content": self.system}] if self.system else []) + self.turns

    def run(self) -> bool:
        """Chat until the end of the input.

        Returns:
            False if no server answers, or if the input is a pipe and an answer failed.
        """
        if not self._greet():
            return False
        failed = False
        while (typed := self._read()) is not None:
            if typed.is_command:
                if self._command(typed.text):
                    break
            elif typed.text:
                failed |= not self._answer(typed.text)
                if self._unreachable and not self._is_terminal:
                    break  # the next question would fail too
        return not (self._unreachable if self._is_terminal else failed)

    def _greet(self) -> bool:
        """Return False if no server answers."""
        if not self._is_terminal:
            return True
        with suppress(ImportError):  # not every build has it
            import readline  # noqa: F401  input() then has line editing, a history, and takes a paste as one line
        if (line := self._try_describe()) is not None:
            self._note(line)
        elif self._unreachable:
            return False
        self._note("/help lists the commands; ctrl-C stops an answer, ctrl-D ends")
        return True

    def _try_describe(self) -> str | None:
        from dovetail.cli.remote import NO_CONNECTION, ServerError

        try:
            return self._partner.describe()
        except ServerError as error:
            self._unreachable = error.kind == NO_CONNECTION
            self._fail(str(error))
            return None

    def _read(self) -> TypedInput | None:
        """Return the next message, or None at the end of the input."""
        try:
            return read_input(self._line)
        except (EOFError, KeyboardInterrupt):
            if self._is_terminal:
                print()
            return None

    def _line(self, more: bool) -> str:
        line = input(_prompt(self._out.no_color, more) if self._is_terminal else "")
        return line.encode("utf-8", "replace").decode()  # replace incomplete characters

    # --- an answer ----------------------------------------------------------------------------------------------------

    def _answer(self, line: str) -> bool:
        """Print the answer to `line`; keep a partial answer, and drop a question that got none."""
        from dovetail.cli.remote import NO_CONNECTION, ServerError

        content = [*self._images, {"type": "text", "text": line}] if self._images else line
        self.turns.append({"role": "user", "content": content})
        self._images = []
        answer: list[str] = []
        error = None
        try:
            self._stream(answer)
            if self._partner.finish_reason == "length":
                self._note(_cut_off(self._options.max_tokens))
        except KeyboardInterrupt:
            self._note("(stopped)")
        except (ServerError, UserError) as caught:
            error = caught
            self._fail(str(caught))
        self._unreachable = isinstance(error, ServerError) and error.kind == NO_CONNECTION
        if answer:
            self.turns.append({"role": "assistant", "content": "".join(answer)})
        else:
            self.turns.pop()
        if self._is_terminal:
            print()
        return error is None

    def _stream(self, answer: list[str]) -> None:
        from dovetail.cli.chat_partner import Thought

        with ExitStack() as waiting, closing(self._partner.answer(self.messages, self._options)) as pieces:
            if self._is_terminal:
                waiting.enter_context(self._out.status("", spinner="dots"))
            try:
                for piece in pieces:
                    waiting.close()
                    if not isinstance(piece, Thought):
                        answer.append(piece)
                    self._show(piece, dim=isinstance(piece, Thought))
            finally:  # the next output starts on a new line
                if answer:
                    print(flush=True)

    def _show(self, piece: str, dim: bool) -> None:
        text = piece.translate(_UNPRINTABLE)
        if dim and self._is_terminal and not self._out.no_color:
            text = f"\x1b[2m{text}\x1b[0m"
        print(text, end="", flush=True)

    # --- commands -----------------------------------------------------------------------------------------------------

    def _command(self, line: str) -> bool:
        """Run a command and return whether to quit."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        match name:
            case "/quit":
                return True
            case "/system":
                self.system = rest
                self._note("system message set" if rest else "system message removed")
            case "/image":
                self._attach(rest)
            case "/save":
                self._save(rest)
            case "/clear":
                self.turns.clear()
                self._images.clear()
                self._note("conversation cleared")
            case "/help":
                for command, what in COMMANDS.items():
                    self._note(f"  {command:<13} {what}")
            case _:
                names = ", ".join(each.partition(" ")[0] for each in COMMANDS if each.startswith("/"))
                self._fail(f"there is no command {name}: use one of {names}")
        return False

    def _attach(self, path: str) -> None:
        from dovetail.io.images.decode import as_image

        try:
            file = Path(path).expanduser()
            height, width, _ = as_image(file, param=path).shape
            data = base64.b64encode(file.read_bytes()).decode()
        except (OSError, UserError) as error:
            self._fail(str(error) if path else "/image needs a file name: /image photo.jpg")
            return
        url = f"data:{mimetypes.guess_type(file)[0] or 'image/jpeg'};base64,{data}"
        self._images.append({"type": "image_url", "image_url": {"url": url}})
        self._note(f"{file.name} ({width} x {height}) goes with the next message")

    def _save(self, path: str) -> None:
        from dovetail.core.files import write_atomic

        if not path:
            self._fail("/save needs a file name: /save chat.json")
            return
        try:
            saved = write_atomic(path, json.dumps({"messages": self.messages}, indent=2, ensure_ascii=False) + "\n")
        except OSError as error:
            self._fail(str(error))
        else:
            self._note(f"{len(self.messages)} messages saved in {saved}")

    def _note(self, text: str) -> None:
        self._err.print(text.translate(_UNPRINTABLE), style="dim", markup=False, soft_wrap=True)

    def _fail(self, text: str) -> None:
        self._err.print(text.translate(_UNPRINTABLE), style="red", markup=False, soft_wrap=True)


def _cut_off(most: int | None) -> str:
    if most is None:
        return "(cut off: the context is full, or the server has a lower limit; /clear frees the context)"
    return f"(cut off at {most} tokens: raise --max-tokens)"


def _prompt(plain: bool, more: bool) -> str:
    r"""Readline does not count as width what is between \1 and \2."""
    sign = "… " if more else "› "
    return sign if plain else f"\001\x1b[1;36m\002{sign}\001\x1b[0m\002"
