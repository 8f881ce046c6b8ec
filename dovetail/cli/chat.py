"""`dovetail chat`: a conversation in the terminal, with an engine in this process or with a server."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from dovetail.cli.options import takes_engine_options
from dovetail.core.errors import UserError

if TYPE_CHECKING:
    from dovetail.cli.chat_partner import Messages, Options, Partner


QUOTES = '"""'


@dataclass(frozen=True)
class Said:
    text: str
    is_command: bool = False


def read_said(read: Callable[[bool], str]) -> Said:
    """Read one message. `read(more)` gives a line, `more` where it continues a message; EOFError at the end.

    A line that ends with a backslash goes on in the next one. A line that begins with three quotes begins a message of
    all lines up to one that ends with three quotes. Lines that were pasted into a terminal come as one.
    """
    first = read(False).strip()
    if first.startswith(QUOTES):
        return Said(_quoted(first.removeprefix(QUOTES), read))
    lines = [first]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(_next(read, "").rstrip())
    text = "\n".join(lines).strip()
    return Said(text, is_command=len(lines) == 1 and text.startswith("/") and "\n" not in text)


def _quoted(first: str, read: Callable[[bool], str]) -> str:
    lines = [first]
    while not lines[-1].rstrip().endswith(QUOTES):
        lines.append(_next(read, QUOTES))
    return "\n".join(lines).rstrip().removesuffix(QUOTES).strip("\n")


def _next(read: Callable[[bool], str], at_end: str) -> str:
    """The next line; `at_end` where the input ends amid a message, which is then taken as it is."""
    try:
        return read(True)
    except EOFError:
        return at_end


MODEL = "smollm2-135m"
COMMANDS = {
    "/system TEXT": "set the system message; without a text, have none",
    "/save FILE": "write the conversation as JSON",
    "/clear": "forget the conversation; the system message stays",
    "/help": "show this",
    "/quit": "end; so does ctrl-D",
    '"""': "begin a message of several lines, which ends with three quotes; a \\ at a line's end continues it too",
}
# What a model says goes to a terminal, which would obey the escape sequences in it. \n and \t may pass.
_UNPRINTABLE = {code: None for code in (*range(32), 127, *range(128, 160)) if chr(code) not in "\n\t"}


@takes_engine_options(defaults={"max_num_seqs": 1, "seed": None})
def chat(
    engine: dict[str, Any],
    place: str = typer.Argument("", metavar="MODEL_OR_URL", help=f"What to load here ({MODEL}), or http://HOST:PORT."),
    url: str = typer.Option("", help="A server's address: the same as giving it first."),
    model: str = typer.Option("", help="What the server calls the model; otherwise its first."),
    system: str = typer.Option("", help="The system message."),
    temperature: float = typer.Option(0.7, min=0.0, help="0: the most probable token, always."),
    max_tokens: int = typer.Option(None, min=1, help="The longest answer; otherwise what the context holds."),
    api_key: str = typer.Option("", envvar="DOVETAIL_API_KEY", show_envvar=True, help="The server's key."),
) -> None:
    """Talk with a model in the terminal."""
    from dovetail.cli.chat_partner import Options

    partner = _partner(place, url, model, api_key, engine)
    try:
        ok = Chat(partner, Options(temperature, max_tokens), system).run()
    finally:
        partner.close()
    if not ok:
        raise typer.Exit(1)


def _partner(place: str, url: str, model: str, api_key: str, engine: dict[str, Any]) -> Partner:
    from dovetail.cli.chat_partner import Local, Remote

    if place.startswith(("http://", "https://")):
        if url:
            raise UserError(f"two servers: {place} and --url {url}; give one")
        place, url = "", place
    if place and model:
        raise UserError(f"two models: {place} and --model {model}; give one")
    return Remote(url, place or model, api_key) if url else Local(place or model or MODEL, **engine)


