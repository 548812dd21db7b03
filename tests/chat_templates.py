"""Chat templates that differ in what they take as content, and where the published ones lie."""

from __future__ import annotations

import shutil
from pathlib import Path

_PUBLISHED = Path(__file__).resolve().parents[2] / "shared" / "published" / "templates"
PUBLISHED = ("qwen35", "qwen36", "qwen38", "qwen3_2507", "qwen3vl")

_CALLS = (
    "{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.function.name }}{{ call.function.arguments | tojson }}</tool_call>"
    "{% endfor %}"
)
_OPEN = "{{ '<|im_start|>' + message.role + '\\n' }}"
_MEDIA = (
    "{% if part.type in ('image', 'video') %}"
    "<|vision_start|><|{{ part.type }}_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}"
)
_PARTS = "{% for part in message.content %}" + _MEDIA + "{% endfor %}"
_EITHER = (
    "{% if message.content is string %}{{ message.content }}{% else %}" + _PARTS + "{% endif %}"
)


def _template(shown: str) -> str:
    return (
        "{% for message in messages %}" + _OPEN + shown + _CALLS + "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


SKIPS_LISTS = _template("{% if message.content is string %}{{ message.content }}{% endif %}")
"""Prints nothing for a list of parts."""
ADDS_STRINGS = _template(
    "{% if message.role == 'assistant' and message.tool_calls %}"
    "{% if message.content is string and message.content | trim | length > 0 %}"
    "{{ message.content }}{% endif %}"
    "{% elif message.role == 'tool' %}{{- message.content }}"
    "{% else %}{{ '' + message.content }}{% endif %}"
)
"""Fails for a list of parts, but prints a tool's as it is."""
PRINTS_WHATEVER = _template("{{ message.content }}")
DUMPS_JSON = _template(
    "{{ message.content if message.content is string else message.content | tojson }}"
)
USERS_ALONE = _template(
    "{% if message.role == 'user' %}" + _EITHER + "{% else %}{{ '' + message.content }}{% endif %}"
)
"""Loops over parts of users alone."""
PARTS_ALONE = _template(_PARTS)
FIRST_PART = _template(
    "{{ message.content if message.content is string else message.content[0].text }}"
)
FIRST_PART_ALONE = _template("{{ message.content[0]['text'] }}")
LINE_A_PART = _template(
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{{ part.text + '\n' }}{% endfor %}{% endif %}"
)
"""Ends every part with a line break, but no string."""
CAPITALS = _template("{{ message.content | upper }}")
NONE_BESIDE_CALLS = (
    "{% for message in messages %}" + _OPEN + "{% if message.role == 'assistant' %}"
    "{% if message.content is none %}" + _CALLS + "{% else %}{{ '' + message.content }}{% endif %}"
    "{% else %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}"
)
"""Shows calls only where content is None."""
ALTERNATES = (
    "{% for message in messages %}"
    "{% if message.role != ['user', 'assistant'][loop.index0 % 2] %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    + _OPEN
    + _EITHER
    + "<|im_end|>\n{% endfor %}"
)
"""Knows neither system messages nor tools."""


def published(name: str) -> str:
    """The source of a published template; "" where it is absent."""
    path = _PUBLISHED / f"{name}.jinja"
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def with_template(checkpoint: Path, target: Path, source: str) -> Path:
    """A copy of a checkpoint that has another chat template."""
    shutil.copytree(checkpoint, target, ignore=shutil.ignore_patterns("*.safetensors"))
    (target / "chat_template.jinja").write_text(source, encoding="utf-8")
    return target
