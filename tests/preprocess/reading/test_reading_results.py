"""Results of tool calls stand in the order of the calls, in every API."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from conversation import say
from hostile_files import data_url, image_of
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_serve.preprocess.identity.affinity import affinity_keys
from vlm_serve.preprocess.prepare import Preprocessor
from vlm_serve.preprocess.reading.conversation import Conversation
from vlm_serve.preprocess.reading.items import read_past
from vlm_serve.preprocess.reading.reader import read_conversation

APIS = ("chat", "responses", "messages")
ID_FIELDS = {"chat": "tool_call_id", "responses": "call_id", "messages": "tool_use_id"}

Result = tuple[Any, ...]
"""An id, a text and perhaps a picture's URL."""
Turn = tuple[list[str], list[Result]]
"""The ids of an answer's calls, and the results behind it."""


def picture(number: int) -> str:
    return data_url("image/png", image_of("PNG", 32 + 32 * number, 32))


def body_of(api: str, *turns: Turn) -> dict[str, Any]:
    """Return a body with a question and so many answers with calls, each with results."""
    history: list[Any] = [{"role": "user", "content": "go"}]
    for calls, results in turns:
        history += _answer(api, calls) + _results(api, results)
    if api == "responses":
        return {"input": history}
    return {"messages": history} | ({"max_tokens": 1} if api == "messages" else {})


def _answer(api: str, ids: list[str]) -> list[Any]:
    calls = [(call, f"f{at}", {"at": at}) for at, call in enumerate(ids)]
    if api == "messages":
        blocks = [{"type": "tool_use", "id": i, "name": n, "input": a} for i, n, a in calls]
        return [{"role": "assistant", "content": blocks}]
    texts = [(i, {"name": name, "arguments": json.dumps(given)}) for i, name, given in calls]
    if api == "responses":
        return [{"type": "function_call", "call_id": i} | function for i, function in texts]
    made = [{"id": i, "type": "function", "function": function} for i, function in texts]
    return [{"role": "assistant", "content": None, "tool_calls": made}]


def _results(api: str, results: list[Result]) -> list[Any]:
    made: list[Any] = []
    for call, text, *urls in results:
        content: Any = [{"type": "text", "text": text}]
        for url in urls:
            source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
            block = {"type": "image", "source": source}
            part = {"type": "image_url", "image_url": {"url": url}}
            content.append(block if api == "messages" else part)
        if api == "responses":
            made.append({"type": "function_call_output", "call_id": call, "output": content})
        elif api == "messages":
            made.append({"type": "tool_result", "tool_use_id": call, "content": content})
        else:
            made.append({"role": "tool", "tool_call_id": call, "content": content})
    return [{"role": "user", "content": made}] if api == "messages" and made else made


def text_of(message: dict[str, Any]) -> str:
    content = message["content"]
    parts = [{"text": content}] if isinstance(content, str) else content
    return "".join(part.get("text", "") for part in parts)


def results_of(conversation: Conversation) -> list[str]:
    return [text_of(each) for each in conversation.messages if each["role"] == "tool"]


def read(api: str, *turns: Turn) -> Conversation:
    return read_conversation(api, body_of(api, *turns))


@st.composite
def groups(draw: st.DrawFn) -> list[tuple[list[str], list[Result], list[Result]]]:
    """Draw answers' calls, their results in order, and the same in another one."""
    drawn = []
    for turn in range(draw(st.integers(1, 3))):
        count = draw(st.integers(1, 6))
        # Some clients count each answer's calls from zero.
        ids = [f"call_{at}" for at in range(count)]
        answered = draw(st.lists(st.booleans(), min_size=count, max_size=count))
        results: list[Result] = [
            (call, f"{turn}{call}", *([picture(at % 3)] if draw(st.booleans()) else ()))
            for at, (call, is_answered) in enumerate(zip(ids, answered, strict=True))
            if is_answered
        ]
        drawn.append((ids, results, draw(st.permutations(results))))
    return drawn


