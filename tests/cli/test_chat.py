"""`dovetail chat` against a scripted server."""

import io
import json
import os
import pty
import select
import signal
import stat
import subprocess
import sys
import threading
from contextlib import closing, suppress
from types import SimpleNamespace

import pytest
import typer
from fake_openai import Reply, says, serving
from refusals import refuses

from dovetail.cli import chat as module
from dovetail.cli.chat import Chat
from dovetail.cli.chat_partner import ChatOptions, Local, Remote, Thought, _between_steps
from dovetail.core.errors import RequestError
from dovetail.core.files import write_atomic

pytestmark = pytest.mark.slow


@pytest.fixture
def talk(monkeypatch, capsys):
    """Send these lines to a server; return the output as (answers, remarks)."""

    def talk(place, *lines, ok=True, **options):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))
        defaults = {"url": "", "model": "", "system": "", "temperature": 0.5, "max_tokens": 9, "api_key": ""}
        try:
            module.chat(place=place, **defaults | options)
            assert ok
        except typer.Exit as end:
            assert end.exit_code == 1 and not ok
        printed = capsys.readouterr()
        return printed.out, printed.err

    return talk


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def system(text):
    return {"role": "system", "content": text}


def test_turns_stream_and_the_history_is_sent(talk):
    with serving(lambda i: says("Hel", "lo ", str(i))) as fake:
        out, err = talk(fake.url, "one", "", "two", "/quit", "never")
    assert out == "Hello 0\nHello 1\n" and err == ""
    assert [body["messages"] for body in fake.bodies] == [
        [user("one")],
        [user("one"), assistant("Hello 0"), user("two")],
    ]
    first = {name: value for name, value in fake.bodies[0].items() if name != "messages"}
    assert first == {"model": "fake", "stream": True, "temperature": 0.5, "max_tokens": 9}


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_the_url_may_be_written_as_other_clients_want_it(talk, suffix):
    with serving(lambda i: says("yes")) as fake:
        assert talk("", "one", url=fake.url + suffix, model="mine", api_key="k3y")[0] == "yes\n"
    assert fake.bodies[0]["model"] == "mine" and fake.headers[0]["authorization"] == "Bearer k3y"


def test_the_system_message_is_set_replaced_and_removed(talk):
    with serving(lambda i: says("a")) as fake:
        talk(fake.url, "one", "/system be  kind", "two", "/clear", "three", "/system", "four", system="be short")
    sent = [body["messages"] for body in fake.bodies]
    assert sent[0] == [system("be short"), user("one")]
    assert sent[1] == [system("be  kind"), user("one"), assistant("a"), user("two")]
    assert sent[2] == [system("be  kind"), user("three")]
    assert sent[3] == [user("three"), assistant("a"), user("four")]


def test_save(talk, tmp_path):
    path = tmp_path / "a chat.json"
    with serving(lambda i: says("é☃")) as fake:
        _, err = talk(fake.url, "/system s", "one", f"/save {path}", "/save", f"/save {tmp_path}", "/save /no/such/f")
    assert json.loads(path.read_text()) == {"messages": [system("s"), user("one"), assistant("é☃")]}
    assert "é☃" in path.read_text() and os.listdir(tmp_path) == ["a chat.json"]
    lines = err.splitlines()
    assert lines[1] == f"3 messages saved in {path}"
    assert "needs a file name" in lines[2] and "is a folder" in lines[3] and "no folder /no/such" in lines[4]


def test_a_failed_write_keeps_earlier_checkpoints(tmp_path, monkeypatch):
    path = write_atomic(tmp_path / "f", "old")
    path.chmod(0o640)
    with pytest.raises(UnicodeEncodeError):
        write_atomic(path, "half \ud800")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["f"]
    write_atomic(path, "new")
    assert path.read_text() == "new" and stat.S_IMODE(path.stat().st_mode) == 0o640


def test_help_and_unknown_slash_commands(talk):
    with serving(lambda i: says("a")) as fake:
        _, err = talk(fake.url, "/nope x", "/help")
    first, *rest = err.splitlines()
    assert first == "there is no command /nope: use one of /system, /image, /save, /clear, /help, /quit"
    names = ["/system", "/image", "/save", "/clear", "/help", "/quit", '"""']
    assert [line.split()[0] for line in rest] == names and not fake.bodies


