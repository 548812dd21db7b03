"""What a template does about thoughts, efforts and system messages is found out once."""

from __future__ import annotations

import chat_templates
import pytest

from vlm_serve.preprocess.text.template import LEVELS, ChatTemplate, Thinking, effort_for

OPENS = {"default": "opens", "on": "opens", "off": "closes"}
SILENT = {"default": "none", "on": "none", "off": "none"}
ASK = "{% for m in messages %}{{ m.content }}{% endfor %}"


def published(name: str) -> ChatTemplate:
    source = chat_templates.published(name) or pytest.skip(f"{name} is not beside the project")
    return ChatTemplate(source)


@pytest.mark.parametrize("name", ["qwen35", "qwen36", "qwen38"])
def test_published_templates_open_and_close_thoughts(name: str) -> None:
    traits = published(name).traits
    assert traits.thinking.marked and traits.thinking.prompt == OPENS
    assert traits.tool_form == "qwen3_xml"
    assert not traits.late_systems
    assert ("preserve_thinking" in traits.variables) is (name != "qwen35")


@pytest.mark.parametrize("name", ["qwen3vl", "qwen3_2507"])
def test_published_templates_without_thoughts(name: str) -> None:
    traits = published(name).traits
    assert not traits.thinking.marked and traits.thinking.prompt == SILENT
    assert traits.tool_form == "hermes"
    assert traits.late_systems is (name == "qwen3_2507")
    assert traits.effort_variables("high") == {}


def test_efforts_become_those_of_the_template() -> None:
    traits = published("qwen38").traits
    assert traits.thinking.efforts == ("low", "medium", "xhigh")
    found = [traits.effort_variables(level).get("reasoning_effort") for level in LEVELS]
    assert found == [None, "low", "low", "medium", "xhigh", "xhigh", "xhigh"]
    assert traits.effort_variables("none") == {"enable_thinking": False}
    assert traits.effort_variables("minimal")["enable_thinking"] is True
    assert traits.effort_variables(None) == {}
    assert traits.effort_variables("enormous") == {"enable_thinking": True}
    template = published("qwen38")
    for level in LEVELS:
        kwargs = traits.effort_variables(level)
        assert template.render([{"role": "user", "content": "hi"}], kwargs=kwargs)


@pytest.mark.parametrize(
    ("source", "efforts"),
    [
        ("{% if reasoning_effort == 'low' %}be brief{% elif reasoning_effort == 'high' %}think"
         "{% endif %}", ("low", "high")),
        ("{% set e = reasoning_effort | default('low') %}{{ {'low': 1, 'max': 9}[e] }}",
         ("low", "max")),
        ("Reasoning: {{ reasoning_effort }}", LEVELS),
        ("{% if reasoning_effort not in ['deep', 'low'] %}{{ raise_exception('no') }}{% endif %}",
         ("low", "deep")),
        ("{{ effort }}", ()),
    ],
)  # fmt: skip
def test_efforts_are_read_from_probes_and_the_syntax_tree(
    source: str, efforts: tuple[str, ...]
) -> None:
    assert ChatTemplate(source + ASK).traits.thinking.efforts == efforts


def test_the_next_higher_effort_is_taken_or_else_the_highest() -> None:
    some = Thinking(efforts=("low", "high"))
    found = [effort_for(some, level) for level in LEVELS]
    assert found == [None, "low", "low", "high", "high", "high", "high"]
    assert effort_for(Thinking(efforts=("none", "deep")), "none") == "none"
    assert effort_for(Thinking(efforts=("deep",)), "deep") == "deep"
    assert effort_for(Thinking(efforts=("deep",)), "high") is None
    assert effort_for(Thinking(), "high") is None


def test_a_template_that_drops_old_thoughts_knows_them() -> None:
    drops = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
    assert ChatTemplate(drops).traits.thinking.marked
    assert not ChatTemplate(ASK).traits.thinking.marked


def test_defaults_are_variables_that_a_request_may_replace() -> None:
    template = ChatTemplate(ASK + "{{ tone }}", None, {"tone": "calm"})
    messages = [{"role": "user", "content": "hi "}]
    assert template.render(messages) == "hi calm"
    assert template.render(messages, kwargs={"tone": "bold"}) == "hi bold"


THOUGHT = "<think>{{ m.reasoning_content }}</think>"
CALLED = "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}{% endfor %}"


@pytest.mark.parametrize(
    ("answer", "separator"),
    [
        (THOUGHT + "{{ '\\n\\n' }}{{ m.content or '' }}" + CALLED, "\n\n"),
        (THOUGHT + "{{ '\\n' if m.tool_calls else '\\n\\n' }}{{ m.content or '' }}" + CALLED, "\n"),
        (THOUGHT + "{{ m.content or '' }}" + CALLED, ""),
        ("{{ m.content or '' }}" + CALLED, ""),
    ],
    ids=["line breaks", "fewer before calls", "nothing", "thoughts are not shown"],
)
def test_what_stands_behind_a_thought_is_rendered_once(answer: str, separator: str) -> None:
    asked = "{% if m.role == 'assistant' %}" + answer + "{% else %}{{ m.content }}{% endif %}"
    template = ChatTemplate("{% for m in messages %}" + asked + "|{% endfor %}")
    assert template.traits.separator == separator


def test_an_empty_thought_of_a_generation_prompt_shows_what_stands_behind_it() -> None:
    template = ChatTemplate(ASK + "{% if not enable_thinking %}<think></think>\n{% endif %}")
    assert template.traits.separator == "\n"


@pytest.mark.parametrize("name", ["qwen35", "qwen36", "qwen38"])
def test_published_templates_write_an_empty_line_behind_thoughts(name: str) -> None:
    assert published(name).traits.separator == "\n\n"
