"""Bodies that would cost more than they are worth are refused before they are parsed."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin

import pytest
from annotated_types import MaxLen
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, FailFast
from serving import RunningServer, chat_body

from vlm_serve.errors import InvalidRequestError
from vlm_serve.server.api.cache.inspection import FlushRequest, ProbeRequest
from vlm_serve.server.api.cache.pins import PinRequest
from vlm_serve.server.api.completions import CompletionRequest
from vlm_serve.server.api.messages import MessagesRequest
from vlm_serve.server.api.responses.request import ResponsesRequest
from vlm_serve.server.api.shared.chat_request import ChatCompletionRequest
from vlm_serve.server.api.tokenization import DetokenizeRequest, TokenizeRequest
from vlm_serve.server.http import body as json_body
from vlm_serve.server.http.body import parse_json

JSON = {"Content-Type": "application/json"}
MODELS = (
    ChatCompletionRequest, CompletionRequest, ResponsesRequest, MessagesRequest, TokenizeRequest,
    DetokenizeRequest, ProbeRequest, PinRequest, FlushRequest,
)  # fmt: skip
MILLION = 1_000_000
PARTS = b'{"messages":[{"role":"user","content":['
CASES: dict[str, tuple[str, bytes]] = {
    "prompt of both kinds": ("completions", b'{"prompt":[1' + b',"x",1' * MILLION + b"]}"),
    "prompts": ("completions", b'{"prompt":[[1]' + b',["x"]' * 200_000 + b"]}"),
    "stop tokens": ("chat/completions", b'{"messages":[],"stop_token_ids":[1'
                    + b',"x"' * MILLION + b"]}"),
    "few stop tokens": ("chat/completions", b'{"messages":[],"stop_token_ids":[1'
                        + b',"x"' * 200_000 + b"]}"),
    "bias": ("chat/completions", b'{"messages":[],"logit_bias":{"a":"b"'
             + b"".join(b',"%d":"x"' % i for i in range(MILLION)) + b"}}"),
    "little bias": ("chat/completions", b'{"messages":[],"logit_bias":{"a":"b"'
                    + b"".join(b',"%d":"x"' % i for i in range(30_000)) + b"}}"),
    "parts": ("chat/completions", PARTS + b"1," * MILLION + b"1]}]}"),
    "few parts": ("chat/completions", PARTS + b"1," * 300_000 + b"1]}]}"),
    "messages": ("chat/completions", b'{"messages":[' + b"1," * 300_000 + b"1]}"),
    "unknown keys": ("chat/completions", b'{"messages":[]'
                     + b"".join(b',"k%d":1' % i for i in range(MILLION)) + b"}"),
    "fewer unknown keys": ("chat/completions", b'{"messages":[]'
                           + b"".join(b',"k%d":1' % i for i in range(50_000)) + b"}"),
    "items": ("responses", b'{"input":[' + b"1," * 300_000 + b"1]}"),
    "metadata": ("responses", b'{"input":"x","metadata":{"a":1'
                 + b"".join(b',"%d":1' % i for i in range(50_000)) + b"}}"),
    "strings": ("completions", b'{"prompt":[' + b'"",' * 15 * MILLION + b'""]}'),
    "brackets": ("completions", b"]" * 60 * MILLION),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_body_of_wrong_items_is_refused_fast_and_others_are_answered_meanwhile(
    fake: RunningServer, name: str
) -> None:
    path, body = CASES[name]
    waits: list[float] = []
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            start = time.process_time()
            assert fake.client.get("/health").status_code == 200
            waits.append(time.process_time() - start)

    asking = threading.Thread(target=ask)
    asking.start()
    start = time.process_time()
    try:
        response = fake.client.post(f"/v1/{path}", content=body, headers=JSON)
    finally:
        done.set()
        asking.join()
    # Before there was a bound it took from five seconds to a minute, and so did /health. These are
    # the process's own seconds, in which others do not have the processor.
    assert time.process_time() - start < 5
    assert max(waits) < 2
    assert response.status_code == 400, response.text[:300]
    assert len(response.content) < 3000


def test_the_limit_follows_from_the_context(fake: RunningServer) -> None:
    room = json_body.max_cost(fake.engine.max_model_len)
    ids = b'{"prompt":[' + b"1," * (room - 20) + b"1]}"
    answer = fake.client.post("/v1/completions", content=ids, headers=JSON)
    assert "JSON values" not in answer.text
    answer = fake.client.post("/v1/completions", content=ids + b"1," * 20, headers=JSON)
    assert answer.json()["error"]["code"] == "too_many_values"


Container = tuple[str, Any, tuple[Any, ...]]


def containers_of(model: type[BaseModel]) -> Iterator[Container]:
    """Every list and dict that a field may be, by name, with what bounds it."""
    for name, field in model.model_fields.items():
        yield from containers(f"{model.__name__}.{name}", field.annotation, tuple(field.metadata))


def containers(name: str, annotation: Any, bounds: tuple[Any, ...]) -> Iterator[Container]:
    origin, args = get_origin(annotation), get_args(annotation)
    if str(origin) == str(Annotated):
        found = [item for each in args[1:] for item in (each, *getattr(each, "metadata", ()))]
        yield from containers(name, args[0], (*bounds, *found))
    elif origin in (list, dict):
        yield name, origin, bounds
        for each in args:
            yield from containers(f"{name}[]", each, ())
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield from containers_of(annotation)
    else:
        for each in args:
            yield from containers(name, each, bounds)


@pytest.mark.parametrize("model", MODELS)
def test_every_list_and_object_of_a_request_is_bounded(model: type[BaseModel]) -> None:
    for name, kind, bounds in containers_of(model):
        assert any(isinstance(bound, MaxLen) for bound in bounds), name
        if kind is list:
            assert any(isinstance(bound, FailFast) for bound in bounds), name


@pytest.mark.parametrize(
    "body",
    [
        '{"a": 1}'.encode("utf-16"),
        '{"a": 1}'.encode("utf-16-le"),
        '{"a": 1}'.encode("utf-32"),
        b'{"a": "\xed\xa0\x80"}',
        b'{"a": "\xff"}',
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b"[" * 65 + b"]" * 65,
        b'{"a": "',
        b'{"a": "\\',
    ],
    ids=lambda body: repr(body[:24]),
)
def test_what_is_no_json_in_utf8_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        parse_json(body)
    assert raised.value.code == "invalid_json"


def test_a_byte_order_mark_is_not_part_of_the_text() -> None:
    assert parse_json(b"\xef\xbb\xbf[1]") == [1]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(alphabet='a"\\[]{},:\n中'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='a"\\]}'), inner),
)


@given(VALUES, st.integers(2, 20), st.booleans())
def test_the_count_does_not_depend_on_how_the_body_is_cut(
    value: Any, piece: int, ascii_only: bool
) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_body, "_PIECE_BYTES", piece)
        assert parse_json(body, 100_000) == value
        for limit in range(40):
            assert refused(body, limit) == (cost_of(value) > limit)


def refused(body: bytes, limit: int) -> bool:
    try:
        parse_json(body, limit)
    except InvalidRequestError as error:
        assert error.code == "too_many_values"
        return True
    return False


def cost_of(value: Any) -> int:
    """What the docs say, counted on the value: commas, colons, brackets, strings."""
    if isinstance(value, str):
        return 1
    if isinstance(value, list):
        return 4 + max(0, len(value) - 1) + sum(map(cost_of, value))
    if isinstance(value, dict):
        inner = sum(cost_of(each) for each in value.values())
        return 4 + max(0, len(value) - 1) + inner + 9 * len(value)
    return 0


def test_ordinary_bodies_are_far_from_the_limit() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {
        "type": "object",
        "properties": {f"p{i}": {"type": "string", "description": "x"} for i in range(20)},
    }}}  # fmt: skip
    body = chat_body("x" * 100_000, tools=[tool] * 100, stop=["a"] * 16)
    rng = random.Random(0)
    body["messages"] *= 1000
    rng.shuffle(body["messages"])
    assert parse_json(json.dumps(body).encode(), json_body.BASE_COST) == body