ERRORS = {
    "no key": (
        Reply(status=401, message="a valid key is needed"),
        "a valid key is needed; give the key with --api-key",
    ),
    "no model": (Reply(status=404, message="the model 'x' is not served"), "(404): the model 'x' is not served"),
    "bad": (Reply(status=400, message="two\nlines"), "the server refused (400): two lines"),
    "not OpenAI's": (Reply(status=404, body=b"<html>"), "404 Not Found: is this an OpenAI-compatible server?"),
    "in the stream": (
        Reply([(0, b'data: {"error": {"message": "the engine has stopped"}}\n\n')]),
        "the server ended the answer: the engine has stopped",
    ),
    "cut off": (Reply(ends=False), "closed the connection before the end of the answer"),
    "not JSON": (Reply([(0, b"data: {oops\n\n")]), "not JSON: {oops"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_an_error_is_one_sentence_and_the_chat_goes_on(talk, case):
    reply, sentence = ERRORS[case]
    with serving(lambda i: reply if i == 0 else says("fine")) as fake:
        out, err = talk(fake.url, "one", "two", ok=False)
    assert out == "fine\n" and sentence in err and err.count("\n") == 1
    assert fake.bodies[1]["messages"] == [user("two")]  # the question without an answer is gone


def test_a_server_that_is_not_there(talk):
    with serving(lambda i: says("a")) as fake:
        pass
    out, err = talk(fake.url, "one", "two", ok=False)
    assert out == "" and f"no server answers at {fake.url}" in err and "dovetail serve" in err
    assert err.count("\n") == 1, "it does not ask again"


def terminal(*args, typed: bytes, seconds: float = 60.0) -> tuple[int, str]:
    """`dovetail chat` in a pseudo-terminal: its exit code, and what was shown."""
    terminal, theirs = pty.openpty()  # not pty.fork: this process has threads
    command = [sys.executable, "-m", "dovetail", "chat", *args]
    env = os.environ | {"NO_COLOR": "1"}
    child = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True)
    os.close(theirs)
    shown = b""
    with suppress(OSError):  # it has ended
        while select.select([terminal], [], [], seconds)[0] and (piece := os.read(terminal, 65536)):
            shown += piece
            if typed and "›".encode() in shown:
                os.write(terminal, typed)
                typed = b""
    os.close(terminal)
    return child.wait(), shown.decode()


def test_in_a_terminal_too_it_ends_with_an_error_where_no_server_answers():
    with serving(lambda i: says("a")) as fake:
        pass
    code, shown = terminal(fake.url, typed=b"")
    assert code == 1 and "no server answers" in shown and "›" not in shown, shown


def test_a_message_of_several_lines_in_a_terminal():
    with serving(lambda i: says("yes")) as fake:
        code, shown = terminal(fake.url, typed=b'"""one\n  two\n\nthree"""\nfour \\\nfive\n/quit\n')
    assert code == 0, shown
    assert [body["messages"][-1]["content"] for body in fake.bodies] == ["one\n  two\n\nthree", "four \nfive"]


@pytest.mark.parametrize("lines, messages", [
    (['"""', "a", " b", '"""', "c"], ["a\n b", "c"]),
    (['"""/quit"""', "c"], ["/quit", "c"]),
    (["a\\", "b\\", "c", "d"], ["a\nb\nc", "d"]),
    (["/nope\\", "b"], ["/nope\nb"]),
    (['"""a', "b"], ["a\nb"]),  # the input ends
    (["a\\"], ["a"]),
    (['say "hi"'], ['say "hi"']),
])  # fmt: skip
def test_messages_of_several_lines(talk, lines, messages):
    with serving(lambda i: says("yes")) as fake:
        talk(fake.url, *lines)
    assert [body["messages"][-1]["content"] for body in fake.bodies] == messages


def test_a_server_that_lists_no_model(talk):
    with serving(lambda i: says("a"), models=[]) as fake:
        _, err = talk(fake.url, "one", ok=False)
    assert "lists no model" in err and not fake.bodies


def test_the_partial_answer_before_an_error_stays(talk):
    with serving(lambda i: says("so f", "ar", ends=False) if i == 0 else says("b")) as fake:
        talk(fake.url, "one", "two", ok=False)
    assert fake.bodies[1]["messages"] == [user("one"), assistant("so far"), user("two")]


def test_ctrl_c_stops_the_answer_and_the_server_sees_the_client_leave(talk):
    main = threading.main_thread().ident
    assert main is not None

    def reply(i):
        if i:
            return says("again")
        more = [(0.01, "never") for _ in range(500)]
        return Reply([(0, "begun"), (0.4, lambda: signal.pthread_kill(main, signal.SIGINT)), (0.5, b""), *more])

    with serving(reply) as fake:
        out, err = talk(fake.url, "one", "two")
        assert fake.left.wait(5)
    assert out == "begun\nagain\n" and err == "(stopped)\n"
    assert fake.bodies[1]["messages"] == [user("one"), assistant("begun"), user("two")]


def test_an_answer_that_is_cut_off_says_so(talk):
    with serving(lambda i: says("a", finish_reason="length")) as fake:
        _, err = talk(fake.url, "one")
    assert err == "(cut off at 9 tokens: raise --max-tokens)\n"


def test_without_a_limit_the_answer_is_as_long_as_the_server_has_room(talk):
    with serving(lambda i: says("a", finish_reason="length")) as fake:
        _, err = talk(fake.url, "one", max_tokens=None)
    assert "max_tokens" not in fake.bodies[0] and err.startswith("(cut off: the context is full")


def test_reasoning_is_shown_and_not_sent_back(talk):
    thought = Reply([(0, {"reasoning_content": "hmm. "}), (0, "42")])
    with serving(lambda i: thought) as fake:
        out, _ = talk(fake.url, "one", "two")
        with closing(Remote(fake.url, "", "")) as partner:
            pieces = list(partner.answer([user("x")], ChatOptions(0, 5)))
    assert out == "hmm. 42\n" * 2 and fake.bodies[1]["messages"][1] == assistant("42")
    assert [type(piece) for piece in pieces] == [Thought, str]


def test_escape_sequences_do_not_reach_the_terminal(talk):
    with serving(lambda i: says("\x1b]0;title\x07a\tb\nc\x9b2J")) as fake:
        out, _ = talk(fake.url, "one", "two")
    assert out == "]0;titlea\tb\nc2J\n" * 2
    assert fake.bodies[1]["messages"][1] == assistant("\x1b]0;title\x07a\tb\nc\x9b2J")


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"place": "http://a", "url": "http://b"}, "--url"),
        ({"place": "a-model", "model": "b-model"}, "--model"),
        ({"url": "ftp://x"}, "--url"),
        ({"url": "http://"}, "--url"),
        ({"url": "http://x", "api_key": "k\n"}, "--api-key"),
    ],
)
def test_contradictions_are_refused(given, param):
    with refuses(param):
        module._partner(**{"place": "", "url": "", "model": "", "api_key": "", "engine": {}} | given)


