"""Tool calls as tags: what ends a value, what models forget, and what is no call."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic_core import from_json
from tool_texts import TOOLS, read_of, told, told_alike

from vlm_serve.preprocess.text.template import ChatTemplate
from vlm_serve.server.answers.tag_calls import TagReader

CLOSED = "</parameter>\n</function>\n</tool_call>"
EXAMPLE = f"<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n{CLOSED}"


def call(name: str, **values: str) -> str:
    """A call as the chat template writes it."""
    given = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{given}</function>\n</tool_call>"


def block(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def write(content: str) -> str:
    return call("write_file", path="x.md", content=content)


def calls(text: str, **options: Any) -> list[tuple[str, Any]]:
    found = told_alike(text, tools=TOOLS, **options)["calls"]
    return [(name, json.loads(arguments)) for name, arguments in found]


@pytest.mark.parametrize(
    "value",
    [
        "use <parameter=a>1</parameter> so",
        "a </parameter> b",
        "</parameter> is the end",
        "a </tool_call> b",
        "a\n</tool_call>\nb",
        "a\n</function>\nb",
        "a\n</function>\n</tool_call>\nb",
        "</parameter>\n</parameter>",
        "</parameter>\n</function> and more",
        f"All of it:\n{CLOSED}\nand more",
        f"An example:\n{EXAMPLE}\nand more",
        f"Two:\n{EXAMPLE}\n{EXAMPLE}",
        EXAMPLE.replace("<tool_call>\n", "").replace("\n</tool_call>", ""),
        "begin with\n<tool_call>\n<function=f>\n<parameter=a>\n",
        "<tool_call>",
        "<tool_call>\n<function=stop>",
        "<function=stop>",
        "an unknown\n</parameter>\n<parameter=other> in the way",
        "</think>",
        "<think>",
        "<",
        "</para",
        "\n\n  def f():\n    pass\n\n",
        "<parameter=path>",
        "known\n<parameter=path>\nx\n</parameter>\nbut quoted",
        "",
    ],
)
def test_a_value_may_hold_any_tag(value: str) -> None:
    tools = {"write_file": TOOLS["write_file"] | {"additionalProperties": False}, "stop": {}}
    wanted = ("write_file", json.dumps({"path": "x.md", "content": value}))
    text = write(value)
    assert told_alike(text, tools=tools)["calls"] == [wanted]
    assert told([f"{text}\n{text}"], tools=tools)["calls"] == [wanted, wanted]
    first = call("write_file", content=value, path="x.md")
    again = ("write_file", json.dumps({"content": value, "path": "x.md"}))
    assert told_alike(first, tools=tools) == {"content": "", "reasoning": "", "calls": [again]}


_PARTS = ["</parameter>", "</function>", "</tool_call>", "<tool_call>", "<function=f>", "</think>"]
_PARTS += ["<parameter=x>", "<parameter=path>", "<function=stop>", *"ab <>/`\n"]
_DOUBT = re.compile(
    r"</parameter>\s*(<parameter=|</function>|</tool_call>|\Z)"
    r"|</function>\s*(</tool_call>|<tool_call>|<function=)"
    r"|\n[ \t]*<parameter=(path|content)>"
)
_VALUES = st.lists(st.sampled_from(_PARTS), max_size=8).map("".join)


@given(st.lists(st.tuples(_VALUES, _VALUES), min_size=1, max_size=3), st.randoms())
def test_what_the_template_writes_is_read_back(values: list[tuple[str, str]], rng: Any) -> None:
    assume(not any(_DOUBT.search("\n" + value) for pair in values for value in pair))
    given = [{"path": path, "content": content} for path, content in values]
    text = "\n".join(call("write_file", **each) for each in given)
    pieces, at = [], 0
    while at < len(text):
        size = rng.choice([1, 2, 5, 20])
        pieces.append(text[at : at + size])
        at += size
    wanted = [("write_file", json.dumps(each)) for each in given]
    assert told(pieces, tools=TOOLS)["calls"] == told([text], tools=TOOLS)["calls"] == wanted


def test_the_template_writes_calls_in_that_form() -> None:
    function = {"name": "write_file", "arguments": {"path": "x.md", "content": "a </parameter> b"}}
    made = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
    root = Path(__file__).resolve().parents[3]
    source = (root / "examples" / "chat_template.jinja").read_text(encoding="utf-8")
    text = ChatTemplate(source).render([{"role": "user", "content": "a"}, made])
    assert write("a </parameter> b") in text


CASES: list[tuple[str, list[tuple[str, Any]]]] = [
    (  # </parameter> forgotten before the next, and before the end
        block("<function=write_file>\n<parameter=path>\na.py\n<parameter=content>\nb\n</function>"),
        [("write_file", {"path": "a.py", "content": "b"})],
    ),
    (
        "<tool_call><function=get_weather><parameter=city>Oslo<parameter=days>3</function>",
        [("get_weather", {"city": "Oslo", "days": 3})],
    ),
    (  # </function> forgotten
        block("<function=write_file>\n<parameter=path>\na.py\n</parameter>"),
        [("write_file", {"path": "a.py"})],
    ),
    (block("<function=stop>"), [("stop", {})]),
    (  # </tool_call> forgotten, at the end and before another call
        write("a").removesuffix("\n</tool_call>"),
        [("write_file", {"path": "x.md", "content": "a"})],
    ),
    (
        write("a").removesuffix("\n</tool_call>") + "\n" + call("stop"),
        [("write_file", {"path": "x.md", "content": "a"}), ("stop", {})],
    ),
    (  # everything behind the value
        "<tool_call>\n<function=write_file>\n<parameter=path>\na.py\n</parameter>\n",
        [("write_file", {"path": "a.py"})],
    ),
    (  # two in one block
        block(
            "<function=get_weather>\n<parameter=city>\nA\n</parameter>\n</function>\n"
            "<function=get_weather>\n<parameter=city>\nB\n</parameter>\n</function>"
        ),
        [("get_weather", {"city": "A"}), ("get_weather", {"city": "B"})],
    ),
    (block("<function=stop>\n</function>\n<function=stop>\n</function>"), [("stop", {})] * 2),
    (  # </tool_call> forgotten before text and another call
        write("a").removesuffix("\n</tool_call>") + "\nAnd:\n" + write("b"),
        [("write_file", {"path": "x.md", "content": "a"})]
        + [("write_file", {"path": "x.md", "content": "b"})],
    ),
    (
        write("a").removesuffix("\n</tool_call>") + "\nAnd:\n<function=stop>\n</function>",
        [("write_file", {"path": "x.md", "content": "a"}), ("stop", {})],
    ),
    (  # <tool_call> forgotten
        write("a").removeprefix("<tool_call>\n"),
        [("write_file", {"path": "x.md", "content": "a"})],
    ),
    (
        write("a").removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"),
        [("write_file", {"path": "x.md", "content": "a"})],
    ),
    (  # marks around names
        '<tool_call>\n<function="get_weather">\n<parameter="city">\nOslo\n' + CLOSED,
        [("get_weather", {"city": "Oslo"})],
    ),
    (  # an argument that the schema does not name, and does not forbid
        call("get_weather", city="Oslo", reason="asked"),
        [("get_weather", {"city": "Oslo", "reason": "asked"})],
    ),
]


@pytest.mark.parametrize(("text", "wanted"), CASES)
def test_what_models_forget_is_put_right(text: str, wanted: list[tuple[str, Any]]) -> None:
    assert calls(text) == wanted
    content = "Well." + ("And:" if "And:" in text else "")
    assert told([f"Well.\n\n{text}"], tools=TOOLS)["content"] == content


@pytest.mark.parametrize("text", [write("a"), call("stop")])
@pytest.mark.parametrize("opened", [True, False])
def test_text_on_another_line_may_follow_a_call_without_its_last_tag(
    text: str, opened: bool
) -> None:
    text = text.removesuffix("\n</tool_call>")
    text = text if opened else text.removeprefix("<tool_call>\n")
    found = told_alike(f"{text}\n\nDone <b>.", tools=TOOLS)
    assert found["content"] == "Done <b>." and len(found["calls"]) == 1
    same_line = f"{text} is how."
    assert told_alike(same_line, tools=TOOLS)["content"] == same_line


def test_a_call_without_its_last_tag_that_the_limit_cuts_never_looks_whole() -> None:
    text = write("a").removesuffix("\n</tool_call>")
    for behind in ("\nb", "\nb <b> c"):
        ((_, arguments),) = told_alike(text + behind, cut=True, tools=TOOLS)["calls"]
        with pytest.raises(json.JSONDecodeError):
            json.loads(arguments)


def test_lines_may_end_as_on_windows() -> None:
    text = call("write_file", path="x.md", content="a\nb\n").replace("\n", "\r\n")
    assert calls(text) == [("write_file", {"path": "x.md", "content": "a\r\nb\r\n"})]
    assert calls(call("get_weather", city="\r", days="3"))[0][1] == {"city": "\r", "days": 3}
    ((_, cut),) = told([text[: text.index("b")]], cut=True, tools=TOOLS)["calls"]
    assert from_json(cut, allow_partial=True) == {"path": "x.md"}
    assert cut.endswith('"a')


def test_half_of_a_pair_of_surrogates_can_be_sent() -> None:
    text = call("get_weather", where='{"a": "\\ud83d, \\ud83d\\ude00"}', city="\\ud83d")
    assert calls(text)[0][1] == {"where": {"a": "\ufffd, \U0001f600"}, "city": "\\ud83d"}


@pytest.mark.parametrize(
    "text",
    [
        call("rm", path="/"),
        block("no function"),
        block("<function=write_file>\nno parameter\n</function>"),
        block("<function=get_weather"),
        "<tool_call>\n<function=write_file>\n<parameter=path>\nx.md\n</parameter>\n"
        "<parameter=content>\nhalf a",
        "<tool_call>\n<function=write_file>\n<parameter=path>\nx.md\n</tool_call>",
        "<tool_call>\n<function=stop>",
        "Calls begin with \n <tool_call> and with <function=stop> or <function=rm>.",
        "<function=stop>\n</function> in a sentence",
        "<function=stop>\n</function>\n<parameter=a>\n1",
        "<function=stop>\n</function>\n</parameter>",
        "<function=stop>\n</function>\n</function>",
        f"Write `{call('stop')}` for that.",
        f'Write "{write("a")}".',
        f"Like this:\n```xml\n{call('stop')}\n{call('stop')}\n```\nor not",
        "<function=", "<function=>", "<function=a b\n>", "a <", "<tool_call", "<tool_call>",
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_text(text: str) -> None:
    assert told_alike(text, tools=TOOLS) == {"content": text, "reasoning": "", "calls": []}


def test_a_call_with_a_forgotten_end_has_all_that_is_required() -> None:
    tools = {"write_file": TOOLS["write_file"] | {"required": ["path", "content"]}}
    text = write("a")
    half = text[: text.index("<parameter=content>")]
    assert told_alike(half, tools=tools) == {"content": half, "reasoning": "", "calls": []}
    most = text.removesuffix("</function>\n</tool_call>")
    assert len(told_alike(most, tools=tools)["calls"]) == 1


def test_a_code_block_that_ends_before_a_call_does_not_quote_it() -> None:
    text = f"```python\nf()\n```\n{call('stop')}"
    assert calls(text) == [("stop", {})]
    assert calls(f'He said "f"{call("stop")}') == [("stop", {})]


def test_a_call_that_the_limit_cuts_never_looks_whole() -> None:
    """At every character: what has been read of it, and JSON without an end."""
    value = "a </parameter> b\n</tool_call>\n<parameter=x>"
    text = write(value)
    for length in range(1, len(text)):
        found = told_alike(text[:length], cut=True, tools=TOOLS)
        assert "<" not in found["content"]
        if "<function=write_file>" not in text[:length]:
            assert found["calls"] == []
            continue
        ((_, arguments),) = found["calls"]
        if "</function>" in text[:length]:
            assert json.loads(arguments) == {"path": "x.md", "content": value}
            continue
        with pytest.raises(json.JSONDecodeError):
            json.loads(arguments)
        assert from_json(arguments, allow_partial=True).items() <= {"path": "x.md"}.items()


def test_a_cut_value_that_is_no_json_is_left_out() -> None:
    text = (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nA\n</parameter>\n<parameter=days>"
    )
    ((_, arguments),) = told([text + "\nthr"], cut=True, tools=TOOLS)["calls"]
    assert from_json(arguments, allow_partial=True) == {"city": "A"}


@pytest.mark.parametrize(
    "text",
    [
        write("x" * 2000 + "<b>" * 500),
        write("</parameter> x " * 500),
        (write("a") + "\n") * 100,
        "<tool_call>" * 500,
        "<function=stop>" * 500,
        "<tool_call>\n<function=stop>\n<parameter=a>\n" * 200,
        "<tool_call>\n<function=write_file>\n<parameter=path>\n" * 200 + CLOSED,
        (write("<tool_call>\n<function=f>\n<parameter=a>\n") + "\n") * 100,
        (call("stop") + " again ") * 100,
        ("</parameter></function></tool_call> " + write("a")) * 50,
        (write("</parameter>\n</function>\n</tool_call>\n a") + " b ") * 50,
    ],
    ids=lambda text: str(text)[:40],
)
@pytest.mark.parametrize("reasoning", [None, True])
def test_the_work_grows_with_the_text(
    text: str, reasoning: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = read_of(monkeypatch, TagReader)
    told([text[at : at + 3] for at in range(0, len(text), 3)], tools=TOOLS, reasoning=reasoning)
    assert sum(read) <= 20 * len(text)
