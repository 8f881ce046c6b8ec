"""Chat templates: rendering as in transformers, sandbox limits, and errors that name the line."""

import copy
import threading
import warnings

import pytest
from refusals import refuses

from dovetail.core.errors import UserError
from dovetail.io import sandbox, sandbox_bounds
from dovetail.io.chat import ChatTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

# --- templates in the manner of real models, written for these tests --------------------------------

CHATML = """\
{%- if messages[0].role != 'system' -%}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif -%}
{% for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | default('', true) + '<|im_end|>' + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{%- endif %}
"""

LLAMA3 = """\
{{- bos_token }}
{%- set ns = namespace(first=true) %}
{%- set system_message = '' %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- "Today Date: " + (date_string if date_string is defined else strftime_now("%d %b %Y")) + "\\n\\n" }}
{{- system_message }}{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role == 'user' and ns.first and tools is not none %}
        {%- set ns.first = false %}
        {{- '<|start_header_id|>user<|end_header_id|>\\n\\nFunctions:\\n\\n' }}
        {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
        {{- message.content | trim + "<|eot_id|>" }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- elif message.role in ["tool", "ipython"] %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or (message.content is iterable and message.content is not string) %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- for message in loop_messages | rejectattr("role", "equalto", "tool") | selectattr("content") %}
    {%- if (message["role"] == "user") != (loop.index0 % 2 == 0) %}
        {{- raise_exception("After the optional system message, conversation roles must alternate user/assistant") }}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message.role == "user" %}
        {%- if tools is not none and loop.last %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools | map(attribute="function") %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {{- '"%s": ' % key }}{{- val | tojson if val is not string else '"' ~ val ~ '"' }}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" ~ ("" if loop.last else ", ") }}
            {%- endfor %}
            {{- "] [/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST] " ~ (system_message ~ "\\n\\n" if loop.last and system_message is defined else "") }}
        {{- message.content ~ " [/INST]" }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] " ~ message.tool_calls | map(attribute="function") | list | tojson ~ eos_token }}
    {%- elif message.role == "assistant" %}
        {{- " " + message.content | trim + eos_token }}
    {%- elif message.role == "tool" %}
        {%- if not message.content %}{% continue %}{% endif %}
        {{- '[TOOL_RESULTS] {"content": ' ~ message.content ~ "} [/TOOL_RESULTS]" }}
    {%- else %}
        {{- raise_exception("Only user, assistant and tool roles are supported") }}
    {%- endif %}
{%- endfor %}
"""

GEMMA = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""

