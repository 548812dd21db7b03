"""Tool calls of every form: generated ones, broken ones, and long ones as they come."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from sweeps import quick
from tool_texts import cuts, is_unfinished, told

from vlm_serve.engine.requests.outputs import Delta
from vlm_serve.preprocess.text.template import ChatTemplate
from vlm_serve.server.answers.output_parser import OutputParser
from vlm_serve.server.answers.pieces import ToolForm
from vlm_serve.server.api.chat import ChatChoiceState
from vlm_serve.server.api.shared.chat_request import ChatCompletionRequest

TOOLS: dict[str, Any] = {
    "write_file": {
        "type": "object",
        "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
        "required": ["path"],
    },
    "find": {
        "type": "object",
        "properties": {
            "where": {"type": "object"},
            "words": {"type": "array"},
            "most": {"type": "integer"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
    },
}
FORMS: list[ToolForm] = ["qwen3_xml", "minicpm5", "hermes"]
WORDS = [
    "a",
    "word ",
    "<b>",
    "\n",
    "\n\n",
    '"',
    "'",
    "\\",
    "\u00e9\U0001f600",
    "{",
    "}",
    "]]>",
    "x > y",
]
WORDS += ["</parameter>", "</param>", "</function>", "</tool_call>", "<tool_call>", "<![CDATA["]
WORDS += ["<parameter=path>", '<param name="path">', "<function=find>", "lorem ipsum dolor " * 5]


def written(form: ToolForm, name: str, arguments: dict[str, Any]) -> str:
    """A call as a template of this form writes it."""
    if form == "hermes":
        call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        return f"<tool_call>\n{call}\n</tool_call>"
    texts = {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in arguments.items()
    }
    if form == "minicpm5":
        values = "".join(
            f'<param name="{key}"><![CDATA[{text}]]></param>' for key, text in texts.items()
        )
        return f'<function name="{name}">{values}</function>'
    values = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def arguments_of(rng: random.Random, words: list[str]) -> tuple[str, dict[str, Any]]:
    def text() -> str:
        return "".join(rng.choice(words) for _ in range(rng.randrange(12)))

    if rng.random() < 0.6:
        return "write_file", {"path": "a.py", "content": text()}
    return "find", {"where": {"a": [1, text()]}, "most": rng.randrange(9), "words": ["a"]}


def mutated(rng: random.Random, text: str) -> str:
    for _ in range(rng.randrange(1, 4)):
        start = rng.randrange(len(text) + 1)
        end = min(start + rng.choice([0, 1, 5, 12, 30]), len(text))
        text = text[:start] + rng.choice(["", "", *WORDS]) + text[end:]
    return text


def check(form: ToolForm, text: str, rng: random.Random, **options: Any) -> dict[str, Any]:
    """Check that every cut gives the same, that whole calls are JSON, and that no text is lost."""
    options |= {"form": form, "tools": TOOLS}
    whole = told([text], **options)
    assert told(list(text), **options) == whole
    for _ in range(3):
        assert told(cuts(text, rng.randrange(10**6)), **options) == whole
    unfinished = is_unfinished(text, **options)
    for _, arguments in whole["calls"]:
        if not unfinished:
            assert isinstance(json.loads(arguments), dict)
    if not whole["calls"] and not options.get("cut"):
        assert whole["content"] == text
    return whole


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", quick(range(12), 1))
def test_calls_are_read_back_and_broken_ones_are_told_alike_in_every_cut(
    form: ToolForm, seed: int
) -> None:
    rng = random.Random(seed)
    plain = [word for word in WORDS if not word.startswith("<") or word == "<b>"]
    plain = [word for word in plain if word != "]]>"] if form == "minicpm5" else plain
    for _ in range(60):
        calls = [arguments_of(rng, plain) for _ in range(rng.randrange(1, 4))]
        text = "\n".join(written(form, *call) for call in calls)
        found = check(form, text, rng)
        wanted = [(name, json.dumps(given, ensure_ascii=False)) for name, given in calls]
        assert found == {"content": "", "reasoning": "", "calls": wanted}
        text = mutated(rng, "\n".join(written(form, *arguments_of(rng, WORDS)) for _ in range(2)))
        check(form, text, rng, cut=rng.random() < 0.3, parallel=rng.random() < 0.7)


def told_while_open(form: ToolForm, text: str, size: int) -> Iterator[str]:
    parser = OutputParser(tools=TOOLS, form=form)
    for at in range(0, len(text), size):
        for piece in parser.feed(text[at : at + size]):
            assert piece.kind != "content"
            if piece.kind == "tool_arguments":
                yield piece.text


LONG = "".join(f'line {number} of\t"<b>" \\ é\n' for number in range(200))


@pytest.mark.parametrize("form", FORMS)
def test_a_long_text_is_told_as_it_comes(form: ToolForm) -> None:
    wanted = {"path": "a.py", "content": LONG}
    text = written(form, "write_file", wanted)
    pieces = list(told_while_open(form, text, 5))
    assert len(pieces) > len(text) // 10
    assert max(map(len, pieces)) < 120
    assert told([text], form=form, tools=TOOLS)["calls"] == [
        ("write_file", json.dumps(wanted, ensure_ascii=False))
    ]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cut", [True, False])
def test_a_long_call_without_an_end_never_looks_whole(form: ToolForm, cut: bool) -> None:
    text = written(form, "write_file", {"path": "a.py", "content": LONG})
    text = text[: len(text) // 2]
    ((name, arguments),) = told([text], form=form, tools=TOOLS, cut=cut)["calls"]
    assert name == "write_file" and len(arguments) > len(text) // 2
    with pytest.raises(json.JSONDecodeError):
        json.loads(arguments)
    assert is_unfinished(text, form=form, tools=TOOLS, cut=cut)


def test_text_that_is_null_or_json_is_told_when_its_type_is_certain() -> None:
    for value in (None, {"a": LONG}, LONG):
        text = written("qwen3_xml", "find", {"note": value})
        pieces = list(told_while_open("qwen3_xml", text, 5))
        assert (len(pieces) > 10) == (value is LONG)


def test_long_json_that_goes_wrong_stays_unfinished_and_its_rest_is_text() -> None:
    text = '<tool_call>{"name": "write_file", "arguments": {"path": "a", "content": "' + "b" * 99
    bad = text + '"c" d"}}</tool_call>'
    found = told(list(bad), form="hermes", tools=TOOLS)
    assert found["calls"] == [("write_file", '{"path": "a", "content": "' + "b" * 99 + '"')]
    assert found["content"] and bad.endswith(found["content"])
    assert is_unfinished(bad, form="hermes", tools=TOOLS)


def test_one_call_is_read_where_one_is_allowed() -> None:
    both = '<tool_call>[{"name": "find"}, {"name": "find"}]</tool_call>'
    found = told([both], form="hermes", tools=TOOLS, parallel=False)
    assert found["calls"] == [("find", "{}")]
    assert len(told([both], form="hermes", tools=TOOLS)["calls"]) == 2


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("<param name='path'>a</param>", {"path": "a"}),
        ('\n<param name="path">\n a \n</param>\n', {"path": "a"}),
        ('<param name="path"><![CDATA[ a]]b </param> ]]></param>', {"path": " a]]b </param> "}),
        ('<param name="path">a<param name="content">b', {"path": "a", "content": "b"}),
    ],
)
def test_a_call_of_minicpm5(text: str, wanted: dict[str, str]) -> None:
    text = f'Well.\n<function name="write_file">{text}</function>'
    found = check("minicpm5", text, random.Random(0))
    assert found["content"] == "Well."
    assert [json.loads(arguments) for _, arguments in found["calls"]] == [wanted]


def test_the_template_of_minicpm5_is_recognized() -> None:
    source = '<function name="{{ name }}"><param name="{{ key }}">'
    assert ChatTemplate(source).traits.tool_form == "minicpm5"


@pytest.mark.parametrize(
    ("end", "reason"), [("", "stop"), ("\n</parameter>\n</function>", "tool_calls")]
)
def test_a_choice_with_an_unfinished_call_asks_nobody_to_run_it(end: str, reason: str) -> None:
    text = written("qwen3_xml", "write_file", {"path": "a.py", "content": LONG})
    text = text[: text.index("\n</parameter>\n</function>")] + end
    body = ChatCompletionRequest.model_validate({"messages": []})
    parser = OutputParser(tools=TOOLS)
    choice = ChatChoiceState(body, parser, None, 0)  # type: ignore[arg-type]
    choice.push([Delta(0, text=text)])
    choice.push([Delta(0, finish_reason="stop")])
    assert choice.result().finish_reason == reason
