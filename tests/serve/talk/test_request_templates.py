"""Chat templates of requests are rendered in a process with limits."""

from __future__ import annotations

import resource

import httpx
import pytest
from refusals import refuses
from serve.servers import Script, running

from dovetail.core.errors import RequestError
from dovetail.io.chat import ChatTemplate
from dovetail.serve.talk import request_templates
from dovetail.serve.talk.request_templates import RequestTemplates

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ bos_token }}{{ tools }}{{ kind }}"
# Each operation is small enough for the sandbox.
ENDLESS = "{% for i in range(99999) %}{% if 'b' in 'a' * 50000000 %}{% endif %}{% endfor %}"
HUNGRY = "{% set n = namespace(a=[]) %}{% for i in range(500) %}{% set n.a = n.a + ['a' * 5000000 ~ i] %}{% endfor %}"


IGNORING = "trap '' PROF; exec \"$@\""  # as a process does after a profile was taken of it


@pytest.fixture(scope="module")
def templates():
    """Render in a process whose parent ignores SIGPROF."""
    found, start = RequestTemplates(), request_templates.start_process
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_templates, "start_process", lambda *command: start("sh", "-c", IGNORING, "sh", *command))
        yield found
        found.close()


def test_request_templates_render_as_the_server_does(templates):
    special, more = {"bos_token": "<s>"}, dict(add_generation_prompt=False, continue_final_message=True, kind="é\ufdd0")
    for source in (CHATML, "{% if %}", "{{ raise_exception('no') }}", "{{ ''.__class__ }}"):
        try:
            expected = ChatTemplate(source, special).render(HELLO, None, **more)
        except ValueError as error:
            with refuses("chat_template", RequestError, naming=str(error)):
                templates.render(source, special, HELLO, None, **more)
        else:
            assert templates.render(source, special, HELLO, None, **more) == expected
    assert templates._process is not None and templates._process.poll() is None


def children_seconds() -> float:
    """Return the processor time of this process's children that have ended."""
    found = resource.getrusage(resource.RUSAGE_CHILDREN)
    return found.ru_utime + found.ru_stime


@pytest.mark.slow
@pytest.mark.parametrize(("source", "why"), [(ENDLESS, "2 s of processor time"), (HUNGRY, "memory|Memory")])
def test_an_endless_template_is_stopped(templates, source, why):
    used = children_seconds()
    with pytest.raises(RequestError, match=why):
        templates.render(source, {}, HELLO, None)
    assert children_seconds() - used < 10  # and not all that fits into the limit on real time
    assert templates.render(CHATML, {}, HELLO, None) == "<user>HelloNone"


@pytest.mark.slow
def test_the_server_renders_request_templates_in_the_other_process(tokenizer, monkeypatch):
    async def engine():
        return Script(tokenizer)

    inside = []
    render = ChatTemplate.render
    monkeypatch.setattr(
        ChatTemplate, "render", lambda self, *a, **b: inside.append(self.source) or render(self, *a, **b)
    )
    with running(engine, tokenizer, trust_request_chat_template=True) as server:

        def post(path, **body):
            return httpx.post(server.url + path, json={"messages": HELLO} | body, timeout=60)

        assert post(CHAT, chat_template=CHATML, chat_template_kwargs={"kind": "K"}).status_code == 200
        assert server.engine.asked[-1][0].endswith("NoneK") and inside == [], "it was rendered in the server"
        assert post("/tokenize", chat_template=CHATML).json()["count"] > 3
        answer = post(CHAT, chat_template="{{ '{:200000000}'.format(1) }}")
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "chat_template"
        assert inside == [] and post(CHAT).status_code == 200 and len(inside) == 1
        process = server.app.state.service.prompts._request_templates._process
    assert process.wait(30) is not None, "it ends with the server"