class Steps:
    """A partner like the local one: asked to stop, it does so between two steps."""

    finish_reason = None

    def answer(self, messages, options):
        with _between_steps() as interrupted:
            yield "one step"
            signal.raise_signal(signal.SIGINT)
            yield ", to its end"
            if interrupted.is_set():
                raise KeyboardInterrupt
            yield "never"


def test_a_local_engine_is_stopped_between_steps(monkeypatch, capsys):
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    chat = Chat(Steps(), ChatOptions(0, 5))  # type: ignore[arg-type]
    assert chat.run() and chat.turns == [user("hi"), assistant("one step, to its end")]
    assert signal.getsignal(signal.SIGINT) is before
    assert capsys.readouterr().err == "(stopped)\n"


def test_a_local_engine_refuses_a_limit_beyond_its_context():
    config = SimpleNamespace(context=16)
    local = Local.__new__(Local)
    engine = SimpleNamespace(scheduler=SimpleNamespace(config=config))
    local._llm = SimpleNamespace(engine=engine, chat_prompt=lambda messages, adapter: [1] * 5)
    local._adapter = None
    with refuses("max_tokens", RequestError, code="context_length_exceeded", naming="got 12"):
        next(local.answer([user("hi")], ChatOptions(0, 12)))


def test_a_second_ctrl_c_does_not_wait_for_the_step():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit), _between_steps():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_an_image_goes_with_the_next_message(talk, tmp_path):
    from PIL import Image

    (tmp_path / "broken.png").write_bytes(b"no image")
    Image.new("RGB", (3, 2)).save(tmp_path / "my photo.png")
    with serving(lambda i: says("Fine.")) as fake:
        lines = [f"/image {tmp_path}/broken.png", "/image", f"/image {tmp_path}/none.png"]
        _, err = talk(fake.url, *lines, f"/image {tmp_path}/my photo.png", "What is it?", "And now?")
    assert "my photo.png (3 x 2) goes with the next message" in err and len(err.splitlines()) == 4
    image, text = fake.bodies[0]["messages"][0]["content"]
    assert text == {"type": "text", "text": "What is it?"}
    assert image["image_url"]["url"].startswith("data:image/png;base64,")
    assert fake.bodies[1]["messages"][2] == user("And now?")


def pipe(*args, lines):
    env = {**os.environ, "NO_COLOR": "1"}
    command = [sys.executable, "-m", "dovetail", "chat", *args]
    return subprocess.run(command, input=lines, capture_output=True, text=True, env=env, timeout=120)


def test_through_a_pipe():
    with serving(lambda i: says("Hi", "!")) as fake:
        out = pipe(fake.url, "--temperature", "0", lines="Hello\n/quit\n")
    assert (out.returncode, out.stdout, out.stderr) == (0, "Hi!\n", "")


@pytest.mark.thorough
def test_with_a_real_engine(smollm2_gguf, optimised):
    out = pipe(str(smollm2_gguf), "--temperature", "0", "--max-tokens", "12", lines="What is the capital of France?\n")
    assert out.returncode == 0 and "Paris" in out.stdout, out.stderr