@settings(deadline=None, max_examples=60)
@given(groups())
def test_any_order_is_one_conversation(
    drawn: list[tuple[list[str], list[Result], list[Result]]],
) -> None:
    for api in APIS:
        one = read(api, *((calls, results) for calls, results, _ in drawn))
        other = read(api, *((calls, results) for calls, _, results in drawn))
        assert results_of(one) == [each[1] for _, results, _ in drawn for each in results]
        assert other.messages == one.messages
        assert [each.texts for each in other.media] == [each.texts for each in one.media]
        assert other.ignored == []
        assert affinity_keys(other, salt="", model="m") == affinity_keys(one, salt="", model="m")


@pytest.mark.parametrize("api", APIS)
def test_any_order_is_one_prompt(preprocessor: Preprocessor, api: str) -> None:
    calls = ["a", "b", "c"]
    results: list[Result] = [("a", "ALPHA"), ("b", "BETA"), ("c", "GAMMA")]
    prompts = {
        preprocessor.prepare(read(api, (calls, list(order)), (calls, results))).token_ids
        for order in itertools.permutations(results)
    }
    (prompt,) = prompts
    text = preprocessor.tokenizer.decode(prompt)
    assert text.find("ALPHA") < text.find("BETA") < text.find("GAMMA")


@pytest.mark.parametrize("api", APIS)
def test_pictures_follow_their_results(api: str) -> None:
    """Errors name the places of the request as it was sent."""
    results: list[Result] = [("b", "B", picture(1)), ("c", "C"), ("a", "A", picture(0))]
    found = read(api, (["a", "b", "c"], results))
    assert ["".join(each.texts) for each in found.media] == [picture(0), picture(1)]
    first, second = (each.param for each in found.media)
    place = {
        "chat": "messages[{0}].content[1].image_url.url",
        "responses": "input[{1}].output[1].image_url.url",
        "messages": "messages[2].content[{2}].content[1].source.data",
    }[api]
    assert first == place.format(4, 6, 2) and second == place.format(2, 4, 0)


ORDERS: list[tuple[list[str], list[str], str, list[int]]] = [
    # calls, ids of the results 0, 1, 2, ..., their order in the prompt, those that are named
    (["a", "b"], ["b", "a"], "10", []),
    (["a", "b", "c"], ["c", "a"], "10", []),
    (["a"], [], "", []),
    # An unknown id is that of a call left over, or of none.
    (["a", "b"], ["x", "a"], "10", [0]),
    (["a", "b", "c"], ["c", "x", "a"], "210", [1]),
    (["a", "b"], ["x", "b", "a"], "210", [0]),
    (["a", "b"], ["x", "y"], "01", [0, 1]),
    ([], ["x", "a"], "01", [0, 1]),
    # A second result of a call comes last.
    (["a", "b"], ["b", "b", "a"], "201", [1]),
    (["a", "b", "c"], ["a", "a", "c"], "021", [1]),
    # Equal ids are taken in their order.
    (["a", "a", "b"], ["b", "a", "a"], "120", []),
    (["", ""], ["", ""], "01", []),
    (["a", ""], ["", "a"], "10", []),
]


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(("calls", "given", "order", "named"), ORDERS)
def test_odd_ids_are_named_and_never_refused(
    api: str, calls: list[str], given: list[str], order: str, named: list[int]
) -> None:
    found = read(api, (calls, [(call, str(at)) for at, call in enumerate(given)]))
    assert "".join(results_of(found)) == order
    first = {
        "chat": "messages[{}]",
        "responses": "input[{}]",
        "messages": "messages[2].content[{}]",
    }
    start = {"chat": 2, "responses": 1 + len(calls), "messages": 0}[api]
    places = [first[api].format(start + at) for at in named]
    assert found.ignored == [f"{place}.{ID_FIELDS[api]}" for place in places]