QWEN3 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last_query=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and not message.content.startswith('<tool_response>') %}
        {%- set ns.searching = false %}{%- set ns.last_query = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = message.reasoning_content if message.reasoning_content is string else '' %}
        {%- if not reasoning and '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_query and (loop.last or reasoning) %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {%- generation %}
        {{- content.lstrip('\\n') }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' ~ tool_call.name ~ '", "arguments": ' }}
            {{- tool_call.arguments if tool_call.arguments is string else tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "gemma": GEMMA, "qwen3": QWEN3}

# --- conversations ----------------------------------------------------------------------------------


def say(role: str, content=None, **more) -> dict:
    return {"role": role, "content": content, **more}


CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich <&>", "days": 2}}}
SYSTEM, USER = say("system", " Be brief. 简短 \n"), say("user", '  What\'s <b>the</b> weather & "why"? 😀')
ASKED = [USER, say("assistant", tool_calls=[CALL]), say("tool", '{"sky": "clear"}', tool_call_id="c1")]
CHATS = {
    "one turn": [USER],
    "with a system prompt": [SYSTEM, USER],
    "several turns": [SYSTEM, USER, say("assistant", " Sunny. \n"), say("user", "And tomorrow?")],
    "ends with the assistant": [USER, say("assistant", "<think>\nhm\n</think>\n\nSunny.")],
    "reasoning apart": [USER, say("assistant", "Sunny.", reasoning_content="\nI look outside.\n")],
    "reasoning by another name": [USER, say("assistant", "Sunny.", reasoning="I look outside.")],
    "tool results": [SYSTEM, *ASKED],
    "two tool results": [*ASKED, say("tool", ""), say("assistant", "Clear.")],
    "two calls": [USER, say("assistant", "Let me see.", tool_calls=[CALL, CALL])],
    "parts": [say("user", [{"type": "text", "text": " look: "}, {"type": "image"}])],
    "two users": [USER, USER],
    "unknown role": [say("narrator", "Once upon a time")],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city, e.g. <Zürich> & 東京",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]


@pytest.fixture(scope="session")
def reference(make_backend):
    """transformers' rendering of the same arguments."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import PreTrainedTokenizerFast

        theirs = PreTrainedTokenizerFast(tokenizer_object=make_backend("sentencepiece"), **SPECIAL)
    return theirs


# Both refusing is agreement too, but only where the template was written to refuse (or cannot do it).
REFUSED = {
    ("chatml", "parts"),
    ("qwen3", "parts"),
    ("llama3", "two calls"),
    ("mistral", "two users"),
    ("mistral", "unknown role"),
}


def outcome(render) -> str | None:
    """Return the text, or None if the arguments are refused."""
    try:
        return render()
    except Exception:
        return None


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_as_transformers_does(reference, name, chat):
    ours, rendered = ChatTemplate(TEMPLATES[name], SPECIAL), 0
    for tools in (None, [], TOOLS):
        for more in ({}, {"enable_thinking": False, "date_string": "1 Jan 2025"}):
            for generate in (True, False):
                messages = copy.deepcopy(CHATS[chat])
                expected = outcome(
                    lambda m=messages, t=tools, g=generate, k=more: reference.apply_chat_template(
                        m, tools=t, chat_template=TEMPLATES[name], add_generation_prompt=g, tokenize=False, **k
                    )
                )
                got = outcome(
                    lambda m=messages, t=tools, g=generate, k=more: ours.render(m, t, add_generation_prompt=g, **k)
                )
                assert got == expected
                assert messages == CHATS[chat], "the caller's messages were changed"
                rendered += got is not None
    assert bool(rendered) == ((name, chat) not in REFUSED)


def test_a_rendered_chatml_prompt():
    assert ChatTemplate(CHATML).render([say("user", "Hi")]) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


# --- going on with the last message -----------------------------------------------------------------


@pytest.mark.parametrize("content", ["Sunny", "Sunny. ", "  It is\n", "```json\n{"])
@pytest.mark.parametrize("name", ["chatml", "llama3", "gemma", "qwen3"])
def test_the_last_message_goes_on_as_in_transformers(reference, name, content):
    messages = [USER, say("assistant", content)]
    expected = reference.apply_chat_template(
        messages, chat_template=TEMPLATES[name], tokenize=False, continue_final_message=True, date_string="x"
    )
    ours = ChatTemplate(TEMPLATES[name], SPECIAL)
    got = ours.render(messages, add_generation_prompt=False, continue_final_message=True, date_string="x")
    assert got == expected and got.endswith(content.strip() if name in ("llama3", "gemma") else content)


def test_continue_final_message_is_refused_without_text_to_continue():
    template = ChatTemplate(CHATML)
    with refuses("continue_final_message"):
        template.render([USER], continue_final_message=True)
    with refuses("continue_final_message"):
        template.render(ASKED[:2], add_generation_prompt=False, continue_final_message=True)
    with refuses("continue_final_message"):
        ChatTemplate("x").render([USER], add_generation_prompt=False, continue_final_message=True)


# --- spans of what the model wrote ------------------------------------------------------------------


def spans_of(source: str, messages, **kwargs) -> tuple[str, list[str]]:
    text, spans = ChatTemplate(source, SPECIAL).render_with_spans(messages, **kwargs)
    assert text == ChatTemplate(source, SPECIAL).render(messages, add_generation_prompt=False, **kwargs)
    return text, [text[start:end] for start, end in spans]


@pytest.mark.parametrize(
    "chat", ["several turns", "ends with the assistant", "two tool results", "two calls", "one turn"]
)
def test_spans_are_those_of_transformers(reference, chat):
    from transformers.utils.chat_template_utils import render_jinja_template

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (text,), (expected,) = render_jinja_template(
            [CHATS[chat]], tools=TOOLS, chat_template=QWEN3, return_assistant_tokens_mask=True, **SPECIAL
        )
    ours = ChatTemplate(QWEN3, SPECIAL).render_with_spans(CHATS[chat], TOOLS)
    assert ours == (text, expected)


def test_spans_hold_what_the_model_wrote():
    text, spans = spans_of(QWEN3, CHATS["several turns"])
    assert spans == [" Sunny. \n<|im_end|>"] and text.count("<|im_end|>") == 4
    assert spans_of(CHATML, CHATS["several turns"])[1] == []


def test_spans_in_a_macro_and_nested():
    source = (
        "{% macro turn(m) %}<{% generation %}a{% generation %}{{ m.content }}{% endgeneration %}b{% endgeneration %}>"
        "{% endmacro %}{% for m in messages %}{{ turn(m) }}{% endfor %}"
    )
    assert spans_of(source, [say("user", "x"), say("user", "yz")]) == ("<axb><ayzb>", ["axb", "ayzb"])


def test_spans_with_the_marks_in_the_text():
    _, spans = spans_of("{% generation %}{{ messages[0].content }}{% endgeneration %}", [say("user", "\ufdd0a\ufdd1")])
    assert spans == ["\ufdd0a\ufdd1"]


def test_spans_of_text_that_is_changed_afterwards_are_refused():
    source = "{% set x %}{% generation %} a {% endgeneration %}{% endset %}{{ x | trim }}"
    with refuses("chat_template"):
        ChatTemplate(source).render_with_spans([USER])


# --- the limits of templates ---------------------------------------------------------------------

LAUGHS = "{% set n = namespace(a=[1]) %}{% for i in range(40) %}{% set n.a = [n.a, n.a] %}{% endfor %}"
ATTACKS = {
    "class": "{{ ''.__class__ }}",
    "class by filter": "{{ '' | attr('__class__') }}",
    "class by key": "{{ messages['__class__'] }}",
    "class by map": "{{ messages | map(attribute='__class__') | list }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "globals of a macro": "{% macro m() %}{% endmacro %}{{ m.__init__.__globals__ }}",
    "cycler": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "format": "{{ '{0.__class__}'.format(messages) }}",
    "format_map": "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "private namespace name": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "private namespace key": "{{ namespace(__call__=1) }}",
    "append": "{{ messages.append(1) }}",
    "pop": "{{ messages[0].pop('role') }}",
    "update through dict": "{{ dict.update(messages[0], {'role': 'x'}) }}",
    "environment": "{{ self._TemplateReference__context.environment }}",
    "lipsum": "{{ lipsum.__globals__['os'] }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}",
    "big range": "{% for i in range(10**9) %}x{% endfor %}",
    "nested ranges": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "recursive loop": "{% for i in range(9999) recursive %}{{ loop(range(9999)) if loop.depth < 5 }}{% endfor %}",
    "endless recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "branching recursion": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(99) }}",
    "repeat": "{{ 'a' * 10**12 }}",
    "repeat a list": "{{ ([1] * 99999999999) | length }}",
    "power": "{{ 9 ** 9 ** 9 }}",
    "width": "{{ '%999999999d' % 1 }}",
    "width by filter": "{{ '%999999999d' | format(1) }}",
    "width by star": "{{ '%*d' % (999999999, 1) }}",
    "centre": "{{ 'a' | center(999999999) }}",
    "justify": "{{ 'a'.ljust(999999999) }}",
    "indent": "{{ messages | tojson(indent=999999999) }}",
    "unknown call": "{{ open('/etc/passwd') }}",
    "round": "{{ 1 | round(4000000, 'ceil') }}",
    "str.format": "{{ '{:200000000}'.format(1) }}",
    "str.format by a field": "{{ '{:{}}'.format(1, 200000000) }}",
    "str.format_map": "{{ '{a:200000000}'.format_map({'a': 1}) }}",
    "str.format of long text": "{{ ('{0}' * 10000).format('a' * 10000) | length }}",
    "percent of long text": "{{ (('%(a)s' * 10000) % {'a': 'a' * 10000}) | length }}",
    "replace": "{{ ('a' * 10000) | replace('a', 'a' * 10000) | length }}",
    "replace by map": "{{ ['a' * 10000] | map('replace', 'a', 'a' * 10000) | first | length }}",
    "replace by method": "{{ ('a' * 10000).replace('', 'a' * 10000) | length }}",
    "bytes": "{{ ('a' * 10000).encode().replace('a'.encode(), ('a' * 10000).encode()) | length }}",
    "join": "{{ (['a' * 10000] * 10000) | join | length }}",
    "join by attribute": "{{ ([{'a': 'a' * 10000}] * 10000) | join(attribute='a') | length }}",
    "join by method": "{{ ('a' * 10000).join([''] * 10000) | length }}",
    "tabs": "{{ ('\\t' * 10000).expandtabs(99999) | length }}",
    "translate": "{{ ('a' * 10000).translate({97: 'a' * 10000}) | length }}",
    "spaces": "{{ ('\\n' * 10000) | indent(99999, true, true) | length }}",
    "json indent": "{{ ([1] * 10000) | tojson(indent=99999) | length }}",
    "json separators": "{{ ([1] * 10000) | tojson(separators=('a' * 10000, ':')) | length }}",
    "a sum of lists": "{{ ([[1] * 10000] * 10000) | sum(start=[]) | length }}",
    "sums": "{% set n = namespace(a='a') %}{% for i in range(40) %}{% set n.a = n.a + n.a %}{% endfor %}",
    "joins": "{% set n = namespace(a='a') %}{% for i in range(40) %}{% set n.a = n.a ~ n.a %}{% endfor %}",
    "lists": "{% set n = namespace(a=[1]) %}{% for i in range(40) %}{% set n.a = n.a + n.a %}{% endfor %}",
    "nested lists": LAUGHS + "{{ n.a }}",
    "nested lists as text": LAUGHS + "{{ n.a | string | length }}",
    "nested lists as JSON": LAUGHS + "{{ n.a | tojson | length }}",
    "nested lists joined": LAUGHS + "{{ n.a ~ '' }}",
    "a captured block": "{% set b %}{% for i in range(10000) %}{{ 'a' * 10000 }}{% endfor %}{% endset %}{{ b }}",
    "a date": "{{ strftime_now('%Y' * 1000000) }}",
}


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hostile_template_is_refused_with_its_line(attack, monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_PASSES", 20_000)
    monkeypatch.setattr(sandbox_bounds, "MAX_PARTS", 10_000)
    messages = [say("user", "hi")]
    with refuses("chat_template", naming="line 3"):
        ChatTemplate("first\n\n" + ATTACKS[attack]).render(messages)
    assert messages == [say("user", "hi")]


def test_the_limit_is_far_from_real_chats(monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_PASSES", 50_000)
    assert ChatTemplate(QWEN3).render([USER, say("assistant", "ok")] * 1000)


def test_the_output_is_bounded_too():
    with refuses("chat_template", naming="67,108,864"):
        ChatTemplate("{% for i in range(10000) %}{{ 'a' * 10000 }}{% endfor %}").render([USER])


def test_ordinary_text_is_untouched():
    source = (
        "{{ 'a' ~ 1 ~ none }} {{ [1, 'b'] | join('-') }} {{ messages | join(attribute='role') }} "
        "{{ 'aba' | replace('a', 'c') }} {{ 'aaa' | replace('a', 'b', 2) }} {{ 5 | replace(5, 6) }} "
        "{{ 2.567 | round(1) }} {{ [1, 2] | sum }} {{ '{:>5}|{}'.format(1, 'x') }} {{ ', '.join(['a', 'b']) }} "
        "{{ 'a' | indent(2, true) }} {{ [1] + [2] }} {{ 'a' + 'b' }}{{ 'a\\tb'.expandtabs(2) }} {{ none }} {{ 1.5 }} "
        "{{ {'a': 1} }} {{ '%d%%' % 5 }}"
    )
    said = "a1None 1-b user cbc bba 6 2.6 3     1|x a, b   a [1, 2] aba b None 1.5 {'a': 1} 5%"
    assert ChatTemplate(source).render([USER]) == said


def test_ordinary_arithmetic_is_untouched():
    source = (
        "{{ 2 * 3 }} {{ 'ab' * 2 }} {{ 2 ** 10 }} {{ 7 % 3 }} {{ '%s|%5.1f' % ('x', 2) }} {{ '%d' | format(10**9) }}"
    )
    assert ChatTemplate(source).render([USER]) == "6 abab 1024 1 x|  2.0 1000000000"


# --- errors that teach ------------------------------------------------------------------------------


def test_a_templates_own_refusal_is_passed_on():
    with pytest.raises(UserError, match=r"conversation roles must alternate .*line 9"):
        ChatTemplate(MISTRAL, SPECIAL).render([USER, USER])


@pytest.mark.parametrize(
    ("source", "naming"),
    [
        ("a\n{% if %}", "line 2"),
        ("{% for m in messages %}", "'endfor'"),
        ("\n{{ messages[0].content + 1 }}", "line 2: TypeError"),
        ("\n\n{{ nothing.at.all }}", "line 3: UndefinedError: 'nothing'"),
        ("{{ nothing | tojson }}", "line 1: TypeError"),
        ("{{ 1 // 0 }}", "line 1: ZeroDivisionError"),
        ("{{ x | no_such_filter }}", "'no_such_filter'"),
    ],
)
def test_a_broken_template_names_its_line(source, naming):
    with refuses("chat_template", naming=naming):
        ChatTemplate(source).render([USER])


@pytest.mark.parametrize(
    ("messages", "naming"),
    [
        ([], "[]"),
        ("hello", "'hello'"),
        ([USER, "hi"], "messages[1]: expected a dict, got str"),  # the wording of this family
        ([USER, {"content": "hi"}], "messages[1]"),
        ([{"role": 3, "content": "hi"}], "messages[0]"),
        ([USER, USER, {"role": "user"}], "messages[2]"),
        ([say("assistant", None, tool_calls=[])], "messages[0]"),
        ([say("user", 3)], "messages[0]"),
        ([say("user", [{"type": "sound", "sound": object()}])], "messages[0].content[0].sound"),
    ],
)
def test_a_wrong_message_is_named(messages, naming):
    with refuses("messages", naming=naming):
        ChatTemplate(CHATML).render(messages)


@pytest.mark.parametrize(
    ("tools", "naming"),
    [
        ({}, "dict"),
        ([TOOLS[0], len], "tools[1]"),
        ([{"name": "bare"}], "tools[0]"),
        ([{"type": "function", "function": {}}], "tools[0]"),
    ],
)
def test_a_wrong_tool_is_named(tools, naming):
    with refuses("tools", naming=naming):
        ChatTemplate(CHATML).render([USER], tools)


def test_other_arguments_are_plain_data_too():
    with refuses("config"):
        ChatTemplate(CHATML).render([USER], config=object())
    with refuses("chat_template"):
        ChatTemplate(None)  # type: ignore[arg-type]


# --- one compilation, many users --------------------------------------------------------------------


def test_a_template_is_compiled_once():
    source = "{{ messages | length }} once"
    before = sandbox.compile_source.cache_info().misses
    for _ in range(3):
        ChatTemplate(source).render([USER])
    assert sandbox.compile_source.cache_info().misses == before + 1


def test_threads_share_a_template():
    template, wrong = ChatTemplate(QWEN3), []

    def work(i: int) -> None:
        for _ in range(20):
            text, spans = template.render_with_spans([USER, say("assistant", f"answer {i}")])
            if [text[a:b] for a, b in spans] != [f"answer {i}<|im_end|>"]:
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
