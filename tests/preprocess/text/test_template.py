"""Chat templates: rendered as transformers renders them, within bounds."""

from __future__ import annotations

import json
import threading
from datetime import datetime
from pathlib import Path
from typing import Any

import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_serve.errors import CheckpointError, InvalidRequestError
from vlm_serve.preprocess.text.template import ChatTemplate, named_chat_template

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": [{"type": "text", "text": "a<b>é"}, {"type": "text", "text": "c"}]},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [
            {"type": "function", "function": {"name": "f", "arguments": {"x": [1, "é<"], "y": "z"}}}
        ],
    },
    {"role": "tool", "content": "1"},
    {"role": "tool", "content": [{"type": "text", "text": "2"}]},
    {"role": "assistant", "content": "<think>\nno\n</think>\n\nyes"},
    {"role": "user", "content": "again"},
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "ä <b>", "parameters": {"type": "object"}},
    }
]

# One template that uses everything the environment promises.
FEATURES = """
{#- comment -#}
    {%- set ns = namespace(n=0, self=3) %}
    {%- for m in messages %}
        {%- if m.role == 'system' %}{% continue %}{% endif %}
        {%- set ns.n = ns.n + 1 %}
        {%- if ns.n > 3 %}{% break %}{% endif %}
    {%- generation %}{{ m.role | upper }}: {{ m.content | tojson }}{% endgeneration %}

    {% endfor %}
  {% if tools %}
{{ tools | tojson(indent=2, sort_keys=true) }} {{ tools[0] | tojson(separators=(',', ':')) }}
  {% endif %}
{{ {'a': 'é<'} | tojson(ensure_ascii=true) }} {{ ns.n }} {{ eos_token }} {{ bos_token is defined }}
{{ missing is defined }} {{ documents is none }} {{ add_generation_prompt }}
{{ extra | default(7) }} {{ 'x' * 3 }} {{ (1, 2) | join('-') }} {{ dict(a=1)['a'] }}
{{ '%05d' | format(42) }} {{ '  a ' | trim }}|
"""


def transformers_render(path: Path, template: str | None, **options: Any) -> Any:
    return oracle.tokenizer(path).apply_chat_template(
        MESSAGES, chat_template=template, tokenize=False, **options
    )


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("add_generation_prompt", [False, True])
@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}, {"extra": [1, {"a": "é"}]}])
@pytest.mark.parametrize("source", [None, FEATURES])
def test_renders_as_transformers_does(
    checkpoint: Path,
    tools: Any,
    add_generation_prompt: bool,
    kwargs: dict[str, Any],
    source: str | None,
) -> None:
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    template = ChatTemplate(source or named_chat_template(checkpoint)[1], names)
    found = template.render(
        MESSAGES, tools=tools, add_generation_prompt=add_generation_prompt, kwargs=kwargs
    )
    assert found == transformers_render(
        checkpoint, source, tools=tools, add_generation_prompt=add_generation_prompt, **kwargs
    )


def test_strftime_now_is_the_local_time() -> None:
    before = datetime.now().strftime("%Y-%m-%d")
    text = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}").render(MESSAGES)
    assert text in (before, datetime.now().strftime("%Y-%m-%d"))


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(a=1) }}",
        "{{ namespace(__class__=1) }}",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}",
        "{{ raise_exception.__globals__['os'] }}",
        "{{ messages[0]['role'].format_map.__self__.__class__ }}{{ ''.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ strftime_now.__globals__.os }}",
        "{{ self._TemplateReference__context }}{{ self.__init__.__globals__ }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(InvalidRequestError):
        ChatTemplate(source).render(MESSAGES)


def test_a_templates_refusal_is_passed_on() -> None:
    template = ChatTemplate("{{ raise_exception('Roles must alternate.') }}")
    with pytest.raises(InvalidRequestError, match="Roles must alternate") as caught:
        template.render(MESSAGES)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content / 2 }}",
        "{{ messages[99].content.x }}",
        "{{ 1 // 0 }}",
        "{% for a in 3 %}{% endfor %}",
        "{{ messages.items() }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ {}.x.y }}",
    ],
)
def test_errors_inside_a_template_are_the_requests(source: str) -> None:
    with pytest.raises(InvalidRequestError):
        ChatTemplate(source).render(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{{ a }}{{ 'aaaaaaaaaaaaaaaa' }}{% endfor %}",
        "{% set x = 'a' * 1000000 %}{% for a in range(9) %}{{ x }}{% endfor %}",
    ],
)
def test_output_is_bounded(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="longer than 100000 characters"):
        ChatTemplate(source, max_output_characters=100_000).render(MESSAGES)


@pytest.mark.parametrize(
    "body", ["{{ a }}", "{% set x = messages[0].role %}", "{% if messages[0]['role'] %}{% endif %}"]
)
def test_time_is_bounded(body: str) -> None:
    loop = "{% for a in range(99999) %}" * 3 + body + "{% endfor %}" * 3
    with pytest.raises(InvalidRequestError, match=r"longer than 0\.1 seconds"):
        ChatTemplate(loop, max_seconds=0.1, max_output_characters=1 << 40).render(MESSAGES)


def test_deadlines_belong_to_threads() -> None:
    """A rendering that starts while another one runs does not inherit its deadline."""
    slow = "{% for a in range(99999) %}{% for b in range(99999) %}{{ messages[0].role }}"
    template = ChatTemplate(
        "{% if extra %}" + slow + "{% endfor %}" * 2 + "{% else %}done{% endif %}",
        max_seconds=1.0,
        max_output_characters=1 << 40,
    )
    errors: list[Exception] = []

    def run() -> None:
        try:
            template.render(MESSAGES, kwargs={"extra": True})
        except InvalidRequestError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert template.render(MESSAGES) == "done"
    thread.join()
    assert len(errors) == 1
    assert template.render(MESSAGES) == "done"


def test_no_template_and_broken_templates() -> None:
    with pytest.raises(InvalidRequestError, match="no chat template"):
        ChatTemplate("").render(MESSAGES)
    with pytest.raises(CheckpointError, match="does not compile"):
        ChatTemplate("{% if %}")


@pytest.mark.parametrize(
    "name",
    [
        "messages",
        "tools",
        "add_generation_prompt",
        "chat_template",
        "eos_token",
        "namespace",
        "a b",
    ],
)
def test_kwargs_replace_nothing(name: str) -> None:
    template = ChatTemplate("x", {"eos_token": "<|im_end|>"})
    with pytest.raises(InvalidRequestError) as caught:
        template.check_kwargs({name: "x"})
    assert caught.value.param == "chat_template_kwargs"
    template.check_kwargs({"enable_thinking": False, "documents": []})


def test_where_templates_are_found(tmp_path: Path) -> None:
    assert named_chat_template(tmp_path)[1] == ""
    listed = [{"name": "other", "template": "0"}, {"name": "default", "template": "1"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
    assert named_chat_template(tmp_path)[1] == "1"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "2"}))
    assert named_chat_template(tmp_path)[1] == "2"
    (tmp_path / "chat_template.jinja").write_text("3")
    assert named_chat_template(tmp_path)[1] == "3"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xff")
    with pytest.raises(CheckpointError):
        named_chat_template(tmp_path)


@given(st.text(max_size=50))
def test_any_text_passes_through(text: str) -> None:
    found = ChatTemplate("{{ messages[0].content }}").render([{"content": text}])
    assert found == text


def test_the_variables_that_a_template_reads() -> None:
    source = "{% set own = 1 %}{{ own }}{% if verbosity is defined %}{{ messages[0] }}{% endif %}"
    assert ChatTemplate(source).variables == {"verbosity", "messages"}