def test_a_call_is_one_of_the_answer_before() -> None:
    """An id of an earlier answer is unknown, whether or not that call had a result."""
    for api in APIS:
        found = read(api, (["a", "b"], [("a", "0")]), (["c", "d"], [("b", "1"), ("c", "2")]))
        assert results_of(found) == ["0", "2", "1"]
        (named,) = found.ignored
        assert named.endswith(ID_FIELDS[api])


def test_answers_side_by_side_are_one_answer() -> None:
    """Some clients send a message for each call."""
    answers = [*_answer("chat", ["a"]), *_answer("chat", ["b"])]
    results = _results("chat", [("b", "B"), ("a", "A")])
    found = read_conversation("chat", {"messages": [say("go"), *answers, *results]})
    assert results_of(found) == ["A", "B"] and found.ignored == []


def test_texts_between_results_stay_in_their_places() -> None:
    text = {"type": "text", "text": "hm"}
    (results,) = _results("messages", [("b", "B"), ("a", "A")])
    second, first = results["content"]
    for turns, order in (
        ([[second, first, text]], ["A", "B", "hm"]),
        ([[text, second, first]], ["hm", "A", "B"]),
        ([[second, text, first]], ["A", "hm", "B"]),
        ([[second], [first, text]], ["A", "B", "hm"]),
        ([[second, text], [text, first]], ["A", "hm", "hm", "B"]),
    ):
        history = [say("go"), *_answer("messages", ["a", "b"])]
        history += [{"role": "user", "content": each} for each in turns]
        found = read_conversation("messages", {"messages": history, "max_tokens": 1})
        assert [text_of(each) for each in found.messages[2:]] == order
        assert found.ignored == []


def test_pictures_behind_their_results_stay_with_them() -> None:
    """Clients whose results hold no pictures send each one in a message behind its result."""
    shown = [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": picture(at)}}]}
        for at in range(3)
    ]
    results = _results("chat", [("c", "C"), ("b", "B"), ("a", "A")])
    body = body_of("chat", (["a", "b", "c"], []))
    body["messages"] += [*results[:2], shown[2], results[2], shown[0]]
    conversation = read_conversation("chat", body)
    assert results_of(conversation) == ["B", "C", "A"]
    roles = [message["role"] for message in conversation.messages[2:]]
    assert roles == ["tool", "tool", "user", "tool", "user"]
    assert conversation.ignored == []


def test_items_of_calls_and_outputs_in_turns_are_no_group() -> None:
    calls = _answer("responses", ["a", "b"])
    outputs = _results("responses", [("a", "A"), ("b", "B")])
    for order in ((0, 1), (1, 0)):
        items = [each for at in order for each in (calls[at], outputs[at])]
        found = read_conversation("responses", {"input": items})
        assert results_of(found) == ["AB"[at] for at in order] and found.ignored == []
    custom = [
        {"type": "custom_tool_call", "call_id": "x", "name": "f", "input": "1"},
        {"type": "custom_tool_call", "call_id": "y", "name": "f", "input": "2"},
        {"type": "custom_tool_call_output", "call_id": "y", "output": "Y"},
        {"type": "custom_tool_call_output", "call_id": "x", "output": "X"},
    ]
    assert results_of(read_conversation("responses", {"input": custom})) == ["X", "Y"]


def test_outputs_of_stored_calls_take_their_order() -> None:
    stored = [{"role": "user", "content": "go"}, *_answer("responses", ["a", "b"])]
    given: list[Result] = [("x", "X"), ("b", "B", picture(1)), ("a", "A", picture(0))]
    body = {"input": _results("responses", given), "previous_response_id": "resp_1"}
    found = read_conversation("responses", body)
    read_past(stored, found)
    assert results_of(found) == ["A", "B", "X"]
    assert ["".join(each.texts) for each in found.media] == [picture(0), picture(1)]
    assert found.ignored == ["input[0].call_id"]
    # The outputs are stored too when the conversation goes on.
    later = read_conversation("responses", {"input": "on", "previous_response_id": "resp_2"})
    read_past([*stored, *body["input"]], later)
    assert results_of(later) == ["A", "B", "X"]
    assert later.ignored == ["previous_response_id[3].call_id"]


