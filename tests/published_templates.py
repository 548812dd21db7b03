"""Chat templates of our own, each with one behaviour of published ones, and those where they lie
beside the project."""

from __future__ import annotations

import chat_templates
import pytest

_OPEN = "{{ '<|im_start|>' + m.role + '\\n' }}"
_CLOSE = "<|im_end|>\n"
_PARTS = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content or [] %}"
    "{% if part.type in ('image', 'video') %}"
    "<|vision_start|><|{{ part.type }}_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
)
_CALLS = (
    "{% for call in m.tool_calls or [] %}<tool_call>\n<function={{ call.function.name }}>\n"
    "{% for name, value in call.function.arguments.items() %}<parameter={{ name }}>\n{{ value }}\n"
    "</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}"
)
_TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
_ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_ASK_THINKING = (
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}{% endif %}"
)
_THOUGHT = (
    "{% if m.role == 'assistant' and m.reasoning_content %}"
    "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
)
_LAST_QUESTION = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}"
)


def _template(shown: str, ask: str, before: str = "") -> str:
    loop = "{% for m in messages %}" + _OPEN + shown + _CLOSE + "{% endfor %}"
    return before + _TOOLS + loop + ask


OWN = {
    "wants strings": _template("{{ m.content or '' }}" + _CALLS, _ASK),
    "drops thoughts": _template(
        "{% if loop.index0 > ns.last %}" + _THOUGHT + "{% endif %}" + _PARTS + _CALLS,
        _ASK_THINKING,
        _LAST_QUESTION,
    ),
    "keeps thoughts": _template(
        "{% if preserve_thinking is not defined or preserve_thinking or loop.index0 > ns.last %}"
        + _THOUGHT
        + "{% endif %}"
        + _PARTS
        + _CALLS,
        _ASK_THINKING,
        _LAST_QUESTION,
    ),
    "reads an effort": _template(
        _PARTS + _CALLS,
        _ASK_THINKING,
        "{% set effort = reasoning_effort | default('xhigh') %}"
        "{% if effort not in ('low', 'medium', 'xhigh') %}"
        "{{ raise_exception('Unexpected reasoning effort') }}{% endif %}"
        "<|im_start|>system\nEffort: {{ effort }}<|im_end|>\n",
    ),
    "refuses late system messages": _template(
        "{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
        + _PARTS
        + _CALLS,
        _ASK,
    ),
}
TEXT_ALONE = ("wants strings", "qwen3_2507")
"""Templates that take no media."""
NAMES = (*OWN, *chat_templates.PUBLISHED)


def bare(template: str) -> str:
    """A template without tokens around media, and with a line break behind each."""
    return template.replace("<|vision_start|>", "").replace("<|vision_end|>", "\n")


def source_of(name: str) -> str:
    """The source of a template; skips the test by name where a published one is absent."""
    found = OWN.get(name) or chat_templates.published(name)
    return found or pytest.skip(f"the template {name} does not lie beside the project")