class Chat:
    """The conversation and its loop. Answers go to stdout; everything else goes to stderr."""

    def __init__(self, partner: Partner, options: Options, system: str = ""):
        from rich.console import Console

        self._partner, self._options = partner, options
        self.system, self.turns = system, []
        self._unreachable = False  # no server answered when it was last asked
        self._is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self._out, self._err = Console(highlight=False), Console(stderr=True, highlight=False)

    @property
    def messages(self) -> Messages:
        return ([{"role": "system", "content": self.system}] if self.system else []) + self.turns

    def run(self) -> bool:
        """Talk until the end of the input. False where no server answers, and where a script (a pipe) must know that an
        answer failed."""
        if not self._greet():
            return False
        failed = False
        while (said := self._read()) is not None:
            if said.is_command:
                if self._command(said.text):
                    break
            elif said.text:
                failed |= not self._answer(said.text)
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

    def _read(self) -> Said | None:
        """What the person says; None at the end."""

        try:
            return read_said(self._line)
        except (EOFError, KeyboardInterrupt):
            if self._is_terminal:
                print()
            return None

    def _line(self, more: bool) -> str:
        line = input(_prompt(self._out.no_color, more) if self._is_terminal else "")
        return line.encode("utf-8", "replace").decode()  # half a character in the input is no text

    # --- an answer ----------------------------------------------------------------------------------------------------

    def _answer(self, line: str) -> bool:
        """An interrupted answer stays as far as it came; a question without any answer is taken back."""
        from dovetail.cli.remote import NO_CONNECTION, ServerError

        self.turns.append({"role": "user", "content": line})
        said: list[str] = []
        error = None
        try:
            self._stream(said)
            if self._partner.finish_reason == "length":
                self._note(_cut_off(self._options.max_tokens))
        except KeyboardInterrupt:
            self._note("(stopped)")
        except (ServerError, ValueError) as caught:
            error = caught
            self._fail(str(caught))
        self._unreachable = isinstance(error, ServerError) and error.kind == NO_CONNECTION
        if said:
            self.turns.append({"role": "assistant", "content": "".join(said)})
        else:
            self.turns.pop()
        if self._is_terminal:
            print()
        return error is None

    def _stream(self, said: list[str]) -> None:
        from dovetail.cli.chat_partner import Thought

        with ExitStack() as waiting, closing(self._partner.answer(self.messages, self._options)) as pieces:
            if self._is_terminal:
                waiting.enter_context(self._out.status("", spinner="dots"))
            try:
                for piece in pieces:
                    waiting.close()
                    if not isinstance(piece, Thought):
                        said.append(piece)
                    self._show(piece, dim=isinstance(piece, Thought))
            finally:  # however it ended, what comes next begins a line
                if said:
                    print(flush=True)

    def _show(self, piece: str, dim: bool) -> None:
        text = piece.translate(_UNPRINTABLE)
        if dim and self._is_terminal and not self._out.no_color:
            text = f"\x1b[2m{text}\x1b[0m"
        print(text, end="", flush=True)

    # --- commands -----------------------------------------------------------------------------------------------------

    def _command(self, line: str) -> bool:
        """Whether it was the last."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        match name:
            case "/quit":
                return True
            case "/system":
                self.system = rest
                self._note("the system message is set" if rest else "there is no system message now")
            case "/save":
                self._save(rest)
            case "/clear":
                self.turns.clear()
                self._note("the conversation is forgotten")
            case "/help":
                for command, what in COMMANDS.items():
                    self._note(f"  {command:<13} {what}")
            case _:
                names = ", ".join(each.partition(" ")[0] for each in COMMANDS if each.startswith("/"))
                self._fail(f"there is no command {name}; there are {names}")
        return False

    def _save(self, path: str) -> None:
        from dovetail.core.files import write_atomic

        if not path:
            self._fail("/save needs a file's name: /save chat.json")
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
        return "(cut off: the context is full, or the server has a limit of its own; /clear makes room)"
    return f"(cut off at {most} tokens: --max-tokens sets it)"


def _prompt(plain: bool, more: bool) -> str:
    """readline counts a line's width without what stands between \\1 and \\2."""
    sign = "… " if more else "› "
    return sign if plain else f"\001\x1b[1;36m\002{sign}\001\x1b[0m\002"