def test_without_an_id_the_function_or_the_place_says_whose_result_it_is() -> None:
    def result(text: str, **fields: Any) -> dict[str, Any]:
        return {"role": "tool", "content": text, **fields}

    history = [say("go"), *_answer("chat", ["a", "b", "c"])]
    for results, order in (
        ([result("C", tool_call_id="c"), result("B"), result("A", tool_call_id="a")], "ABC"),
        ([result("A"), result("C", tool_call_id="c"), result("B", tool_call_id="b")], "ABC"),
        ([result("B", tool_call_id="b"), result("A"), result("C", tool_call_id=None)], "ABC"),
        ([result("C", name="f2"), result("A", name="f0"), result("B", name="f1")], "ABC"),
        ([result("C", name="f2"), result("A", name="x"), result("B")], "ABC"),
        ([result("A"), result("B"), result("C"), result("D")], "ABCD"),
    ):
        found = read_conversation("chat", {"messages": [*history, *results]})
        assert "".join(results_of(found)) == order and found.ignored == []
        ids = [each.get("tool_call_id") for each in found.messages[2:]]
        assert ids == ["a", "b", "c", None][: len(ids)]


def test_results_of_the_older_form_go_by_name() -> None:
    def call(name: str) -> dict[str, Any]:
        function = {"name": name, "arguments": "{}"}
        return {"role": "assistant", "content": None, "function_call": function}

    def result(name: str, text: str) -> dict[str, Any]:
        return {"role": "function", "name": name, "content": text}

    history = [
        call("f"),
        result("f", "0"),
        call("f"),
        call("g"),
        result("g", "2"),
        result("f", "1"),
    ]
    found = read_conversation("chat", {"messages": history})
    assert results_of(found) == ["0", "1", "2"] and found.ignored == []
    ids = [each["tool_call_id"] for each in found.messages if each["role"] == "tool"]
    assert ids == ["call_1", "call_2", "call_3"]


@pytest.mark.parametrize("given", [1, 1.5, ["a"], {"a": 1}, True])
def test_ids_that_are_no_text_are_compared_as_text(given: Any) -> None:
    """In Python an id may be anything; over HTTP that of a call may be."""
    history = [say("go"), *_answer("chat", [given, "b"])]
    results = _results("chat", [("b", "B"), (given, "A")])
    found = read_conversation("chat", {"messages": [*history, *results]})
    assert results_of(found) == ["A", "B"] and found.ignored == []


def test_the_message_to_continue_stays_the_last_one() -> None:
    body = body_of("chat", (["a", "b"], [("b", "B"), ("a", "A")]))
    found = read_conversation("chat", body | {"continue_final_message": True})
    assert results_of(found) == ["B", "A"]


def test_python_has_the_same_order(preprocessor: Preprocessor) -> None:
    turns = [(["a", "b"], [("b", "BETA"), ("a", "ALPHA")]), (["a", "b"], [("a", "x"), ("b", "y")])]
    messages = body_of("chat", *turns)["messages"]
    before = json.dumps(messages)
    text = preprocessor.tokenizer.decode(preprocessor.prepare(messages).token_ids)
    assert 0 < text.find("ALPHA") < text.find("BETA")
    assert json.dumps(messages) == before


def test_many_results_take_time_in_proportion() -> None:
    ids = [f"{at}" for at in range(20_000)]
    results: list[Result] = [(f"{at}", str(at)) for at in reversed(range(10_000, 30_000))]
    found = read("chat", (ids, results))
    assert results_of(found)[10_000:] == ids[10_000:] and len(found.ignored) == 10_000
