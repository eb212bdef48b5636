"""Chat templates: rendered as transformers does, in a sandbox, with clear errors."""

from __future__ import annotations

import pytest

from pagedkv.text import ChatTemplate
from pagedkv.text.chat_template import MAX_OUTPUT_CHARS

CHATML = (
    "{% for message in messages %}\n"
    "    {% if not loop.first %}{{ '\\n' }}{% endif %}\n"
    "{{ '<|start|>' + message['role'] + '\\n' + message.content + '<|end|>' }}\n"
    "{%- if message.role == 'stop' %}{% break %}{% endif %}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}{{ bos_token }}assistant{% endif %}"
)
USER = [{"role": "user", "content": "hi"}]


def render(source: str, messages: object = USER, **options: bool) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize(
    "messages",
    [
        USER,
        [{"role": "system", "content": "be brief"}, *USER, {"role": "a", "content": "é\n{{x}}"}],
        [{"role": "stop", "content": "last"}, *USER],
    ],
)
def test_a_prompt_equals_that_of_transformers(
    messages: list[dict[str, str]], add_generation_prompt: bool
) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    (expected,), _ = render_jinja_template(
        conversations=[messages],
        chat_template=CHATML,
        add_generation_prompt=add_generation_prompt,
        bos_token="<s>",
    )
    found = render(CHATML, messages, add_generation_prompt=add_generation_prompt)
    assert found == expected


def test_json_keeps_its_characters() -> None:
    assert render("{{ messages[0].content | tojson }}", [{"role": "u", "content": "é<'"}]) == (
        '"é<\'"'
    )
    assert render("{{ [1, 2] | tojson(indent=1) }}") == "[\n 1,\n 2\n]"


def test_the_day_can_be_asked_for() -> None:
    assert render("{{ strftime_now('%Y') }}").startswith("2")


def test_messages_are_given_as_they_are() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    source = "{% for part in messages[0].content %}{{ part.text }}{% endfor %}"
    assert render(source, [{"role": "user", "content": parts}]) == "ab"
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    assert render("{{ messages[0].tool_calls[0].name }}", [call]) == "f"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a\n{% for %}", "syntax error in line 2: "),
        ("{{ x ", "syntax error in line 1: "),
        ("{% include 'x' %}{% foo %}", "syntax error in line 1: Encountered unknown tag 'foo'"),
        ("a" * (2**20 + 1), "the chat template has 1048577 characters, more than 1048576"),
    ],
)
def test_a_broken_template_is_refused_when_it_is_loaded(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChatTemplate(source, {})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.foo.bar }}", "has no attribute 'foo'"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ 1 // 0 }}", "division"),
        ("{% include 'other' %}", "no loader"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_what_a_template_refuses_is_a_clear_error(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"the chat template refused the messages: .*{message}"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__ }}{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ raise_exception.__globals__['jinja2'] }}",
        "{{ cycler.__init__.__globals__.os.popen('true') }}",
        "{{ ''.format_map }}{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ (messages | attr('__class__'))() }}",
    ],
)
def test_the_sandbox_does_not_open(source: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(ValueError, match="refused the messages"):
        render(source, messages)
    assert messages == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for i in range(99999) %}{{ 'a' * 100 }}{% endfor %}", "the prompt is longer than"),
        ("{{ 'a' * 10**9 }}", r"the result of \* would be too large"),
        ("{{ 10**9 * 'a' }}", r"the result of \* would be too large"),
        ("{{ [0] * 10**9 }}", r"the result of \* would be too large"),
        ("{{ 10**9**9 }}", r"the result of \*\* would be too large"),
        ("{{ 2.5**5000 }}", r"the result of \*\* would be too large"),
        ("{{ -9**999 }}", r"the result of \*\* would be too large"),
        ("{{ 99999999 * 9999999999999 }}", r"the result of \* would be too large"),
        (f"{{{{ 'a' * {2**62} }}}}", "only texts, lists and numbers below"),
        ("{{ {} * 2 }}", "only texts, lists and numbers below"),
        ("{{ range(10**9) | length }}", "Range too big"),
    ],
)
def test_a_small_template_cannot_make_something_huge(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        render(source)


def test_small_products_and_powers_work() -> None:
    assert render("{{ 'ab' * 3 }}{{ 2**10 }}{{ 3 * 1.5 }}{{ 2**-1 }}{{ 0**0 }}") == (
        "ababab10244.50.51"
    )
    assert len(render(f"{{{{ 'a' * {MAX_OUTPUT_CHARS} }}}}")) == MAX_OUTPUT_CHARS


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        ("hello", "messages must be a list"),
        ({"role": "user"}, "messages must be a list"),
        (["hello"], "message 0 is not an object with a role"),
        ([*USER, {"content": "x"}], "message 1 is not an object with a role"),
        ([{"role": 1, "content": "x"}], "message 0 is not an object with a role"),
        ([{"role": "user", "content": 5}], "message 0: content is int, expected text, a list"),
    ],
)
def test_what_is_no_conversation_is_refused(messages: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        render(CHATML, messages)
